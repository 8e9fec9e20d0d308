"""Pixels travel as bytes, each frame once, and the model makes the processor's numbers of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coordexp.data.jsonl import read_jsonl
from coordexp.errors import AlignmentError, CheckpointError
from coordexp.modeling.inputs import PromptEncoder, build_messages, check_prompt, row_inputs
from coordexp.modeling.load import load_model, load_processor
from coordexp.modeling.patches import PixelScale
from coordexp.records import ImageRecord
from support.config_samples import edit_json
from support.tiny_run import PROMPT, encoder_of, gt_segments, load_tiny, row_of, tiny_checkpoint, tiny_scenes

SIZES = [(64, 64), (48, 96), (100, 61), (33, 47), (640, 400), (16, 40)]


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    noise.reshape(-1)[:256] = np.arange(256)  # every value
    return Image.fromarray(noise)


def changed_processor(folder: Path, **values: Any) -> Path:
    copied = shutil.copytree(tiny_checkpoint(), folder / "model")
    edit_json(copied / "processor_config.json", **{f"image_processor__{key}": value for key, value in values.items()})
    return copied


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_become_the_processors_numbers_bit_for_bit_and_prompts_its_tokens(size: tuple[int, int]) -> None:
    loaded = load_tiny()
    encoder, image = encoder_of(loaded), picture(*size)
    record = ImageRecord("one", Path("one.png"), *size, ())
    encoder.encode(read_jsonl(tiny_scenes())[0])  # the first image of a prompt is encoded in another way
    request = encoder.encode(record, image)
    text = loaded.processor.apply_chat_template(
        list(build_messages(record.image, PROMPT, None)), tokenize=False, add_generation_prompt=True
    )
    expected = loaded.processor(text=[text], images=[image], return_tensors="pt")
    pixels, model = request.model_inputs["pixel_values"], loaded.model
    scale: Any = model.model.pixel_scale
    assert list(request.prompt_token_ids) == expected["input_ids"][0].tolist()
    assert request.model_inputs["image_grid_thw"].equal(expected["image_grid_thw"])
    assert pixels.dtype == torch.uint8
    assert pixels.nbytes * 8 == expected["pixel_values"].nbytes
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(scale(pixels, dtype), expected["pixel_values"].to(dtype))


def test_means_and_deviations_of_channels_are_the_processors(tmp_path: Path) -> None:
    processor = load_processor(changed_processor(tmp_path, image_mean=[0.48, 0.45, 0.4], image_std=[0.26, 0.27, 0.28]))
    image = picture(64, 48)
    cut = PromptEncoder(processor, PROMPT, None).encode(ImageRecord("one", Path("one.png"), 64, 48, ()), image)
    expected = processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
    assert torch.equal(
        PixelScale.of(processor.image_processor)(cut.model_inputs["pixel_values"], torch.float32), expected
    )


@torch.no_grad()
def test_a_model_answers_bytes_as_the_processors_numbers() -> None:
    loaded = load_tiny()
    (segment,) = gt_segments(loaded, 1)
    ids = torch.tensor([segment.prompt_token_ids])
    arguments = {"input_ids": ids, "mm_token_type_ids": (ids == loaded.image_token_id).int(), **segment.model_inputs}
    logits = loaded.model(**arguments).logits
    scale: Any = loaded.model.model.pixel_scale
    numbers = scale(segment.model_inputs["pixel_values"], torch.float32)
    assert torch.equal(loaded.model(**arguments | {"pixel_values": numbers}).logits, logits)
    dark = torch.zeros_like(segment.model_inputs["pixel_values"])
    assert not torch.equal(loaded.model(**arguments | {"pixel_values": dark}).logits, logits)


def test_a_row_holds_bytes() -> None:
    loaded = load_tiny("bfloat16")
    segments = gt_segments(loaded, 3)
    row = row_inputs(row_of(segments), loaded.model.model.get_rope_index, loaded.image_token_id, "packed")
    assert row["pixel_values"].dtype == torch.uint8
    assert row["pixel_values"].equal(torch.cat([one.model_inputs["pixel_values"] for one in segments]))


def test_a_processor_that_does_not_normalise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: do_rescale and do_normalize"):
        load_model(changed_processor(tmp_path, do_normalize=False), "float32")


def test_a_processor_that_does_more_is_refused_at_its_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny()
    vision = type(loaded.processor.image_processor)
    plain = vision.rescale_and_normalize

    def darker(self: Any, images: torch.Tensor, do_rescale: bool, *given: Any) -> torch.Tensor:
        return 0.99 * plain(self, images, do_rescale, *given) if do_rescale else images

    monkeypatch.setattr(vision, "rescale_and_normalize", darker)
    with pytest.raises(AlignmentError, match="does more with pixels"):
        encoder_of(loaded).encode(read_jsonl(tiny_scenes())[0])


def test_a_processor_that_writes_other_placeholders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny()
    plain = type(loaded.processor).__call__

    def one_more(self: Any, *given: Any, **keys: Any) -> Any:
        encoded = plain(self, *given, **keys)
        ids_1L = encoded["input_ids"]
        encoded["input_ids"] = torch.cat([ids_1L, ids_1L.new_tensor([[self.image_token_id]])], dim=1)
        return encoded

    monkeypatch.setattr(type(loaded.processor), "__call__", one_more)
    with pytest.raises(AlignmentError, match=r"writes an image of \d+ patches as \d+ placeholders"):
        encoder_of(loaded).encode(read_jsonl(tiny_scenes())[0])


@pytest.mark.parametrize(
    ("reported", "at", "shown"),
    [((1, 2, 9, 4), 2, "trainer '3,4', rollout '9,4'"), ((1, 2), 2, "trainer '3,4', rollout ''"),
     ((1, 2, 3, 4, 5), 4, "trainer '', rollout '5'"), ((), 0, "trainer '1,2,3,4', rollout ''")],
)  # fmt: skip
def test_prompts_that_differ_are_shown_from_their_first_difference(
    reported: tuple[int, ...], at: int, shown: str
) -> None:
    def decode(ids: tuple[int, ...]) -> str:
        return ",".join(map(str, ids))

    check_prompt("a", (1, 2, 3, 4), (1, 2, 3, 4), decode)
    with pytest.raises(AlignmentError, match=f"^a: .*part at token {at}: {shown}"):
        check_prompt("a", (1, 2, 3, 4), reported, decode)


def test_a_prompt_of_another_tokenizer_is_shown_with_its_ids() -> None:
    vocab = load_tiny().vocab
    ours = tuple(vocab.encode("Detect."))
    reported = (ours[0], 248_000, *ours[2:])
    message = rf"part at token 1: trainer .*, rollout .* \(ids {ours[1]} and 248000\)"
    with pytest.raises(AlignmentError, match=message):
        check_prompt("a", ours, reported, vocab.decode)


@pytest.mark.parametrize(("prompt", "count"), [("Where is <|image_pad|>?", "2"), (None, "0")])
def test_a_prompt_has_one_placeholder(prompt: str | None, count: str) -> None:
    processor = load_processor(tiny_checkpoint())
    if prompt is None:
        processor.chat_template = "Detect."
    with pytest.raises(AlignmentError, match=f"has {count} placeholders .*template.prompt"):
        PromptEncoder(processor, prompt, None).encode(read_jsonl(tiny_scenes())[0])
