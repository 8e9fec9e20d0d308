"""Attention for packed rows, at a cost of Σ length² instead of (Σ length)².

Each kernel is registered with transformers by a name. A packed forward passes two arguments to the model
(:func:`row_arguments`):

* ``segments``, a :class:`Segments`: transformers passes unknown arguments on to every layer's attention function, also
  when gradient checkpointing recomputes. It is not a tensor, so DDP, FSDP and accelerate do not move it: lengths stay
  Python numbers, and reading them never waits for a device.
* ``attention_mask``, four-dimensional and empty: transformers returns a 4-D mask unchanged, and so does not build the
  (L, L) mask of the row, which no kernel would read.

The vision tower gets ``frames`` in the same way (:class:`coordexp.modeling.inputs.VisionTower`). Calls without them
(generation, padded batches) use transformers' own SDPA, on CPUs without its copies of keys and values.

Layers that are recomputed for their backward pass may keep their attention's output (:func:`recompute_layers`): it
takes as much memory as the layer's input, and most time of all that a layer of the vision tower recomputes.

L tokens of a row, S segments, H and H_kv heads, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # registers the operations of torch.ops.torch_attn
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

from coordexp.errors import ConfigError, require
from coordexp.modeling import cpu_products

Attention = Literal["packed", "varlen", "flash", "sdpa"]
_KEY = "model.attn_implementation"
_OPERATIONS: Any = torch.ops.torch_attn


class Segments:
    """Lengths of a packed row's segments. ``causal``: a token sees only earlier ones; patches see their whole image."""

    __slots__ = ("_cumulative", "causal", "lengths", "longest", "total")

    def __init__(self, lengths: Sequence[int], causal: bool = True) -> None:
        self.causal = causal
        self.lengths = tuple(int(length) for length in lengths)
        self.total = sum(self.lengths)
        self.longest = max(self.lengths, default=0)
        self._cumulative: Tensor | None = None

    def cumulative(self, device: torch.device) -> Tensor:
        """Start of each segment, and the total: (S + 1,) int32. Copied to a device once, not per layer."""
        if self._cumulative is None or self._cumulative.device != device:
            starts = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
            self._cumulative = starts.to(device, non_blocking=True)
        return self._cumulative


def row_arguments(lengths: Sequence[int]) -> dict[str, Any]:
    """Arguments of the model that keep the segments of a packed row apart. ``sdpa`` does not use them."""
    return {"segments": Segments(lengths), "attention_mask": torch.empty(1, 1, 1, 0)}


def transformers_names(attention: str) -> dict[str, str]:
    """The argument of ``set_attn_implementation`` for a value of ``model.attn_implementation``."""
    return dict.fromkeys(("text_config", "vision_config"), transformers_name(attention))


def transformers_name(attention: str) -> str:
    """The registered name of an attention."""
    # Given a name with "flash" in it, transformers' tower no longer splits images itself, which calls without `frames`
    # depend on.
    return f"coordexp_{attention.replace('flash', 'fa')}"


def check_attention(attention: str, device: str, half: bool) -> None:
    """Refuse an implementation that cannot train on ``device`` (``"cuda"`` or ``"cpu"``), before anything is loaded.

    ``half``: attention runs in bfloat16 or float16. Raises ConfigError, or MissingDependency without flash's package.
    """
    if attention in ("packed", "sdpa"):
        return
    if device != "cuda":
        raise ConfigError(f"{_KEY}: {attention} has no backward pass on the CPU; write packed")
    if not half:
        raise ConfigError(
            f"{_KEY}: {attention} computes in bfloat16 or float16 only; set training.bf16: true or "
            "model.dtype: bfloat16, or write packed"
        )
    if attention == "varlen" and not varlen_runs_on(torch.device("cuda", torch.cuda.current_device())):
        raise ConfigError(f"{_KEY}: varlen needs a GPU of compute capability 8.0 or newer; write packed")
    if attention == "flash":
        require("flash_attn", f"{_KEY}: flash")


@lru_cache(maxsize=8)
def varlen_runs_on(device: torch.device) -> bool:
    """Whether torch has its variable-length kernel for this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


# query (1, H, L, D), key and value (1, H_kv, L, D), segments, scaling, dropout → (1, L, H, D)
Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None, float], Tensor]


def attend_each_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """SDPA, one segment after the other: runs on any device in any number type."""
    grouped = key.shape[1] != query.shape[1]
    lengths = list(segments.lengths)
    options = {"dropout_p": dropout, "scale": scaling, "is_causal": segments.causal, "enable_gqa": grouped}
    parts = [
        cpu_products.attention(F.scaled_dot_product_attention, q, k, v, **options)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """torch's variable-length flash attention: one kernel for the row."""
    if dropout:
        raise ConfigError(f"{_KEY}: varlen has no dropout, and the checkpoint's attention_dropout is {dropout}")
    q_LHD, k_LHD, v_LHD = _rows_first(query, key, value)
    return _Varlen.apply(q_LHD, k_LHD, v_LHD, segments, scaling).unsqueeze(0)  # pyright: ignore[reportAttributeAccessIssue]


class _Varlen(torch.autograd.Function):
    """torch's own varlen_attn, whose output a recomputed layer takes from its first pass."""

    @staticmethod
    def forward(
        ctx: Any, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, segments: Segments, scaling: float | None
    ) -> Tensor:
        starts, longest = segments.cumulative(q_LHD.device), segments.longest
        window = [-1, 0] if segments.causal else [-1, -1]
        kept = _KEPT.get()
        # A layer whose attention is before all that it trains has none to keep.
        if kept is not None and (not any(ctx.needs_input_grad) or (segments.causal and not kept.causal)):
            kept = None
        if kept is None or not kept.recomputes:
            grouped = k_LHD.shape[1] != q_LHD.shape[1]
            found = _OPERATIONS._varlen_attn(
                q_LHD, k_LHD, v_LHD, starts, starts, longest, longest, segments.causal, scaling, window, grouped
            )
            if kept is not None:
                kept.outputs.append(found)
        else:
            found = next(kept.remaining)
        out_LHD, lse, random = (one.detach() for one in found)  # the one that is returned gets a history
        ctx.save_for_backward(q_LHD, k_LHD, v_LHD, starts, out_LHD, lse, random)
        ctx.rest = longest, segments.causal, scaling, window
        return out_LHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q_LHD, k_LHD, v_LHD, starts, out_LHD, lse, random = ctx.saved_tensors
        longest, causal, scaling, window = ctx.rest
        return *_OPERATIONS._varlen_attn_backward(
            grads[0], q_LHD, k_LHD, v_LHD, out_LHD, lse, starts, starts, longest, longest, causal, random, scaling,
            window,
        ), None, None  # fmt: skip


class _Kept:
    """Outputs of the attention of one layer's forward, for its recomputation."""

    def __init__(self, outputs: list[Any], recomputes: bool, causal: bool) -> None:
        self.outputs, self.recomputes, self.causal = outputs, recomputes, causal
        self.remaining: Iterator[Any] = iter(outputs)


_KEPT: ContextVar[_Kept | None] = ContextVar("kept attention", default=None)


def keeping_attention(causal: bool = True) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`: the recomputed pass takes the outputs of
    :func:`attend_varlen` from the first one; ``causal``: those of the language model too. Other kernels compute them
    again."""
    outputs: list[Any] = []

    @contextmanager
    def within(recomputes: bool) -> Iterator[None]:
        token = _KEPT.set(_Kept(outputs, recomputes, causal))
        try:
            yield
        finally:
            _KEPT.reset(token)

    return within(False), within(True)


def recompute_layers(model: Any, every: int) -> None:
    """Recompute the activations of every ``every``-th layer in the backward pass; 0: of none.

    Not their attention: an image's patches attend to thousands of others, and keeping the result is cheap. The language
    model's is kept unless all layers are recomputed, where memory is short.
    """
    if every:
        settings = {"use_reentrant": False, "context_fn": partial(keeping_attention, causal=every > 1)}
        model.gradient_checkpointing_enable(settings, every_n_layers=every)


def _rows_first(*parts_1HLD: Tensor) -> tuple[Tensor, ...]:
    # Not part[0], whose backward pass copies the gradient into zeros.
    return tuple(part.squeeze(0).transpose(0, 1) for part in parts_1HLD)


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """The flash-attn package: one kernel for the row."""
    flash: Any = require("flash_attn", f"{_KEY}: flash")
    q_LHD, k_LHD, v_LHD = _rows_first(query, key, value)
    starts, longest = segments.cumulative(query.device), segments.longest
    options = {"dropout_p": dropout, "softmax_scale": scaling, "causal": segments.causal}
    return flash.flash_attn_varlen_func(q_LHD, k_LHD, v_LHD, starts, starts, longest, longest, **options)[None]


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """varlen where it runs, else SDPA segment by segment."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    kernel = attend_varlen if half and not dropout and varlen_runs_on(query.device) else attend_each_segment
    return kernel(query, key, value, segments, scaling, dropout)


KERNELS: dict[str, Kernel] = {"packed": attend_packed, "varlen": attend_varlen, "flash": attend_flash}


def _attend_unpacked(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    # transformers' SDPA copies all keys and values to each query head if there is a mask. For each written token that
    # took up to ten times as long as the attention on CPUs, where torch's kernel needs no copies.
    groups, (batch, _, length, dim) = query.shape[1] // key.shape[1], query.shape
    if query.device.type != "cpu" or groups == 1 or (attention_mask is None and length > 1):
        options = {"attention_mask": attention_mask, "scaling": scaling, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, **options, **kwargs)[0]
    if query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        found = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True
        )
    else:  # the kernel for half precision is slow with a single row, so the heads of a group become rows
        if attention_mask is not None and length > 1:
            attention_mask = attention_mask.repeat(1, 1, groups, 1)
        rows = query.reshape(batch, -1, groups * length, dim)
        found = F.scaled_dot_product_attention(rows, key, value, attention_mask, dropout, scale=scaling)
        found = found.view(query.shape)
    return found.transpose(1, 2).contiguous()


def _attend(
    kernel: Kernel,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    # As transformers calls it, but for ``kernel``.
    if segments is None:
        assert attention_mask is None or attention_mask.numel(), "a packed row's segments were lost"
        own = partial(_attend_unpacked, module)
        options = {"attention_mask": attention_mask, "scaling": scaling, "dropout": dropout}
        return cpu_products.attention(own, query, key, value, **options, **kwargs), None
    if segments.total != query.shape[2] or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"packed attention got {query.shape[2]} queries and {key.shape[2]} keys for segments of "
            f"{segments.total} tokens; call the model with use_cache=False"
        )
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast casts the arguments of SDPA but not of the other kernels, and norms leave queries in float32.
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return kernel(query, key, value, segments, scaling, dropout), None


attend_each_image = qwen3_vl.Qwen3VLVisionAttention.forward


class ImageAttention(qwen3_vl.Qwen3VLVisionAttention):
    """The vision tower's attention, without the copies by which transformers' own takes a row apart and joins it."""

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: Any = None,
        max_seqlen: int | None = None,
        frames: Segments | None = None,
        segments: Segments | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns (L, D). Without ``frames``, as transformers does it. ``segments``: the language model's, not used."""
        if frames is None:
            return attend_each_image(self, hidden_states, cu_seqlens, position_embeddings, max_seqlen, **kwargs)
        q_LHD, k_LHD, v_LHD = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_LHD, k_LHD = apply_rotary_pos_emb_vision(q_LHD, k_LHD, *position_embeddings)
        attend: Any = AttentionInterface().get_interface(str(self.config._attn_implementation), sdpa_attention_forward)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (q_LHD, k_LHD, v_LHD))
        dropout = self.attention_dropout if self.training else 0.0
        output_1LHD, _ = attend(
            self, query, key, value, None, scaling=self.scaling, dropout=dropout, segments=frames, **kwargs
        )
        return self.proj(output_1LHD.flatten(2).squeeze(0))


# Without segments, ``sdpa`` is transformers' own, at the speed of cpu_products.
for _name, _kernel in {**KERNELS, "sdpa": attend_each_segment}.items():
    AttentionInterface.register(transformers_name(_name), partial(_attend, _kernel))
    AttentionMaskInterface.register(transformers_name(_name), sdpa_mask)
