"""Inference with weights that FSDP shards over ranks: every forward pass gathers them from all ranks, so all ranks must
make equally many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from coordexp import distributed


def is_sharded(model: Any) -> bool:
    """Whether FSDP shards the model's weights, or some of them."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def missing_calls(model: Any, own: int) -> int:
    """How many calls of ``model`` the rank with the most makes beyond this rank's ``own``; 0 if the model is not
    sharded. A collective call then: every rank calls it before its first of these calls."""
    return int(distributed.all_reduce([own], "max")[0]) - own if is_sharded(model) else 0


def any_rank_continues(own: bool, *, sharded: bool) -> bool:
    """Whether a further forward pass is needed: on this rank (``own``) or, if the model is ``sharded``, on any rank. A
    collective call then, before each further pass and until it returns False."""
    return distributed.all_reduce([own], "max")[0] > 0 if sharded else own


def smallest_prompt(model: Any) -> dict[str, torch.Tensor]:
    """The model's arguments for an image of one token, which use all weights: for a rank that only has to take part."""
    config, device = model.config, next(model.parameters()).device
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids_1L = torch.tensor([[config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]])
    side = vision.spatial_merge_size  # patches
    return {
        "input_ids": ids_1L.to(device),
        "attention_mask": torch.ones_like(ids_1L).to(device),
        "mm_token_type_ids": (ids_1L == config.image_token_id).int().to(device),
        "pixel_values": torch.zeros(side * side, values, device=device, dtype=model.dtype),
        "image_grid_thw": torch.tensor([[1, side, side]], device=device),
    }


@contextmanager
def forward_passes(model: Any) -> Iterator[None]:
    """Around forward passes: an error of one rank in it leaves the others waiting for its part of a sharded pass, so
    that it cannot notify them; it ends alone, and its end ends them."""
    try:
        yield
    except Exception as error:
        if distributed.world_size() > 1 and is_sharded(model):
            setattr(error, distributed.CANNOT_BE_TOLD, True)
        raise
