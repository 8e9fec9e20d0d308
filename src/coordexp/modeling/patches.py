"""From an image to the vision tower's first vectors: patches travel as bytes, and the model's device computes the rest.

The processor resizes an image and cuts it into patches, as bytes and each frame once. The model subtracts the mean and
divides by the deviation in float32, on its own device, so its numbers equal the processor's own bit for bit. Its first
layer is a matrix product. transformers computes it as a convolution whose kernel is as large as its stride, and kernels
for convolutions are slower at it (figures: docs/what-is-trained.md).

P patches, C channels, T frames (an image is shown in each), S pixels of a patch; D dimensions of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from PIL import Image
from torch.nn import functional
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from coordexp.errors import CheckpointError


def cut(image_processor: Any, image: Image.Image) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize an RGB image as the checkpoint's processor does, and cut it: patches (P, C * S) of bytes, and the grid
    (1, 3) of frames, rows and columns."""
    found = image_processor(
        images=[image], do_rescale=False, do_normalize=False, temporal_patch_size=1, return_tensors="pt"
    )
    patches_PF, grid_13 = found["pixel_values"], found["image_grid_thw"]
    assert patches_PF.dtype == torch.uint8, "neither scaled nor normalised"
    return patches_PF, grid_13


@dataclass(frozen=True, slots=True)
class PixelScale:
    """Bytes → the numbers of the checkpoint's processor. ``mean``, ``deviation``: by channel, in bytes. ``frames``: of
    a patch."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    frames: int

    @classmethod
    def of(cls, image_processor: Any) -> PixelScale:
        """Raises CheckpointError for a processor that does not both scale and normalise."""
        if not (image_processor.do_rescale and image_processor.do_normalize):
            raise CheckpointError(
                "preprocessor_config.json: do_rescale and do_normalize must be true, as in Qwen3-VL's checkpoints; "
                "restore the file"
            )
        # In float32 and in the processor's order of operations.
        factor = 1.0 / image_processor.rescale_factor
        mean_C, deviation_C = (
            torch.tensor(values) * factor for values in (image_processor.image_mean, image_processor.image_std)
        )
        return cls(tuple(mean_C.tolist()), tuple(deviation_C.tolist()), image_processor.temporal_patch_size)

    def __call__(self, patches_PF: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """(P, C * S) bytes → (P, C * T * S), computed in float32 and rounded once."""
        # Filled on the device: copies of the host's numbers would wait for it. Divided by a tensor: on GPUs torch
        # multiplies by the reciprocal of a number.
        mean_C1, deviation_C1 = (
            torch.cat([patches_PF.new_full((1, 1), value, dtype=torch.float32) for value in values])
            for values in (self.mean, self.deviation)
        )
        values_PCS = patches_PF.view(len(patches_PF), len(self.mean), -1).float()
        rounded_PCS = values_PCS.sub_(mean_C1).div_(deviation_C1).to(dtype)
        return rounded_PCS[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)


class ByteModel(qwen3_vl.Qwen3VLModel):
    """Qwen3-VL without its head, which also takes pixels as bytes. Other pixels are the processor's own numbers."""

    pixel_scale: PixelScale | None = None

    @wraps(qwen3_vl.Qwen3VLModel.get_image_features)  # generate() reads the signature
    def get_image_features(self, pixel_values: Any, *args: Any, **kwargs: Any) -> Any:
        if pixel_values.dtype == torch.uint8:
            assert self.pixel_scale is not None, "load_model sets it"
            pixel_values = self.pixel_scale(pixel_values, self.visual.dtype)
        return super().get_image_features(pixel_values, *args, **kwargs)


class PatchProjection(torch.nn.Conv3d):
    """A convolution of single patches, as a matrix product. Weights have the convolution's names and shapes."""

    def forward(self, patches_PCTHW: torch.Tensor) -> torch.Tensor:
        """Returns (P, D, 1, 1, 1), as the convolution does."""
        vectors_PD = functional.linear(patches_PCTHW.flatten(1), self.weight.flatten(1), self.bias)
        return vectors_PD[..., None, None, None]


def take_bytes(model: Any) -> None:
    """Make a Qwen3-VL ``model`` take pixels as bytes and project patches by a product, in place. Call it before the
    model is wrapped; set ``model.model.pixel_scale`` before it sees bytes."""
    projection = model.model.visual.patch_embed.proj
    assert type(projection) is torch.nn.Conv3d and projection.stride == projection.kernel_size, "one product a patch"
    # Classes of the modules that transformers has built: new modules would have to be initialised again.
    projection.__class__ = PatchProjection
    model.model.__class__ = ByteModel
