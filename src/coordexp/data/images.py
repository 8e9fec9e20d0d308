"""Image files: header checks that decode nothing, opening as upright 8-bit RGB, and the size to which the Qwen vision
processors bring an image, computed here so that preparation can do it once."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from coordexp.data.shards import MemberFile, find_member
from coordexp.errors import DataError

MAX_ASPECT_RATIO = 200.0
DEFAULT_FACTOR = 32  # patch 16 x merge 2
DEFAULT_MIN_PIXELS = 256 * 256
DEFAULT_MAX_PIXELS = 1024 * 1024  # 1024 image tokens at factor 32


def check_resize_limits(factor: int, min_pixels: int, max_pixels: int) -> None:
    """Raise DataError for limits that no image can satisfy."""
    if factor < 1:
        raise DataError(
            f"resize factor is {factor}; expected patch_size * merge_size of the model, e.g. 32 for Qwen3-VL"
        )
    if min_pixels < 1 or max_pixels < min_pixels:
        raise DataError(f"min_pixels={min_pixels}, max_pixels={max_pixels}; expected 1 <= min_pixels <= max_pixels")
    if max_pixels < factor * factor:
        raise DataError(f"max_pixels={max_pixels} is less than one {factor}x{factor} image token; raise max_pixels")


def shape_problem(width: int, height: int) -> str | None:
    """Why the vision processors refuse an image of this shape; None if they don't."""
    if max(height, width) / min(height, width) <= MAX_ASPECT_RATIO:
        return None
    return (
        f"image size {width}x{height} has an aspect ratio above {MAX_ASPECT_RATIO:g}, which the vision processor "
        "refuses; crop or tile the image"
    )


def smart_resize(
    height: int,
    width: int,
    factor: int = DEFAULT_FACTOR,
    min_pixels: int = DEFAULT_MIN_PIXELS,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> tuple[int, int]:
    """``(height, width)`` in pixels after resizing: multiples of ``factor``, area within the limits, aspect ratio kept
    as nearly as the grid allows. The limits give way, as in the processors, where the grid cannot meet them (very thin
    images, limits closer together than one grid step).

    Raises:
        DataError: a side is not positive, the aspect ratio exceeds 200, or the limits contradict each other.
    """
    check_resize_limits(factor, min_pixels, max_pixels)
    if height < 1 or width < 1:
        raise DataError(f"image size {width}x{height}: both sides must be at least 1 pixel")
    if problem := shape_problem(width, height):
        raise DataError(problem)
    # Python's round (half to even) is part of the contract: the processors use it too.
    grid_h, grid_w = round(height / factor) * factor, round(width / factor) * factor
    if grid_h * grid_w > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        grid_h = max(factor, math.floor(height / shrink / factor) * factor)
        grid_w = max(factor, math.floor(width / shrink / factor) * factor)
    elif grid_h * grid_w < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        grid_h = math.ceil(height * grow / factor) * factor
        grid_w = math.ceil(width * grow / factor) * factor
    return grid_h, grid_w


JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")
"""Lower-case suffixes of JPEG files."""
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Lower-case suffixes of the images that a search of a folder finds."""
_SHOWN_OF_PATH = 200
_EXIF_ORIENTATION = 0x0112
_UPRIGHT_BY_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow raises these on files that are not complete images.
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The header of an image file. Sizes are ``(width, height)`` in pixels: ``size`` as seen upright,
    ``stored_size`` before the EXIF orientation (1..8, 1 = upright as stored) is applied; ``opaque``: no pixel can be
    transparent."""

    size: tuple[int, int]
    stored_size: tuple[int, int]
    orientation: int
    format: str
    mode: str
    opaque: bool


def read_header(path: Path) -> ImageHeader:
    """Read size, format and orientation without decoding pixels. Raises DataError as :func:`open_rgb`."""
    with _open(path) as image:
        return _header(image, path)


def open_rgb(
    path: Path,
    *,
    data: bytes | None = None,
    expected_size: tuple[int, int] | None = None,
    apply_orientation: bool = True,
    max_pixels: int | None = None,
) -> Image.Image:
    """Decode an image to RGB, upright by its EXIF orientation; transparent pixels show white.

    Args:
        data: the image file's bytes, if it is in memory; ``path`` names it in errors then.
        expected_size: the upright ``(width, height)`` that the caller's annotations are made for.
        max_pixels: refuse an image that has more, before any is decoded.
        apply_orientation: False keeps the pixels as stored (annotations made by a tool that ignores EXIF).

    Raises:
        DataError: missing, truncated, no image, not 8-bit, or of another size than ``expected_size``.
    """
    with _open(path, data) as image:
        header = _header(image, path)
        size = header.size if apply_orientation else header.stored_size
        if max_pixels is not None and size[0] * size[1] > max_pixels:
            raise DataError(
                f"has {size[0]}x{size[1]} pixels, and at most {max_pixels:,} are taken; shrink it", path=path
            )
        if expected_size is not None and size != expected_size:
            raise DataError(size_problem(expected_size, size), path=path)
        try:
            if header.opaque:
                rgb = image.convert("RGB")
            else:
                layered = image.convert("RGBA")
                white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
                rgb = Image.alpha_composite(white, layered).convert("RGB")
        except _PILLOW_ERRORS as error:
            raise DataError(f"cannot decode the image ({error}); replace the file", path=path) from error
        # Pillow's operations keep EXIF and XMP, by which vLLM would turn these pixels again.
        for key in ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"):
            rgb.info.pop(key, None)
        orientation, is_turned = header.orientation, image.format == "TIFF"  # which Pillow turns while decoding
        if is_turned:  # to be undone: 6 and 8 undo each other, the others themselves
            orientation = {6: 8, 8: 6}.get(orientation, orientation)
        turn = None if is_turned == apply_orientation else _UPRIGHT_BY_ORIENTATION.get(orientation)
        return rgb if turn is None else rgb.transpose(turn)


def size_problem(declared: tuple[int, int], real: tuple[int, int]) -> str:
    """The message for an image of another size than the declared ``(width, height)``."""
    return (
        f"the record says width={declared[0]}, height={declared[1]}, but the image is {real[0]}x{real[1]} "
        "(width x height, upright); correct the record, or restore the image that was annotated"
    )


def image_exists(path: Path) -> bool:
    """Whether ``path`` is a file. Raises DataError if it cannot be looked up: too long a name, a locked folder."""
    try:
        return path.is_file() or find_member(path) is not None
    except OSError as error:
        text = str(path)
        shown = text if len(text) <= _SHOWN_OF_PATH else f"{text[:_SHOWN_OF_PATH]}… ({len(text):,} characters)"
        raise DataError(f"cannot be looked for ({error.strerror})", path=shown) from error


def _open(path: Path, data: bytes | None = None) -> Image.Image:
    if data is None and not image_exists(path):
        raise DataError("image not found; check the path (relative paths start at the JSONL's folder)", path=path)
    try:
        if data is not None:
            return Image.open(io.BytesIO(data))
        member = find_member(path)
        return Image.open(path) if member is None else Image.open(io.BufferedReader(MemberFile(member)))
    except _PILLOW_ERRORS as error:
        unknown = isinstance(error, UnidentifiedImageError)  # whose message names the file object in memory
        reason = f"cannot identify image file {str(path)!r}" if unknown else str(error)
        fix = "replace the file" if data is None else "send the file's own bytes"
        raise DataError(f"not a readable image ({reason}); {fix}", path=path) from error


def _header(image: Image.Image, path: Path) -> ImageHeader:
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"pixel type {image.mode!r} is not 8-bit; scale it to 8 bits per channel first, plain conversion clips",
            path=path,
        )
    orientation = 1
    if image.format != "PNG" or "exif" in image.info:  # otherwise getexif() would decode a PNG to look for a late chunk
        try:
            orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
        except _PILLOW_ERRORS as error:
            raise DataError(f"unreadable EXIF data ({error}); save the image again without it", path=path) from error
        orientation = orientation if orientation in _UPRIGHT_BY_ORIENTATION else 1
    size = stored_size = image.size
    if orientation >= 5:
        turned = (image.height, image.width)
        # Pillow swaps the sides of a TIFF itself.
        size, stored_size = (size, turned) if image.format == "TIFF" else (turned, size)
    opaque = image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info
    return ImageHeader(size, stored_size, orientation, image.format or "", image.mode, opaque)
