"""One picture gives the same pixels, or the same refusal, as a file, bytes, a PIL image and in a server's request."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from coordexp.data.images import open_rgb, read_header, rgb_of
from coordexp.engine.wire.protocol import RequestRefused, open_image
from coordexp.errors import DataError
from coordexp.inference.detector import collect
from coordexp.records import ImageRecord

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def two_colours(mode: str = "RGB", size: tuple[int, int] = (24, 16)) -> Image.Image:
    """Red, with a blue left half."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (0, 0, size[0] // 2, size[1]))
    return image.convert(mode)


def see_through(mode: str) -> Image.Image:
    """Blue on the left, and nothing on the right: black below the transparency."""
    image = Image.new("RGBA", (24, 16), (0, 0, 0, 0))
    image.paste((*BLUE, 255), (0, 0, 12, 16))
    if mode == "P":
        coloured = image.convert("RGB").quantize(4)
        coloured.info["transparency"] = coloured.getpixel((20, 8))
        return coloured
    return image.convert(mode)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    return exif


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def doors(path: Path, folder: Path) -> dict[str, Callable[[], Image.Image]]:
    data = path.read_bytes()

    def detector(given: Any) -> Image.Image:
        pixels, found = collect([given], folder, raises=True)
        (record,) = found.values()
        assert isinstance(record, ImageRecord)
        shown = open_rgb(record.image)
        assert not pixels or pixels["image 0"].tobytes() == shown.tobytes()
        return shown

    return {
        "file": partial(open_rgb, path),
        "bytes": partial(open_rgb, Path("some bytes"), data=data),
        "pil": lambda: rgb_of(Image.open(path), "the image"),
        "detector: file": partial(detector, path),
        "detector: bytes": partial(detector, data),
        "detector: pil": lambda: detector(Image.open(path)),
        "request: path": partial(open_image, str(path)),
        "request: file url": partial(open_image, f"file://{path}"),
        "request: base64": lambda: open_image(base64.b64encode(data).decode()),
        "request: data url": lambda: open_image(f"data:image/png;base64,{base64.b64encode(data).decode()}"),
    }


@pytest.mark.parametrize(
    ("make", "left", "right", "size"),
    [
        pytest.param(lambda p: saved(two_colours(), p / "a.png"), BLUE, RED, (24, 16), id="plain"),
        pytest.param(lambda p: saved(see_through("RGBA"), p / "a.png"), BLUE, WHITE, (24, 16), id="transparent"),
        pytest.param(lambda p: saved(see_through("RGBA"), p / "a.webp", lossless=True), BLUE, WHITE, (24, 16),
                     id="webp"),
        pytest.param(lambda p: saved(see_through("RGBA"), p / "a.tif"), BLUE, WHITE, (24, 16), id="tiff"),
        pytest.param(lambda p: saved(see_through("LA"), p / "a.png"), (29,) * 3, WHITE, (24, 16), id="gray"),
        pytest.param(lambda p: saved(see_through("P"), p / "a.gif"), BLUE, WHITE, (24, 16), id="palette"),
        pytest.param(lambda p: saved(two_colours(), p / "a.png", exif=turned()), None, None, (16, 24), id="exif png"),
        pytest.param(lambda p: saved(two_colours(), p / "a.tif", exif=turned()), None, None, (16, 24), id="exif tiff"),
        pytest.param(lambda p: saved(two_colours("CMYK"), p / "a.tif"), BLUE, RED, (24, 16), id="cmyk"),
        pytest.param(lambda p: saved(two_colours(), p / "a.ppm"), BLUE, RED, (24, 16), id="ppm"),
        pytest.param(lambda p: saved(two_colours("L"), p / "a.bmp"), (29,) * 3, (76,) * 3, (24, 16), id="bmp"),
    ],
)  # fmt: skip
def test_a_picture_has_the_same_pixels_by_every_door(
    make: Callable[[Path], Path], left: Any, right: Any, size: tuple[int, int], tmp_path: Path
) -> None:
    path = make(tmp_path)
    seen = {name: door() for name, door in doors(path, tmp_path).items()}
    assert {name: image.size for name, image in seen.items()} == dict.fromkeys(seen, size)
    assert {np.asarray(image).tobytes() for image in seen.values()} == {np.asarray(open_rgb(path)).tobytes()}
    image = seen["pil"]
    if left is not None:
        assert (image.getpixel((4, 8)), image.getpixel((20, 8))) == (left, right)
    else:  # the left half is above after a turn to the right
        assert (image.getpixel((8, 4)), image.getpixel((8, 20))) == (BLUE, RED)


@pytest.mark.parametrize(
    ("shape", "corner"),
    [((16, 24), (200, 200, 200)), ((16, 24, 3), (200, 200, 200)), ((16, 24, 4), (255, 255, 255))],
)
def test_arrays_are_shown_like_files(shape: tuple[int, ...], corner: tuple[int, ...], tmp_path: Path) -> None:
    """The array of four channels is transparent: its colour is 200, its alpha 0."""
    array = np.full(shape, 200, dtype=np.uint8)
    if shape[-1] == 4:
        array[..., 3] = 0
    Image.fromarray(array).save(tmp_path / "a.png")
    given, _ = collect([array], tmp_path, raises=True)
    assert given["image 0"].getpixel((3, 3)) == open_rgb(tmp_path / "a.png").getpixel((3, 3)) == corner


def gray_of(value: float, dtype: Any) -> Image.Image:
    return Image.fromarray(np.full((16, 24), value, dtype))


def animation(path: Path, size: int = 2, **options: Any) -> Path:
    frames = [Image.new("RGB", (24, 16), (60 * k, 9, 9)) for k in range(size)]
    return saved(frames[0], path, save_all=True, append_images=frames[1:], **options)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        pytest.param(lambda p: saved(gray_of(4000, np.uint16), p / "a.png"), "I;16", id="16"),
        pytest.param(lambda p: saved(gray_of(70000, np.int32), p / "a.tif"), "'I'", id="32"),
        pytest.param(lambda p: saved(gray_of(0.5, np.float32), p / "a.tif"), "'F'", id="float"),
        pytest.param(lambda p: animation(p / "a.gif"), "GIF of 2 frames", id="gif"),
        pytest.param(lambda p: animation(p / "a.png", 3), "PNG of 3 frames", id="apng"),
        pytest.param(lambda p: animation(p / "a.webp", lossless=True), "WEBP of 2 frames", id="webp"),
        pytest.param(lambda p: animation(p / "a.tif", 4), "TIFF of 4 pages", id="tiff"),
    ],
)  # fmt: skip
def test_a_picture_that_is_refused_is_refused_by_every_door(
    make: Callable[[Path], Path], named: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    for name, door in doors(path, tmp_path).items():
        with pytest.raises((DataError, RequestRefused), match=named):
            pytest.fail(f"{name} gave {door()}")
    with pytest.raises(DataError, match=named):
        read_header(path)


@pytest.mark.parametrize("chosen", ["seek", "copy", "closed"])
def test_a_chosen_frame_is_a_picture(chosen: str, tmp_path: Path) -> None:
    path = animation(tmp_path / "a.gif", 3)
    if chosen == "closed":
        with Image.open(path) as image:
            image.load()
        assert rgb_of(image, "frame").getpixel((2, 2)) == (0, 9, 9)
        return
    image = Image.open(path)
    image.seek(2 if chosen == "seek" else 0)
    shown = rgb_of(image.copy() if chosen == "copy" else image, "frame")
    assert shown.getpixel((2, 2)) == ((120, 9, 9) if chosen == "seek" else (0, 9, 9))


def test_a_picture_that_was_closed_before_it_was_decoded_is_an_error_that_says_so(tmp_path: Path) -> None:
    with Image.open(saved(two_colours(), tmp_path / "a.png")) as image:
        pass
    with pytest.raises(DataError, match=r"closed before it was decoded; call image\.load\(\) earlier"):
        rgb_of(image, "image 0")


@pytest.mark.parametrize("kind", [1, 4])  # a smaller copy (GeoTIFF's overviews), a mask
def test_smaller_copies_in_a_tiff_are_no_pages(kind: int, tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    with TiffImagePlugin.AppendingTiffWriter(str(path), True) as file:
        two_colours().save(file, format="TIFF")
        file.newFrame()
        two_colours(size=(12, 8)).save(file, format="TIFF", tiffinfo={254: kind})
    with Image.open(path) as image:
        assert image.n_frames == 2  # type: ignore[attr-defined]
    assert open_rgb(path).size == (24, 16) and open_rgb(path).getpixel((20, 8)) == RED


def test_the_first_picture_of_an_mpo_is_read(tmp_path: Path) -> None:
    """The others are previews, depths, or the other eye's."""
    path = animation(tmp_path / "a.mpo", format="MPO", quality=95)
    assert read_header(path).format == "MPO"
    assert open_rgb(path).size == rgb_of(Image.open(path), "x").size == (24, 16)


def test_edits_of_an_opened_image_are_kept(tmp_path: Path) -> None:
    for name in ("a.tif", "a.png", "a.gif"):
        image = Image.open(saved(two_colours(), tmp_path / name)).convert("RGB")
        single = Image.open(tmp_path / name)
        single.load()
        if single.mode == "RGB":
            single.putpixel((0, 0), (1, 2, 3))
            assert rgb_of(single, name).getpixel((0, 0)) == (1, 2, 3), name
            assert single.getpixel((0, 0)) == (1, 2, 3), "the caller's image is unchanged"
        assert rgb_of(image, name).tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 16\nshowpage\n", "PostScript"),
        (b"%PDF-1.4\n", "PDF"),
        (b"8BPS\0\1" + bytes(40), "Photoshop"),
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(40), "JPEG 2000"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a pointer of Git LFS.*git lfs pull"),
        (b"\n<!DOCTYPE html><title>403</title>", "web page"),
        (b"no image at all", "cannot identify"),
    ],
)  # fmt: skip
def test_other_contents_are_refused_by_name_and_start_no_program(
    content: bytes, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would run Ghostscript for the first of them."""
    started, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    for door in (partial(read_header, path), partial(open_rgb, path), partial(open_rgb, Path("it"), data=content)):
        with pytest.raises(DataError, match=named):
            door()
    with pytest.raises(RequestRefused, match=named):
        open_image(base64.b64encode(content).decode())
    assert not started.exists()


def test_a_photo_of_a_telephone_is_recognised_by_its_content(tmp_path: Path) -> None:
    """Such files are often called .jpg."""
    path = tmp_path / "IMG_0001.jpg"
    path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40))
    with pytest.raises(DataError, match=r"coordexp\[heif\]"):
        open_rgb(path)
    with pytest.raises(DataError, match=r"coordexp\[heif\]"):
        open_rgb(Path("bytes"), data=io.BytesIO(path.read_bytes()).read())
