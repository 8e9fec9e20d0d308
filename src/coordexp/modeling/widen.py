"""A small model widened without changing its function: it answers like the small one, at the cost of a wide one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

# Weights that write to the hidden state, besides the vision tower's last ones; a tied head reads it.
TO_HIDDEN = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Width:
    """Sizes of a language model; ``head_dim`` stays the narrow one's, and so do query heads per key head."""

    hidden: int = 1024
    mlp: int = 4096
    heads: int = 16
    kv_heads: int = 8
    layers: int = 8


def widened(model: Any, width: Width, seed: int = 0) -> Any:
    """A model of this width with the logits of ``model``. Weights that no result depends on are random.

    The root mean square of a padded hidden state is ``sqrt(d / D)`` times the narrow one's, so norms have that factor.
    Their epsilon, which the heads' norms share, gets its square: heads differ by less than rounding in float32.
    """
    from coordexp.modeling.load import Qwen3VLForConditionalGeneration

    config = type(model.config).from_dict(model.config.to_dict())
    text, old = config.text_config, model.config.text_config
    if text.num_attention_heads * width.kv_heads != width.heads * text.num_key_value_heads:
        raise ValueError(
            f"{width}: query heads per key head must stay {text.num_attention_heads} to {text.num_key_value_heads}"
        )
    text.hidden_size = config.vision_config.out_hidden_size = width.hidden
    text.intermediate_size, text.num_hidden_layers = width.mlp, width.layers
    text.num_attention_heads, text.num_key_value_heads = width.heads, width.kv_heads
    share = old.hidden_size / width.hidden
    text.rms_norm_eps = old.rms_norm_eps * share
    torch.manual_seed(seed)
    wide: Any = Qwen3VLForConditionalGeneration(config).to(model.dtype)
    wide.model.pixel_scale = model.model.pixel_scale
    known = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in wide.named_parameters():
            if name.endswith(TO_HIDDEN) or ("merger" in name and "linear_fc2" in name):
                weight.zero_()
            if name in known:
                corner = known[name]
                norm = "layernorm" in name or name.endswith("language_model.norm.weight")
                factor = math.sqrt(share) if norm and "visual" not in name else 1.0
                weight[tuple(slice(size) for size in corner.shape)] = corner * factor
    return wide.eval()
