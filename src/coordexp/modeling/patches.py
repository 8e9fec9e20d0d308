"""The vision tower's first layer, from patches to vectors.

transformers computes it as a convolution whose kernel is as large as its stride, so each patch is multiplied once by
the whole weight. That is one matrix product, and kernels for convolutions are slower at it (figures: docs/tuning.md).

N patches, C channels, T frames, H and W pixels of a patch; D dimensions of the tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class PatchProjection(torch.nn.Conv3d):
    """A convolution of single patches, as a matrix product. Weights have the convolution's names and shapes."""

    def forward(self, patches_NCTHW: torch.Tensor) -> torch.Tensor:
        """Returns (N, D, 1, 1, 1), as the convolution does."""
        vectors_ND = functional.linear(patches_NCTHW.flatten(1), self.weight.flatten(1), self.bias)
        return vectors_ND[..., None, None, None]


def project_by_product(model: Any) -> None:
    """Make a Qwen3-VL ``model`` compute its patch embedding as a product, in place. Call it before it is wrapped."""
    projection = model.model.visual.patch_embed.proj
    assert type(projection) is torch.nn.Conv3d and projection.stride == projection.kernel_size, "one product a patch"
    # The class of the module that transformers has built: a new module would have to be initialised again.
    projection.__class__ = PatchProjection
