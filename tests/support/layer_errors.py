"""liger-kernel's kernels on a CPU, by Triton's interpreter.

TRITON_INTERPRET=1 python -m support.layer_errors [--heads]      as JSON; --heads takes 30 s more
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, cast

import numpy as np
import torch

from coordexp.doctor.exactness import layer_errors
from coordexp.modeling.kernels import liger_kernels


def interpret() -> None:
    """Fill two gaps of Triton's interpreter: numbers that kernels convert, and ``rsqrt`` of libdevice."""
    tl, interpreter, rms_norm = (
        cast(Any, importlib.import_module(name))
        for name in ("triton.language", "triton.runtime.interpreter", "liger_kernel.ops.rms_norm")
    )
    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = with_floats
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)


if __name__ == "__main__":
    interpret()
    with_heads = "--heads" in sys.argv
    # The interpreter computes bfloat16 as integers; float16 takes the same code.
    kinds = {"float32": torch.float32, "float16": torch.float16}
    print(json.dumps({kind: layer_errors(liger_kernels(), dtype, "cpu", with_heads) for kind, dtype in kinds.items()}))
