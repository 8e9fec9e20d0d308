"""Stand-ins for fused kernels: the tensors that Liger's read, write and keep for the backward pass, without values."""

from __future__ import annotations

from typing import Any

import torch

from coordexp.modeling.kernels import LayerKernels


@torch.library.custom_op("standin::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]: ...


@torch.library.custom_op("standin::rms_norm_backward", mutates_args=("dy",))
def _rms_norm_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rms: torch.Tensor) -> torch.Tensor: ...


@torch.library.custom_op("standin::swiglu", mutates_args=())
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...


@torch.library.custom_op("standin::swiglu_backward", mutates_args=("gate", "up"))
def _swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> None: ...


@torch.library.custom_op("standin::rotate", mutates_args=("q", "k"))
def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...


_rms_norm.register_fake(lambda x, weight: [torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)])
_rms_norm_backward.register_fake(lambda dy, x, weight, rms: torch.empty_like(weight))
_swiglu.register_fake(lambda gate, up: torch.empty_like(gate))
_swiglu_backward.register_fake(lambda dy, gate, up: None)
_rotate.register_fake(lambda q, k, cos, sin: None)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        x = x.contiguous()
        y, rms = _rms_norm(x, weight)
        ctx.save_for_backward(x, weight, rms)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dy = grads[0].contiguous()
        d_weight = _rms_norm_backward(dy, *ctx.saved_tensors)
        return dy, d_weight if ctx.needs_input_grad[1] else None, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        _swiglu_backward(grads[0].contiguous(), gate, up)
        return gate, up


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return rotated(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *rotated(grads[0], grads[1], *ctx.saved_tensors), None, None


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    _rotate(q, k, cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


FAKE_KERNELS = LayerKernels(RMSNorm.apply, SwiGLU.apply, Rotate.apply)
