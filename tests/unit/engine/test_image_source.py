"""Images of servers: sent unchanged if possible, always with the trainer's pixels; the size that an engine profiles."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordexp.checkpoints.card import UNTRAINED, write_card
from coordexp.data.images import open_rgb
from coordexp.data.preparation import NO_RESIZE, ImagePreparation, ResizeRule
from coordexp.engine.wire.arguments import with_image_size
from coordexp.engine.wire.protocol import image_source, open_image
from coordexp.errors import DataError

ROTATED = 6
RESIZED = ImagePreparation(ResizeRule(32, 32 * 32, 64 * 64))


def picture(path: Path, mode: str = "RGB", orientation: int = 1, size: tuple[int, int] = (48, 32)) -> Path:
    """Colours that every flip or rotation changes."""
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    image = Image.fromarray(np.stack([x, y, np.full_like(x, 90), 255 - x / 2], axis=-1).astype(np.uint8), "RGBA")
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.convert(mode).save(path, exif=exif)
    return path


def sent(source: str) -> bytes:
    header, _, encoded = source.partition(",")
    assert header.startswith("data:image/") and header.endswith(";base64")
    return base64.b64decode(encoded)


def as_swift_opens(source: str) -> Image.Image:
    """ms-swift's ``load_image``: converts to RGB and ignores EXIF."""
    return Image.open(source if source.startswith("/") else io.BytesIO(sent(source))).convert("RGB")


@pytest.mark.parametrize("images", ["path", "base64"])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("preparation", [NO_RESIZE, RESIZED], ids=["as they are", "resized"])
@pytest.mark.parametrize(
    ("name", "mode", "orientation"),
    [
        ("plain.jpg", "RGB", 1),
        ("grey.jpg", "L", 1),
        ("four inks.jpg", "CMYK", 1),
        ("turned.jpg", "RGB", ROTATED),
        ("turned.webp", "RGB", 3),
        ("palette.png", "P", 1),
        ("glass.png", "RGBA", 1),
        ("glass grey.png", "LA", 1),
        ("bits.bmp", "RGB", 1),
        ("scan.tiff", "RGB", 8),
    ],
)
def test_a_server_decodes_the_same_pixels_as_the_trainer(
    tmp_path: Path, images: str, ours: bool, preparation: ImagePreparation, name: str, mode: str, orientation: int
) -> None:
    path = picture(tmp_path / name, mode, orientation)
    source = image_source(path, images, preparation, ours)  # type: ignore[arg-type]
    seen = open_image(source) if ours else as_swift_opens(source)
    trainer = preparation(open_rgb(path))
    assert seen.size == trainer.size and np.array_equal(np.asarray(seen), np.asarray(trainer))


@pytest.mark.parametrize(
    ("name", "orientation", "ours", "as_it_is"),
    [
        ("a.jpg", 1, True, True),
        ("a.jpg", 1, False, True),
        ("a.png", 1, False, True),
        ("a.webp", 1, False, True),
        ("a.jpg", ROTATED, True, True),
        ("a.jpg", ROTATED, False, False),  # that server would not rotate it
        ("a.bmp", 1, True, False),  # a bitmap is longer than a PNG of it
    ],
)
def test_unchanged_file_bytes_are_sent_if_they_decode_the_same(
    tmp_path: Path, name: str, orientation: int, ours: bool, as_it_is: bool
) -> None:
    path = picture(tmp_path / name, orientation=orientation)
    source = image_source(path, "base64", NO_RESIZE, ours)
    assert (sent(source) == path.read_bytes()) is as_it_is


def test_an_image_of_the_right_size_is_sent_unchanged(tmp_path: Path) -> None:
    small, large = (picture(tmp_path / f"{side}.jpg", size=(side, side)) for side in (64, 160))
    assert sent(image_source(small, "base64", RESIZED, True)) == small.read_bytes()
    assert image_source(small, "path", RESIZED, True) == str(small)
    assert Image.open(io.BytesIO(sent(image_source(large, "path", RESIZED, True)))).size == (64, 64)


def test_an_image_in_a_tar_file_is_sent_as_bytes(tmp_path: Path) -> None:
    file = picture(tmp_path / "a.jpg")
    with tarfile.open(tmp_path / "set.tar", "w") as shard:
        shard.add(file, "a.jpg")
    member = tmp_path / "set.tar" / "a.jpg"
    assert sent(image_source(member, "path", NO_RESIZE, False)) == file.read_bytes()
    assert image_source(member, "path", NO_RESIZE, True) == str(member)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tiff"])
def test_vllm_does_not_rotate_an_image_again(tmp_path: Path, name: str, orientation: int) -> None:
    """vLLM applies the EXIF orientation of every PIL image that it is given, and Pillow's operations keep it."""
    parser = pytest.importorskip("vllm.multimodal.parse").MultiModalDataParser()
    media = pytest.importorskip("vllm.multimodal.media.image").ImageMediaIO()
    path = picture(tmp_path / name, orientation=orientation)
    expected = np.asarray(open_rgb(path))
    if not name.endswith("tiff"):  # vLLM does not open files
        loaded = media.load_bytes(path.read_bytes())
        assert np.array_equal(np.asarray(getattr(loaded, "media", loaded)), expected)
    for image in (open_rgb(path), NO_RESIZE(open_rgb(path)), open_image(str(path)),
                  open_image(image_source(path, "base64", NO_RESIZE, True))):  # fmt: skip
        shown = parser.parse_mm_data({"image": image})["image"].get(0)
        assert np.array_equal(np.asarray(shown), expected)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg.*image not found"):
        image_source(tmp_path / "gone.jpg", "base64", NO_RESIZE, True)


# -- the image on which an engine profiles its memory ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_model_len", "max_pixels", "longest_edge", "side"),
    [
        (4096, None, 4096 * 4096, 2048),  # 64 x 64 tokens of 32 x 32 pixels
        (4100, None, 4096 * 4096, 2048),
        (4096, 1024 * 1024, 4096 * 4096, 1024),
        (100, 1024 * 1024, 4096 * 4096, 320),
        (12_000, 800 * 1000, 4096 * 4096, 864),  # 894 pixels, in whole tokens
        (4096, None, 448 * 448, 448),  # vLLM warns of an image that the processor would make smaller
        (4096, 1024 * 1024, 448 * 448, 448),
    ],
)
def test_it_fits_the_prompt_the_resize_rule_and_the_processor(
    max_model_len: int, max_pixels: int | None, longest_edge: int, side: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3VLForConditionalGeneration"]}))
    sizes = {"shortest_edge": 256, "longest_edge": longest_edge}
    processor = {"patch_size": 16, "merge_size": 2, "size": sizes}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    if max_pixels is not None:
        write_card(replace(UNTRAINED, preparation=ImagePreparation(ResizeRule(max_pixels=max_pixels))), tmp_path)
    given = {"model": str(tmp_path), "max_model_len": max_model_len, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    expected = {"image": {"count": 2, "width": side, "height": side}, "video": 0}
    assert with_image_size(given) == {**given, "limit_mm_per_prompt": expected}
