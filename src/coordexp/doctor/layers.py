"""Rounding errors of Qwen3-VL's layers with and without fused kernels."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig

from coordexp.doctor.check import Row, judged
from coordexp.modeling.kernels import LayerKernels, fuse_layers, liger_kernels

TOKENS = 6
LIMIT = 1.25  # of the layers' own error: both round, in other places


def layer_errors(
    kernels: LayerKernels, dtype: torch.dtype, device: str, heads: bool = True
) -> dict[str, list[tuple[float, float]]]:
    """By layer: relative error of its output, of its input's gradient and of its weights' gradients, each (own, fused),
    against transformers' layer in float32. ``heads``: also norms of many heads, slow in Triton's interpreter."""
    # No powers of two: kernels mask the rest.
    text: Any = Qwen3VLTextConfig(
        hidden_size=96, intermediate_size=200, head_dim=40, num_attention_heads=4, num_key_value_heads=2
    )
    vision: Any = Qwen3VLVisionConfig(hidden_size=144, intermediate_size=200, num_heads=2)
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
    found: dict[str, list[tuple[float, float]]] = {}
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
        own_error, fused_error = (
            [float((mine - true).norm() / true.norm()) for mine, true in zip(one, truth, strict=True)] for one in others
        )
        found[name] = list(zip(own_error, fused_error, strict=True))
    return found


def fused_kernels() -> Row:
    """liger-kernel's on this GPU: in bfloat16, errors not much larger than those of the layers themselves."""
    name = "fused kernels, bfloat16"
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return Row(name, "skipped", "needs a GPU and the package liger-kernel")
    errors = [pair for layer in layer_errors(liger_kernels(), torch.bfloat16, "cuda").values() for pair in layer]
    worst = max(fused / own for own, fused in errors)
    figure = f"{worst:.2f} of the error of transformers' layers, allowed {LIMIT}; with gradients"
    advice = "set model.fused_kernels: false, and report this table"
    return judged(name, worst <= LIMIT, figure, advice, error=worst)
