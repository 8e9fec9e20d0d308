"""Inputs of the model: a record → prompt tokens and image tensors; a packed row → the arguments of its forward.

Trainer, HF rollouts and every check use these token ids; an engine that reports others is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from coordexp.checkpoints.card import read_card, settings_for_answers
from coordexp.checkpoints.folder import Checkpoint
from coordexp.config.schema import DEFAULT_PROMPT
from coordexp.coords import serialize_objects
from coordexp.data.images import ResizeRule, open_rgb, shape_problem
from coordexp.errors import AlignmentError, ConfigError, DataError
from coordexp.modeling.attention import Segments, row_arguments
from coordexp.modeling.load import load_processor_and_vocab, read_config
from coordexp.modeling.patches import PixelScale, cut
from coordexp.records import ImageRecord, PackedRow, RolloutRequest

# Only the host reads these, in every layer: they stay in main memory.
ON_HOST = ("image_grid_thw", "image_cu_seqlens")


@dataclass(frozen=True, slots=True)
class VisionTower:
    """Settings of the model's vision tower: ``side`` of the square of learned positions, how it is resampled to an
    image's grid, and ``merge``, patches along the side of one placeholder."""

    side: int
    mode: str
    align_corners: bool
    merge: int

    @classmethod
    def from_model(cls, model: Any) -> VisionTower:
        tower = model.model.visual
        sampling = tower.interpolation_mode, tower.interpolation_align_corners
        return cls(tower.num_grid_per_side, *sampling, tower.spatial_merge_size)

    def arguments(self, grid_I3: torch.Tensor, attention: str) -> dict[str, Any]:
        """Arguments of the model's forward for I images of ``grid_I3`` (frames, height, width in patches), P patches in
        all: ``image_position_ids`` (P, 2), ``image_interp_indices`` and ``image_interp_weights`` (P, taps), and which
        patches belong together. The tower would derive them from the device's copy of the grid, and wait for it.
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
        # With several sequences in image_cu_seqlens transformers calls the attention function once per image. One
        # sequence of all patches makes it call once; image_frames then keeps the images apart.
        together = torch.tensor([0, sum(lengths)], dtype=torch.int32)
        return given | {"image_cu_seqlens": together, "image_frames": Segments(lengths, causal=False)}


def image_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a row that only the vision tower reads, without pixels and grid sizes."""
    return {name: value for name, value in inputs.items() if name.startswith("image_") and name != "image_grid_thw"}


RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def build_messages(image: Path, prompt: str | None, system: str | None) -> tuple[dict[str, Any], ...]:
    """Messages up to the user's turn; the chat template adds the assistant's header."""
    text = DEFAULT_PROMPT if prompt is None else prompt  # "" is a request of the image alone
    user = {"role": "user", "content": [{"type": "image", "image": str(image)}, {"type": "text", "text": text}]}
    before = () if system is None else ({"role": "system", "content": [{"type": "text", "text": system}]},)
    return (*before, user)


@dataclass(frozen=True, slots=True)
class _PromptTokens:
    before: tuple[int, ...]
    placeholder: int
    patches: int  # of one placeholder
    after: tuple[int, ...]

    def around(self, patches: int) -> tuple[int, ...]:
        return (*self.before, *[self.placeholder] * (patches // self.patches), *self.after)


@dataclass(frozen=True, slots=True, eq=False)
class PromptEncoder:
    """Records → rollout requests, by the checkpoint's own processor and chat template. ``prepare``: applied to each
    image before the processor."""

    processor: Any
    prompt: str | None
    system: str | None
    prepare: Callable[[Image.Image], Image.Image] | None = None
    _known: dict[str, _PromptTokens] = field(default_factory=dict, init=False, repr=False)

    def encode(self, record: ImageRecord, image: Image.Image | None = None) -> RolloutRequest:
        """Tokenise the prompt, with image placeholders expanded, and preprocess the record's image (or ``image``, of
        the same size, instead).

        ``model_inputs`` has ``pixel_values`` (patches, features), as bytes, and ``image_grid_thw`` (1, 3).
        """
        if problem := shape_problem(record.width, record.height):
            raise DataError(problem, path=record.image)
        messages = build_messages(record.image, self.prompt, self.system)
        try:
            text = self.processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:  # it worked without template.system
            raise ConfigError(
                f"template.system: the checkpoint's chat template refuses it ({error}); set null"
            ) from error
        if image is None:
            image = open_rgb(record.image, expected_size=(record.width, record.height))
        shown = image if self.prepare is None else self.prepare(image)
        patches_PF, grid_13 = cut(self.processor.image_processor, shown)
        tokens = self._known.get(text)
        if tokens is None:
            tokens = self._known[text] = self._whole(text, shown, patches_PF)
        return RolloutRequest(
            sample_id=record.sample_id,
            image=record.image,
            messages=messages,
            prompt_token_ids=tokens.around(len(patches_PF)),
            model_inputs={"pixel_values": patches_PF, "image_grid_thw": grid_13},
        )

    def _whole(self, text: str, image: Image.Image, patches_PF: torch.Tensor) -> _PromptTokens:
        # By the processor in one call, once for each text: tokenising hundreds of placeholders takes longer than
        # cutting the image. Raises AlignmentError if the parts do not add up to it.
        vision = self.processor.image_processor
        if (written := text.count(self.processor.image_token)) != 1:
            raise AlignmentError(
                f"the prompt has {written} placeholders {self.processor.image_token} and must have one, the image's; "
                "remove it from template.prompt and template.system, or restore the checkpoint's chat template"
            )
        encoded = self.processor(text=[text], images=[image], return_tensors="pt")
        ids = encoded["input_ids"][0].tolist()
        first, count = ids.index(self.processor.image_token_id), ids.count(self.processor.image_token_id)
        tokens = _PromptTokens(
            tuple(ids[:first]), self.processor.image_token_id, vision.merge_size**2, tuple(ids[first + count :])
        )
        if tokens.around(len(patches_PF)) != tuple(ids):
            raise AlignmentError(
                f"the checkpoint's processor writes an image of {len(patches_PF)} patches as {count} placeholders; "
                f"expected one run of {len(patches_PF) // vision.merge_size**2}; restore its files"
            )
        if not torch.equal(PixelScale.of(vision)(patches_PF, torch.float32), encoded["pixel_values"]):
            raise AlignmentError(
                "the checkpoint's image processor does more with pixels than to resize, scale and normalise them; "
                "restore its preprocessor_config.json"
            )
        return tokens


def row_inputs(
    row: PackedRow,
    rope_index: RopeIndex,
    image_token_id: int,
    attention: str,
    tower: VisionTower | None = None,
) -> dict[str, Any]:
    """Arguments of one packed row of L tokens (S in a segment) for Qwen3-VL's forward without a cache, on the CPU.

    ``position_ids`` (4, 1, L): text positions restarting at 0 for each segment, then the model's three M-RoPE rows,
    computed per segment. Segments are kept apart by :mod:`coordexp.modeling.attention` or, for ``attention="sdpa"``,
    by transformers, which recognises the restarting positions. ``tower`` adds the arguments of the vision tower, and
    ``placeholder_at_M``, the places of image tokens.
    """
    ids_1L = torch.from_numpy(row.token_ids_L.astype(np.int64))[None]
    is_image_1L = (ids_1L == image_token_id).to(torch.int32)
    positions, pixels, grids = [], [], []
    for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
        grid = segment.model_inputs["image_grid_thw"]
        mrope_31S, _ = rope_index(
            ids_1L[:, start:end], mm_token_type_ids=is_image_1L[:, start:end], image_grid_thw=grid
        )
        text_11S = torch.arange(end - start)[None, None]
        positions.append(torch.cat([text_11S, mrope_31S.to(text_11S.dtype)]))
        pixels.append(segment.model_inputs["pixel_values"])
        grids.append(grid)
    inputs: dict[str, Any] = {
        "input_ids": ids_1L,
        "mm_token_type_ids": is_image_1L,
        "position_ids": torch.cat(positions, dim=2),
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.cat(grids),
    }
    if tower is not None:
        inputs |= tower.arguments(inputs["image_grid_thw"], attention)
        inputs["placeholder_at_M"] = torch.from_numpy(np.flatnonzero(row.token_ids_L == image_token_id))
    if attention == "sdpa":
        return inputs
    return inputs | row_arguments([end - start for start, end in zip(row.offsets[:-1], row.offsets[1:], strict=True)])


def check_prompt(
    sample_id: str, ours: tuple[int, ...], reported: tuple[int, ...], decode: Callable[[Any], str]
) -> None:
    """Raise AlignmentError, with the first difference decoded, if a rollout's prompt tokens are not the trainer's."""
    if ours == reported:
        return
    limit = min(len(ours), len(reported))
    at = next((i for i in range(limit) if ours[i] != reported[i]), limit)
    # An id of another tokenizer may have no text here.
    ids = f" (ids {ours[at]} and {reported[at]})" if at < limit else ""
    raise AlignmentError(
        f"{sample_id}: the rollout's prompt ({len(reported)} tokens) is not the trainer's ({len(ours)}); they part at "
        f"token {at}: trainer {decode(ours[at : at + 8])!r}, rollout {decode(reported[at : at + 8])!r}{ids}. "
        "Both must use one processor, one chat template and images of one size"
    )


def for_device(inputs: Mapping[str, Any], move: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The inputs with ``move`` applied to every tensor that the device needs. Others, and values that are not tensors
    (a packed row's segments), stay."""
    # The forward reads the images' grid on its device only to derive the vision tower's arguments, if not given.
    stays = ON_HOST if "image_cu_seqlens" in inputs else ()
    return {
        name: move(value) if isinstance(value, torch.Tensor) and name not in stays else value
        for name, value in inputs.items()
    }


def to_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs on ``device``, except what only the host reads; from pinned memory to a GPU without blocking."""
    return for_device(inputs, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def token_counter(checkpoint: Path) -> Callable[[ImageRecord], int]:
    """A function from a record to the number of tokens of its prompt and answer in training, without opening its image.

    Prompt and order of fields are the checkpoint's own, or else the built-in ones. The prompt's text is the same for
    all records and is measured once; the number of image tokens follows from an image's size. Raises CheckpointError
    or VocabError; the function raises DataError for an image that no processor takes.
    """
    opened = Checkpoint.open(checkpoint)
    (processor, vocab), image_token = load_processor_and_vocab(opened), read_config(opened).image_token_id
    vision = processor.image_processor
    factor = vision.patch_size * vision.merge_size
    rule = ResizeRule(factor, int(vision.size["shortest_edge"]), int(vision.size["longest_edge"]))

    def image_tokens(record: ImageRecord) -> int:
        width, height = rule.size(record.width, record.height)
        return (height // factor) * (width // factor)

    own = read_card(checkpoint).training
    order = "desc_first" if own is None else own.object_field_order
    template = settings_for_answers(own)
    encoder = PromptEncoder(processor, template.get("prompt"), template.get("system"))
    sample = ImageRecord("blank", Path("blank"), 64, 64, ())
    prompt_ids = encoder.encode(sample, Image.new("RGB", (64, 64))).prompt_token_ids
    counted = sum(1 for token_id in prompt_ids if token_id == image_token)
    assert counted == image_tokens(sample), "image tokens follow from the size; the processor disagrees"
    text_tokens = len(prompt_ids) - counted

    def count(record: ImageRecord) -> int:
        answer = len(vocab.encode_answer(serialize_objects(record.objects, order))) + 1  # and the end of the turn
        return text_tokens + image_tokens(record) + answer

    return count
