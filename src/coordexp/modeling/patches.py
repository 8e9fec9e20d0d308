"""From an image to the vision tower's first vectors: patches travel as bytes, and the model's device computes the rest;
and from the tower's last vectors into a row.

The processor resizes an image and cuts it into patches, as bytes and each frame once. The model subtracts the mean and
divides by the deviation in float32, on its own device, so its numbers equal the processor's own bit for bit. Its first
layer is a matrix product. transformers computes it as a convolution whose kernel is as large as its stride, and kernels
for convolutions are slower at it (figures: docs/what-is-trained.md).

transformers finds the placeholders of a row's images by masks, whose true elements the host counts on the device. A row
brings their places instead, so the host waits for nothing.

P patches, C channels, T frames (an image is shown in each), S pixels of a patch; D dimensions of the tower; M
placeholders of a row's L tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from PIL import Image
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from coordexp.errors import CheckpointError
from coordexp.modeling import cpu_products
from coordexp.modeling.attention import ImageAttention


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
    """Qwen3-VL without its head, which also takes pixels as bytes, and the places of a row's placeholders. Other pixels
    are the processor's own numbers."""

    pixel_scale: PixelScale | None = None

    @wraps(qwen3_vl.Qwen3VLModel.get_image_features)  # generate() reads the signature
    def get_image_features(self, pixel_values: Any, *args: Any, **kwargs: Any) -> Any:
        if pixel_values.dtype == torch.uint8:
            assert self.pixel_scale is not None, "load_model sets it"
            pixel_values = self.pixel_scale(pixel_values, self.visual.dtype)
        return super().get_image_features(pixel_values, *args, **kwargs)

    @wraps(qwen3_vl.Qwen3VLModel.forward)
    def forward(self, *args: Any, placeholder_at_M: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if placeholder_at_M is None:
            return super().forward(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        return self._forward_row(placeholder_at_M, *args, **given)

    def _forward_row(
        self,
        placeholder_at_M: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        mm_encoder_outputs: Mapping[str, Any] | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        embed: Any = self.get_input_embeddings()
        embedded_1LH = embed(input_ids)
        images = None if mm_encoder_outputs is None else mm_encoder_outputs["image"]
        if images is None:
            features: Any = self.get_image_features  # pyright takes the decorated method for a plain function
            images = features(pixel_values, image_grid_thw, return_dict=True, **kwargs)
        vectors_MH = torch.cat(images.pooler_output).to(embedded_1LH.dtype)
        outputs = self.language_model(
            input_ids=None,
            position_ids=position_ids,
            attention_mask=attention_mask,
            inputs_embeds=embedded_1LH.index_copy(1, placeholder_at_M, vectors_MH[None]),
            visual_pos_masks=placeholder_at_M,
            deepstack_visual_embeds=[torch.cat(parts) for parts in images.deepstack_features],
            **kwargs,
        )
        rope_deltas: Any = self.rope_deltas
        return qwen3_vl.Qwen3VLModelOutputWithPast(**outputs, rope_deltas=rope_deltas)


class PlacingTextModel(qwen3_vl.Qwen3VLTextModel):
    """The language model, which adds vectors of images to hidden states at given places, or where a mask is true."""

    def _deepstack_process(
        self, hidden_states: torch.Tensor, visual_pos_masks: torch.Tensor, visual_embeds: torch.Tensor
    ) -> torch.Tensor:
        if visual_pos_masks.dtype == torch.bool:
            return super()._deepstack_process(hidden_states, visual_pos_masks, visual_embeds)
        return hidden_states.index_add(1, visual_pos_masks, visual_embeds.to(hidden_states.dtype)[None])


class PatchProjection(torch.nn.Conv3d):
    """A convolution of single patches, as a matrix product. Weights have the convolution's names and shapes."""

    def forward(self, patches_PCTHW: torch.Tensor) -> torch.Tensor:
        """Returns (P, D, 1, 1, 1), as the convolution does."""
        vectors_PD = cpu_products.linear(patches_PCTHW.flatten(1), self.weight.flatten(1), self.bias)
        return vectors_PD[..., None, None, None]


def take_rows(model: Any) -> None:
    """Make a Qwen3-VL ``model`` take pixels as bytes, project patches by a product, attend to a row's images without
    copies, and take the places of placeholders, in place. Call it before the model is wrapped; set
    ``model.model.pixel_scale`` before it sees bytes."""
    projection = model.model.visual.patch_embed.proj
    assert type(projection) is torch.nn.Conv3d and projection.stride == projection.kernel_size, "one product a patch"
    # Classes of the modules that transformers has built: new modules would have to be initialised again.
    projection.__class__ = PatchProjection
    model.model.__class__ = ByteModel
    model.model.language_model.__class__ = PlacingTextModel
    for block in model.model.visual.blocks:
        block.attn.__class__ = ImageAttention
