"""What the vision tower derives from the images' sizes, made on the CPU beside the row's other tensors.

Left alone, transformers derives it from sizes that lie on the device, and waits for them: once for the positions, once
for their interpolation, and in every layer for the lengths of the images, which it then attends to one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from coordexp.modeling.attention import Segments

# Read by the host in every layer, and by nothing else: they stay where the host is.
ON_HOST = ("image_grid_thw", "image_cu_seqlens")


@dataclass(frozen=True, slots=True)
class VisionTower:
    """What the arguments depend on beside the images: ``side`` of the square of learned positions, how it is resampled
    to an image's own grid, and ``merge``, patches along the side of one placeholder."""

    side: int
    mode: str
    align_corners: bool
    merge: int

    @classmethod
    def of(cls, model: Any) -> VisionTower:
        """That of a bare Qwen3-VL model."""
        tower = model.model.visual
        return cls(
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            tower.spatial_merge_size,
        )

    def arguments(self, grid_I3: torch.Tensor, attention: str) -> dict[str, Any]:
        """Arguments of the model's forward for I images of ``grid_I3`` (frames, height, width in patches), P patches in
        all, under ``model.attn_implementation``'s value.

        ``image_position_ids`` (P, 2), ``image_interp_indices`` and ``image_interp_weights`` (P, taps);
        ``image_frames``, a :class:`Segments` that keeps the images apart, with ``image_cu_seqlens``, which says that
        all of them are one: so that transformers hands them over together. ``sdpa`` takes them one by one.
        """
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_I3,
            num_grid_per_side=self.side,
            mode=self.mode,
            align_corners=self.align_corners,
            spatial_merge_size=self.merge,
        )
        lengths = [height * width for frames, height, width in grid_I3.tolist() for _ in range(frames)]
        given: dict[str, Any] = {
            "image_position_ids": get_vision_position_ids(grid_I3, self.merge),
            "image_interp_indices": indices,
            "image_interp_weights": weights,
        }
        if attention == "sdpa":
            return given | {"image_cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)}
        together = torch.tensor([0, sum(lengths)], dtype=torch.int32)
        return given | {"image_cu_seqlens": together, "image_frames": Segments(lengths, causal=False)}


def image_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a row's arguments that its images' features alone are made from, pixels and sizes aside."""
    return {name: value for name, value in inputs.items() if name.startswith("image_") and name != "image_grid_thw"}
