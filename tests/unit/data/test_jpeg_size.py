"""The quick look at a JPEG's first bytes finds the size that Pillow finds, or leaves the file to it."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from coordexp.data.images import read_header
from coordexp.data.jpeg_size import plain_jpeg_size

TURNED = Image.Exif()
TURNED[0x0112] = 6


def jpeg(mode: str = "RGB", size: tuple[int, int] = (24, 17), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 40).convert(mode).save(file, "jpeg", **options)
    return file.getvalue()


def found(data: bytes) -> tuple[int, int] | None:
    """The quick answer, which must be that of the full look where there is one."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        size = plain_jpeg_size(file.name)
        if size is not None:
            header = read_header(Path(file.name))
            assert (header.size, header.stored_size, header.orientation) == (size, size, 1)
    return size


PLAIN: dict[str, dict[str, Any]] = {
    "colour": {},
    "grey": {"mode": "L"},
    "four inks": {"mode": "CMYK"},
    "progressive": {"progressive": True},
    "with a profile": {"icc_profile": b"p" * 3000},
    "with a comment": {"comment": b"made by hand"},
    "with restarts": {"restart_marker_rows": 1},
    "a line": {"size": (700, 1)},
}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_plain_files_are_taken(options: dict[str, Any]) -> None:
    assert found(jpeg(**options)) == options.get("size", (24, 17))


@pytest.mark.parametrize(
    "data",
    [jpeg(exif=TURNED), jpeg(xmp=b"<x/>"), jpeg()[:300], jpeg(icc_profile=b"p" * 30_000), b"", b"\xff\xd8", b"GIF89a"],
    ids=["turned by Exif", "with XMP", "cut off", "a scan far behind", "nothing", "two bytes", "another format"],
)
def test_other_files_are_left(data: bytes) -> None:
    assert found(data) is None


def test_what_is_no_file_is_left(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jpg", tmp_path / "a\0b.jpg"):
        assert plain_jpeg_size(str(path)) is None


def test_more_pixels_than_pillow_likes_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    assert found(jpeg(size=(20, 20))) == (20, 20)
    with tempfile.NamedTemporaryFile() as file:
        file.write(jpeg(size=(20, 21)))
        file.flush()
        assert plain_jpeg_size(file.name) is None


SOURCES = [
    jpeg(),
    jpeg("L", progressive=True),
    jpeg("CMYK"),
    jpeg(icc_profile=b"p" * 40),
    jpeg(comment=b"c", exif=TURNED),
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(SOURCES),
    st.lists(
        st.tuples(
            st.integers(0, 700),
            st.integers(0, 3),
            st.binary(max_size=3) | st.sampled_from([b"\xff", b"\xff\xe1", b"\xff\xe2\0\x06MPF\0"]),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_damage(data: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    for at, cut, put in changes:
        data = data[:at] + put + data[at + cut :]
    found(data)
