"""Images open upright, as RGB, or not at all; sources of ``coordexp predict`` and ``Detector``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from coordexp.data.image_sources import find_images
from coordexp.data.images import open_rgb, read_header
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.errors import DataError
from support.annotation_folders import paint

# --- files ---


def corners(size: tuple[int, int] = (8, 6)) -> Image.Image:
    """Four differently coloured quarters: every turn and flip shows."""
    image = Image.new("RGB", size, (255, 0, 0))
    width, height = size
    image.paste((0, 255, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 255), (0, height // 2, width // 2, height))
    return image


def test_a_picture_with_too_many_pixels_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corners().save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DataError, match=r"a\.png: has more than 40 pixels, which are not read; cut it into parts"):
        read_header(tmp_path / "a.png")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_exif_orientation_is_applied_as_pillow_would(tmp_path: Path, orientation: int, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    corners((32, 16)).save(path, exif=exif)
    with Image.open(path) as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")
    opened = open_rgb(path)
    assert np.array_equal(np.asarray(opened), np.asarray(upright))
    assert read_header(path).size == opened.size == upright.size
    as_stored = open_rgb(path, apply_orientation=False)
    assert as_stored.size == read_header(path).stored_size == (32, 16)
    assert as_stored.getpixel((31, 0))[1] > 200  # type: ignore[index]  # green in the upper right corner


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("apply_orientation", [True, False])
@pytest.mark.parametrize("kept_in", ["exif", "xmp"])
def test_an_opened_image_carries_no_orientation_to_apply_again(
    tmp_path: Path, kept_in: str, apply_orientation: bool
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    save = partial(corners().save, tmp_path / "a.jpg")
    save(exif=exif) if kept_in == "exif" else save(xmp=XMP)
    opened = open_rgb(tmp_path / "a.jpg", apply_orientation=apply_orientation)
    assert opened.getexif().get(0x0112) is None
    assert opened.size == ((6, 8) if apply_orientation else (8, 6))


@pytest.mark.parametrize(
    ("mode", "colour", "name", "seen"),
    [
        ("L", 90, "a.JPG", (90, 90, 90)),
        ("RGBA", (10, 200, 30, 255), "a.png", (10, 200, 30)),
        ("1", 1, "a.png", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "a.jpg", (254, 0, 0)),
        ("YCbCr", (90, 128, 128), "a.jpg", (90, 90, 90)),
        ("RGB", (90, 90, 90), "a.jfif", (90, 90, 90)),
    ],
)
def test_every_8_bit_image_becomes_rgb(tmp_path: Path, mode: str, colour: Any, name: str, seen: Any) -> None:
    """And those of test_pixels.py."""
    Image.new(mode, (40, 24), colour).save(tmp_path / name, format="JPEG" if name.endswith("jfif") else None)
    opened = open_rgb(tmp_path / name)
    assert opened.mode == "RGB"
    assert np.abs(np.asarray(opened).astype(int) - np.array(seen)).max() <= 3


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_truncated_image_is_refused(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=rf"a\.{suffix}: "):
        open_rgb(path)


def test_the_expected_size_is_checked(tmp_path: Path) -> None:
    corners().save(tmp_path / "a.png")
    assert open_rgb(tmp_path / "a.png", expected_size=(8, 6)).size == (8, 6)
    with pytest.raises(DataError, match=r"width=6, height=8.* 8x6"):
        open_rgb(tmp_path / "a.png", expected_size=(6, 8))


# --- sources ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("frame_9.png", "frame_10.png", "deep/b.jpg", "p [a0].jpg"):
        paint(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["."], ["deep/b.jpg", "frame_10.png", "frame_9.png", "p [a0].jpg"]),
        (["frame_*.png"], ["frame_9.png", "frame_10.png"]),
        (["frame_%d.png"], ["frame_9.png", "frame_10.png"]),
        (["**/*.jpg"], ["deep/b.jpg", "p [a0].jpg"]),
        (["p [a0].jpg"], ["p [a0].jpg"]),  # an existing file's name is not a pattern
        (["deep/b.jpg", "frame_9.png"], ["deep/b.jpg", "frame_9.png"]),
        (["deep", "frame_9.png"], ["deep/b.jpg", "frame_9.png"]),
        (["frame_9.png", "frame_9.png"], ["frame_9.png"]),
    ],
)
def test_images_are_found(folder: Path, sources: list[str], names: list[str]) -> None:
    found = find_images([Path(source) for source in sources])
    assert [record.sample_id for record in found.records] == names
    assert all((record.width, record.height) == (40, 24) for record in found.records) and not found.annotated


def test_datasets_and_images_go_together(folder: Path) -> None:
    write_scenes(folder / "d", 2, SPARSE, 1)
    found = find_images([folder / "d" / "scenes.jsonl", folder / "frame_9.png"], limit=3)
    assert len(found.records) == 3 and len(found.annotated) == 2
    assert found.records[2].sample_id not in found.annotated
    assert len(find_images([folder / "d" / "scenes.jsonl", folder / "frame_9.png"], limit=1).records) == 1


@pytest.mark.parametrize("how", ["no image", "cut short", "gone"])
def test_a_broken_image_is_left_out_and_named(folder: Path, how: str) -> None:
    write_scenes(folder / "d", 2, SPARSE, 1)
    broken = folder / "d" / "images" / "000000.png"
    whole = broken.read_bytes()
    broken.unlink()
    if how != "gone":
        broken.write_bytes(b"hello" if how == "no image" else whole[: len(whole) // 2])
    source = folder / "d" / ("scenes.jsonl" if how == "gone" else "images")
    found = find_images([source], skip_broken=True)
    assert len(found.records) == 1 and "000001.png" in str(found.records[0].image)
    ((name, reason),) = found.skipped
    assert "000000.png" in reason and ("000000.png" in name or "scenes.jsonl:1" in name)
    if how != "cut short":  # without the skip flag only headers are read
        with pytest.raises(DataError, match=r"000000\.png"):
            find_images([source])


@pytest.mark.parametrize(
    ("source", "named"),
    [("gone.jpg", "gone.jpg"), ("none_*.png", r"none_\*.png"), ("empty", "empty"), ("b", "1 skipped")],
)
def test_sources_without_readable_images_are_refused(folder: Path, source: str, named: str) -> None:
    (folder / "empty").mkdir()
    (folder / "b").mkdir()
    (folder / "b" / "x.png").write_text("hello")
    with pytest.raises(DataError, match=named):
        find_images([Path(source)], skip_broken=True)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_uncompressed_tiffs_turn_like_pngs(tmp_path: Path, orientation: int, mode: str) -> None:
    """Pillow maps such files into memory, with the sides of the turned picture."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = corners((32, 16)).convert(mode)
    image.save(tmp_path / "a.tiff", exif=exif)
    image.convert("RGB").save(tmp_path / "a.png", exif=exif)
    for upright in (True, False):
        opened, wanted = (open_rgb(tmp_path / f"a.{kind}", apply_orientation=upright) for kind in ("tiff", "png"))
        assert opened.size == wanted.size and opened.tobytes() == wanted.tobytes()


def test_a_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").symlink_to("gone.png")
    with pytest.raises(DataError, match=r"a\.png: is a link to gone\.png, which is not there"):
        open_rgb(tmp_path / "a.png")
