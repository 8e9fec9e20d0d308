"""Attention for packed rows whose cost grows with Σ length², not with (Σ length)².

Registered with transformers under :data:`PACKED`. A packed forward hands over its segment lengths as a 4-D int64
``attention_mask`` of shape (1, 1, 1, S): transformers returns a 4-D mask to the attention function as it is, so the
lengths arrive through the documented interface, in every layer, and again when gradient checkpointing recomputes.
With any other mask (generation, padded batches) the function is transformers' own SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKED = "coordexp_packed"


def segment_lengths_mask(lengths: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """The ``attention_mask`` that makes :data:`PACKED` attention keep segments apart: (1, 1, 1, S) int64."""
    return torch.tensor(lengths, dtype=torch.int64, device=device).view(1, 1, 1, -1)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each segment. query (1, H, L, D), key/value (1, H_kv, L, D) → (1, L, H, D)."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    lengths = attention_mask.view(-1).tolist()
    if sum(lengths) != query.shape[2] or key.shape[2] != query.shape[2]:
        raise ValueError(
            f"packed attention got {query.shape[2]} queries and {key.shape[2]} keys for segments of {sum(lengths)} "
            "tokens; call the model with use_cache=False"
        )
    grouped = key.shape[1] != query.shape[1]
    parts = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=grouped)
        for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
