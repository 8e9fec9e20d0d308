"""Products in bfloat16 on CPUs without fast instructions for them: of the same rounded factors, multiplied and summed
in float32, and rounded once, as other machines do it. torch's own loop there takes ten times as long as this, with
its conversions (6.3 ms against 0.6, 150 x 192 x 576, one core of an AMD EPYC with AVX2).

N rows, K inputs, M outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LEAST_ROWS = 8  # for fewer, converting a wide layer's weights takes longer than the loop
_BLOCK = 1 << 20  # weights that are converted at a time: they stay in the cache


@cache
def multiplies_bfloat16() -> bool:
    """Whether torch has products in bfloat16 for this CPU, other than a plain loop."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def multiplies_bfloat16_faster() -> bool:
    """Whether this CPU multiplies twice in bfloat16 in less time than once in float32. Intel's without matrix tiles do
    not: one product takes 42 ms there, against 25 (841 x 2,048 x 1,024, one core)."""
    able = torch.cpu.get_capabilities()
    intel = str(able.get("cpu_name", "")).startswith("Intel")
    return multiplies_bfloat16() and (not intel or bool(able.get("amx_bf16")))


def _is_slow(x: Tensor, *others: Tensor | None) -> bool:
    # Whether torch would multiply these in bfloat16 by its loop. An engine's compiled model keeps it; number types that
    # torch refuses together are left to it.
    if torch.compiler.is_compiling() or x.device.type != "cpu" or multiplies_bfloat16():
        return False
    types = {x.dtype} | {one.dtype for one in others if one is not None}
    if torch.is_autocast_enabled("cpu"):  # leaves float64 as it is
        return torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.float64 not in types
    return types == {torch.bfloat16}


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
        x = x.to(torch.bfloat16)
        ctx.save_for_backward(x, weight_MK)
        ctx.bias_dtype = None if bias_M is None else bias_M.dtype
        inputs, height = x.float(), max(1, _BLOCK // weight_MK.shape[1])
        blocks = weight_MK.split(height)
        biases = [None] * len(blocks) if bias_M is None else _rounded(bias_M).split(height)
        with torch.autocast("cpu", enabled=False):
            parts = [
                functional.linear(inputs, _rounded(block), bias).to(torch.bfloat16)
                for block, bias in zip(blocks, biases, strict=True)
            ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight_MK = ctx.saved_tensors
        d_NM = grads[0].flatten(0, -2).float()
        d_x = d_weight_MK = d_bias_M = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                d_x = (d_NM @ _rounded(weight_MK)).to(torch.bfloat16).view_as(x)
            if ctx.needs_input_grad[1]:
                d_weight_MK = (d_NM.t() @ x.flatten(0, -2).float()).to(torch.bfloat16).to(weight_MK.dtype)
            if ctx.needs_input_grad[2]:
                d_bias_M = d_NM.sum(0).to(torch.bfloat16).to(ctx.bias_dtype)
        return d_x, d_weight_MK, d_bias_M


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """As :func:`torch.nn.functional.linear`, and under autocast too: (…, K) → (…, M)."""
    if (
        not _is_slow(x, weight_MK, bias_M) or x.numel() < _LEAST_ROWS * x.shape[-1]
    ):  # a compiled model must not ask for sizes
        return functional.linear(x, weight_MK, bias_M)
    return _Product.apply(x.to(torch.bfloat16), weight_MK, bias_M)  # pyright: ignore[reportReturnType]


def attention(attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The output of ``attend(query, key, value, **options)``, torch's SDPA for example. Only its backward pass needs
    float32 for its speed."""
    if not torch.is_grad_enabled() or not _is_slow(query, key, value):
        return attend(query, key, value, **options)
    with torch.autocast("cpu", enabled=False):
        return attend(_rounded(query), _rounded(key), _rounded(value), **options).to(torch.bfloat16)


class Linear(torch.nn.Linear):
    """torch's own, by :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether ``module`` is a plain linear layer, and none of a quantised kind."""
    return type(module) in (torch.nn.Linear, Linear)


def take_linear_layers(model: torch.nn.Module) -> None:
    """Make the linear layers of ``model`` use :func:`linear`, in place: their weights and names stay."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Linear
