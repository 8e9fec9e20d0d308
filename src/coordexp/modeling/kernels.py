"""One kernel for each elementwise operation of Qwen3-VL's layers and of adapters, instead of three to ten.

They take as long as they move memory. RMSNorm, SwiGLU and rotary embeddings are Triton kernels of the package
liger-kernel. LayerNorm is torch's own kernel without autocast, which would convert to float32 and back; Liger's would
be compiled again for each length of a row. The second product of an adapter adds to its layer's result, where peft
scales and adds it in two more passes over memory.

:func:`fuse_layers` replaces forwards of single modules. An operation on tensors of two number types, such as float32
weights and bfloat16 activations, stays as transformers computes it: a kernel would round its result to the input's
type.

B batch, H heads, L tokens, D dimensions of a head.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from coordexp.config.schema import ModelConfig
from coordexp.errors import ConfigError
from coordexp.modeling.attention import attend_each_image

Pair = tuple[torch.Tensor, torch.Tensor]
_KEY = "model.fused_kernels"


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """``rms_norm(x, weight, epsilon)``; ``swiglu(gate, up)`` = silu(gate) * up; ``rotate(q_BHLD, k_BHLD, cos_BLD,
    sin_BLD)``, which may overwrite q and k."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair]


def wants_fused(config: ModelConfig, device: str) -> bool:
    """Whether to train with fused kernels on ``device`` (``"cuda"`` or ``"cpu"``). Loads nothing.

    Raises ConfigError: ``fused_kernels: true`` without a GPU or without the package.
    """
    if config.fused_kernels is True and device != "cuda":
        raise ConfigError(f"{_KEY}: true needs a GPU, and this run trains on the CPU; write auto or false")
    if config.fused_kernels is True and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            f"{_KEY}: true needs the package liger-kernel, which is not installed; pip install 'coordexp[kernels]', or "
            "write auto or false"
        )
    return device == "cuda" and config.fuses_on_gpu


def unfused_note(config: ModelConfig, device: str) -> str | None:
    """A line for the log if ``fused_kernels: auto`` trains on a GPU without them, because the package is missing."""
    if device != "cuda" or config.fused_kernels != "auto" or config.fuses_on_gpu:
        return None
    return (
        f"fused kernels: none, because liger-kernel is not installed; a step takes about a half longer ({_KEY}). To "
        "fuse them: pip install 'coordexp[kernels]'"
    )


def liger_kernels() -> LayerKernels:
    """Liger's kernels. Triton compiles them at their first call."""
    ops: Any = importlib.import_module("liger_kernel.ops")

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        # No offset; transformers' order of roundings; the gradient overwrites the one it is computed from.
        return ops.LigerRMSNormFunction.apply(x, weight, epsilon, 0.0, "llama", True)

    return LayerKernels(rms_norm, ops.LigerSiLUMulFunction.apply, ops.LigerRopeFunction.apply)


def fuse_layers(model: Any, kernels: LayerKernels) -> None:
    """Make the layers of a Qwen3-VL ``model`` use ``kernels``, in place. Call it before the model is wrapped."""
    for module in model.modules():
        if isinstance(module, qwen3_vl.Qwen3VLTextRMSNorm):
            module.forward = MethodType(partial(_rms_norm, kernels), module)
        elif isinstance(module, qwen3_vl.Qwen3VLTextMLP) and module.config.hidden_act == "silu":
            module.forward = MethodType(partial(_mlp, kernels), module)
        elif isinstance(module, torch.nn.LayerNorm):
            module.forward = MethodType(_layer_norm, module)
        elif hasattr(module, "lora_A") and isinstance(module.base_layer, torch.nn.Linear) and not module.lora_variant:
            module.forward = MethodType(_with_adapter, module)
        elif isinstance(module, qwen3_vl.Qwen3VLTextAttention):
            _call_instead(module, apply_rotary_pos_emb=partial(_rotate, kernels))
        elif isinstance(module, qwen3_vl.Qwen3VLVisionAttention):
            rotate = {"apply_rotary_pos_emb_vision": partial(_rotate_patches, kernels)}
            _call_instead(module, **rotate, attend_each_image=_calling(attend_each_image, **rotate))


def _rms_norm(kernels: LayerKernels, module: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:
        return type(module).forward(module, x)
    return kernels.rms_norm(x, module.weight, module.variance_epsilon)


def _mlp(kernels: LayerKernels, module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.down_proj(kernels.swiglu(module.gate_proj(x), module.up_proj(x)))


def _layer_norm(module: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:
        return torch.nn.LayerNorm.forward(module, x)
    with torch.autocast(x.device.type, enabled=False):
        return functional.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def _with_adapter(module: Any, x: torch.Tensor) -> torch.Tensor:
    """``base(x) + scaling * dropout(x) A^T B^T``, of which the last product adds to the first and rounds once."""
    adapters = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or len(adapters) != 1:
        return type(module).forward(module, x)
    x_LI, (name,) = x.flatten(0, -2), adapters
    if x.dtype != module.lora_A[name].weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return type(module).forward(module, x)  # peft casts the adapter's input
    low_LR = module.lora_A[name](module.lora_dropout[name](x_LI)) * module.scaling[name]
    result_LO = module.base_layer(x_LI)
    # In place: the product before it keeps its factors only, and another result would first be filled with a copy.
    result_LO.addmm_(low_LR, module.lora_B[name].weight.to(low_LR.dtype).t())
    return result_LO.unflatten(0, x.shape[:-1])


def _rotate(kernels: LayerKernels, q_BHLD: torch.Tensor, k_BHLD: torch.Tensor, cos: Any, sin: Any) -> Pair:
    if not q_BHLD.dtype == k_BHLD.dtype == cos.dtype:
        return qwen3_vl.apply_rotary_pos_emb(q_BHLD, k_BHLD, cos, sin)
    return kernels.rotate(q_BHLD, k_BHLD, cos, sin)


def _rotate_patches(kernels: LayerKernels, q_LHD: torch.Tensor, k_LHD: torch.Tensor, cos: Any, sin: Any) -> Pair:
    """In float32, as transformers does in the tower: the kernel computes in the type of ``cos`` and rounds once."""
    q_BHLD, k_BHLD = (one.transpose(0, 1).unsqueeze(0) for one in (q_LHD, k_LHD))
    q_BHLD, k_BHLD = kernels.rotate(q_BHLD, k_BHLD, cos.float().unsqueeze(0), sin.float().unsqueeze(0))
    return q_BHLD.squeeze(0).transpose(0, 1), k_BHLD.squeeze(0).transpose(0, 1)


def _call_instead(module: Any, **functions: Callable[..., Any]) -> None:
    """Let this module's forward find other functions under the names of its globals. Other modules keep theirs."""
    module.forward = MethodType(_calling(type(module).forward, **functions), module)


def _calling(function: Any, **functions: Callable[..., Any]) -> Any:
    own = FunctionType(
        function.__code__,
        {**function.__globals__, **functions},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own
