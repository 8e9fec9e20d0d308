"""Rounding errors of Qwen3-VL's layers with and without fused kernels, forward and gradients.

TRITON_INTERPRET=1 python -m support.layer_errors [--heads]      as JSON, by Triton's interpreter on the CPU
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
from typing import Any, cast

import numpy as np
import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from coordexp.modeling.kernels import LayerKernels, fuse_layers, liger_kernels
from support.qwen_sizes import qwen3_vl_config

TOKENS = 6


def layer_errors(
    kernels: LayerKernels, dtype: torch.dtype, device: str, heads: bool = True
) -> dict[str, list[tuple[float, float]]]:
    """By layer: relative error of its output, of its input's gradient and of its weights' gradients, each (own, fused),
    against transformers' layer in float32. ``heads``: also norms of many heads, which take the interpreter 30 s."""
    config: Any = qwen3_vl_config("2B")
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.head_dim = 96, 200, 40  # no powers of two: kernels mask the rest
    text.num_attention_heads, text.num_key_value_heads = 4, 2
    vision.hidden_size, vision.intermediate_size, vision.num_heads = 144, 200, 2
    text._attn_implementation = vision._attn_implementation = "eager"
    torch.manual_seed(0)
    angles_L1D = torch.rand(TOKENS, 1, 1, device=device) * torch.arange(1.0, 37.0, device=device)

    def rotation(half: int, given: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles_1LD = torch.cat((angles_L1D[..., :half],) * 2, dim=-1).transpose(0, 1)
        return angles_1LD.cos().to(given), angles_1LD.sin().to(given)

    def text_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(x, position_embeddings=rotation(20, x.dtype))

    def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (one[0] for one in rotation(36, torch.float32))
        return layer(x[0], cu_seqlens=torch.tensor([0, TOKENS]), position_embeddings=(cos, sin))

    cases: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
        "decoder layer": (qwen3_vl.Qwen3VLTextDecoderLayer(text, 0), text_layer, (1, TOKENS, 96)),
        "vision block": (qwen3_vl.Qwen3VLVisionBlock(vision), block, (1, TOKENS, 144)),
    }
    if heads:  # many short rows take another kernel
        cases["norm of heads"] = (qwen3_vl.Qwen3VLTextRMSNorm(6), lambda norm, x: norm(x), (1, 4096, 8, 6))
    found = {}
    for name, (module, call, shape) in cases.items():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
        own = module.to(device, dtype)
        fused, exact = copy.deepcopy(own), copy.deepcopy(own).float()
        fuse_layers(fused, kernels)
        x, wanted = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        results = []
        for layer in (exact, own, fused):
            given = x.detach().to(next(layer.parameters()).dtype).requires_grad_()
            out = call(layer, given)
            out.backward(wanted.reshape(out.shape).to(out.dtype))
            weights = torch.cat([one.grad.flatten().float() for one in layer.parameters()])
            assert given.grad is not None
            results.append((out.detach().float(), given.grad.float(), weights))
        truth, *others = results
        found[name] = [
            tuple(float((one[part] - truth[part]).norm() / truth[part].norm()) for one in others) for part in range(3)
        ]
    return found


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
