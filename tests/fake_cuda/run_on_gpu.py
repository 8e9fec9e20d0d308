"""Train shipped configurations with a tiny model on a GPU that is simulated with values, as ``run_shipped.py`` does.

    python tests/fake_cuda/run_on_gpu.py --out FOLDER [ROW …]

Results are ``FOLDER/cuda/ROW.json``. An operand on another device ends a row; waits of the host and copies from
pageable memory are counted.
"""

from __future__ import annotations

import simulated_h100  # isort: skip  # before torch

from typing import Any

from run_shipped import Machine, main
from valued_cuda import CUDA, RECORD, CudaTensor, OnCuda


def seen() -> dict[str, Any]:
    return {
        "waits": [[*place, count] for place, count in sorted(RECORD.waits.items())],
        "pageable": [[*place, size] for place, size in sorted(RECORD.pageable.items())],
    }


GPU = Machine("cuda", CUDA, OnCuda, simulated_h100.read_scalars, (CudaTensor,), seen)

if __name__ == "__main__":
    main(GPU)
