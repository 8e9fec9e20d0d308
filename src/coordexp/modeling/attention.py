"""Attention for packed rows whose cost grows with Σ length², not with (Σ length)².

A packed forward hands over two ordinary arguments of the model (:func:`row_arguments`):

* ``segments``, a :class:`Segments`. transformers passes what it does not know on to the attention function of every
  layer, also when gradient checkpointing recomputes. It is no tensor, so DDP, FSDP and accelerate leave it where it is:
  lengths stay Python numbers, and reading them never waits for a device. What kernels want on the device is made once a
  forward and kept in it.
* ``attention_mask``, four-dimensional and empty: transformers returns such a mask as it is, instead of building the
  square one of a row's length.

Without ``segments`` (generation, padded batches) each of these is transformers' own SDPA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from coordexp.errors import ConfigError, require

Attention = Literal["packed", "flex", "varlen", "flash", "sdpa"]
_KEY = "model.attn_implementation"
_FLEX_BLOCK = 128


class Segments:
    """Lengths of a packed row's segments, and what attention kernels make of them, made once per device. ``causal``:
    whether a token sees only what stands before it; the vision tower's patches see their whole image."""

    __slots__ = ("_block_mask", "_cumulative", "causal", "lengths", "longest", "total")

    def __init__(self, lengths: Sequence[int], causal: bool = True) -> None:
        self.causal = causal
        self.lengths = tuple(int(length) for length in lengths)
        self.total = sum(self.lengths)
        self.longest = max(self.lengths, default=0)
        self._cumulative: Tensor | None = None
        self._block_mask: Any = None

    def cumulative(self, device: torch.device) -> Tensor:
        """Where each segment starts, and the total: (S + 1,) int32."""
        if self._cumulative is None or self._cumulative.device != device:
            starts = torch.tensor([0, *self.lengths]).cumsum(0, dtype=torch.int32)
            self._cumulative = starts.to(device, non_blocking=True)
        return self._cumulative

    def block_mask(self, device: torch.device) -> Any:
        """flex attention's block mask: within each segment."""
        if self._block_mask is None or self._block_mask.kv_indices.device != device:
            self._block_mask = _block_mask(self.lengths, device, self.causal)
        return self._block_mask


def row_arguments(lengths: Sequence[int]) -> dict[str, Any]:
    """Arguments of the model that keep the segments of a packed row apart; of no use to ``sdpa``."""
    return {"segments": Segments(lengths), "attention_mask": torch.empty(1, 1, 1, 0)}


def transformers_names(attention: str) -> dict[str, str]:
    """The names under which ``model.attn_implementation``'s value is registered with transformers, for the language
    model and for the vision tower."""
    if attention == "sdpa":
        return {"text_config": "sdpa", "vision_config": "sdpa"}
    return {"text_config": transformers_name(attention), "vision_config": _vision_name(attention)}


def transformers_name(attention: str) -> str:
    """The language model's attention under ``model.attn_implementation``'s value."""
    return "sdpa" if attention == "sdpa" else f"coordexp_{attention}"


def _vision_name(attention: str) -> str:
    """Without the word "flash", at which transformers' tower would no longer split what no ``frames`` keep apart."""
    return f"coordexp_vision_{attention.replace('flash', 'fa')}"


def check_attention(attention: str, device: str, half: bool) -> None:
    """Refuse an implementation that cannot train on ``device`` (``"cuda"`` or ``"cpu"``), before anything is loaded.

    Args:
        half: whether attention runs in bfloat16 or float16.

    Raises:
        ConfigError: with the reason. MissingDependency: flash without its package.
    """
    if attention in ("packed", "sdpa"):
        return
    if device != "cuda":
        raise ConfigError(f"{_KEY}: {attention} has no backward pass on the CPU; write packed")
    if attention in ("varlen", "flash") and not half:
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


# Each of the following: query (1, H, L, D), key and value (1, H_kv, L, D) → (1, L, H, D).
Kernel = Callable[[Tensor, Tensor, Tensor, Segments, float | None, float], Tensor]


def attend_each_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """SDPA, one segment after the other: any device, any number type."""
    grouped = key.shape[1] != query.shape[1]
    lengths = list(segments.lengths)
    parts = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=segments.causal, enable_gqa=grouped
        )
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2)


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """torch's own variable-length flash attention: one kernel for the row."""
    from torch.nn.attention.varlen import varlen_attn

    _refuse_dropout("varlen", dropout)
    q_LHD, k_LHD, v_LHD = (part[0].transpose(0, 1) for part in (query, key, value))
    options = _varlen_options(segments.causal)
    if "enable_gqa" not in options:
        k_LHD, v_LHD = (part.repeat_interleave(q_LHD.shape[1] // part.shape[1], dim=1) for part in (k_LHD, v_LHD))
    starts = segments.cumulative(query.device)
    longest = segments.longest
    output_LHD = varlen_attn(q_LHD, k_LHD, v_LHD, starts, starts, longest, longest, scale=scaling, **options)
    assert isinstance(output_LHD, Tensor)  # a tuple only where more is asked for
    return output_LHD[None]


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """torch's flex attention, compiled on a GPU; blocks without a pair of one segment are skipped."""
    _refuse_dropout("flex", dropout)
    block_mask = segments.block_mask(query.device)
    grouped = key.shape[1] != query.shape[1]
    attend = _flex(compiled=query.is_cuda)
    return attend(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=grouped).transpose(1, 2)


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """The package flash-attn: one kernel for the row."""
    flash: Any = require("flash_attn", f"{_KEY}: flash")
    q_LHD, k_LHD, v_LHD = (part[0].transpose(0, 1) for part in (query, key, value))
    starts, longest = segments.cumulative(query.device), segments.longest
    return flash.flash_attn_varlen_func(
        q_LHD,
        k_LHD,
        v_LHD,
        starts,
        starts,
        longest,
        longest,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=segments.causal,
    )[None]


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, dropout: float = 0.0
) -> Tensor:
    """varlen where it runs, SDPA segment by segment elsewhere: exact everywhere, and nothing to install."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    kernel = attend_varlen if half and not dropout and varlen_runs_on(query.device) else attend_each_segment
    return kernel(query, key, value, segments, scaling, dropout)


KERNELS: dict[str, Kernel] = {
    "packed": attend_packed,
    "flex": attend_flex,
    "varlen": attend_varlen,
    "flash": attend_flash,
}


def _attention_function(kernel: Kernel) -> Callable[..., tuple[Tensor, Any]]:
    """``kernel`` as transformers calls an attention function."""

    def attend(
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
        if segments is None:
            assert attention_mask is None or attention_mask.numel(), "a packed row's segments were lost on the way"
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        if segments.total != query.shape[2] or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"packed attention got {query.shape[2]} queries and {key.shape[2]} keys for segments of "
                f"{segments.total} tokens; call the model with use_cache=False"
            )
        query, key, value = (_as_autocast(part) for part in (query, key, value))
        return kernel(query, key, value, segments, scaling, dropout), None

    return attend


def _vision_function(attend: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
    """``attend`` as the vision tower calls it: what keeps its images apart has a name of its own, since it is handed
    the language model's ``segments`` too."""

    def attend_images(
        *args: Any, frames: Segments | None = None, segments: Segments | None = None, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        return attend(*args, segments=frames, **kwargs)

    return attend_images


for _name, _kernel in KERNELS.items():
    _attend = _attention_function(_kernel)
    AttentionInterface.register(transformers_name(_name), _attend)
    AttentionInterface.register(_vision_name(_name), _vision_function(_attend))
    AttentionMaskInterface.register(transformers_name(_name), sdpa_mask)


def _as_autocast(tensor: Tensor) -> Tensor:
    """Autocast knows SDPA but not the other kernels, and leaves queries that a norm made float32 as they are."""
    device_type = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else tensor


def _refuse_dropout(kernel: str, dropout: float) -> None:
    if dropout:
        raise ConfigError(f"{_KEY}: {kernel} knows no dropout, and the checkpoint's attention_dropout is {dropout}")


@lru_cache(maxsize=2)
def _varlen_options(is_causal: bool) -> dict[str, Any]:
    """Causal and grouped, in the words of the torch that is installed."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if not is_causal:
        causal = {}
    return causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


@lru_cache(maxsize=2)
def _flex(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


def _block_mask(lengths: Sequence[int], device: torch.device, causal: bool) -> Any:
    """Block (i, j) matters where j ≤ i and j's last segment is not before i's first; it needs no mask inside where
    j < i and both lie in one segment. Not causal, the same holds of j > i with the two exchanged. Read off the
    segments: evaluating a mask would cost L²."""
    from torch.nn.attention.flex_attention import BlockMask

    segment_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    total = len(segment_L)
    starts_N = torch.arange(0, total, _FLEX_BLOCK)
    ends_N = torch.clamp(starts_N + _FLEX_BLOCK, max=total) - 1
    first_N, last_N = segment_L[starts_N], segment_L[ends_N]
    index_N = torch.arange(len(starts_N))
    earlier_NN = index_N[None, :] < index_N[:, None]
    touched_NN = (earlier_NN | torch.eye(len(index_N), dtype=torch.bool)) & (last_N[None, :] >= first_N[:, None])
    full_NN = earlier_NN & (first_N[None, :] == last_N[:, None])
    if not causal:
        touched_NN, full_NN = touched_NN | touched_NN.T, full_NN | full_NN.T
    segment_L = segment_L.to(device)

    def same_segment(_batch: Any, _head: Any, query_idx: Tensor, key_idx: Tensor) -> Tensor:
        same = segment_L[query_idx] == segment_L[key_idx]
        return (query_idx >= key_idx) & same if causal else same

    def listed(chosen_NN: Tensor) -> tuple[Tensor, Tensor]:
        count_11N = chosen_NN.sum(1, dtype=torch.int32)[None, None]
        order_11NN = torch.argsort(chosen_NN.int(), dim=1, descending=True, stable=True).to(torch.int32)[None, None]
        return count_11N.to(device), order_11NN.to(device)

    return BlockMask.from_kv_blocks(
        *listed(touched_NN & ~full_NN),
        *listed(full_NN),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=same_segment,
        seq_lengths=(total, total),
    )
