"""How a picture becomes pixels: the only place that calls Pillow's decoders. Header checks that decode nothing, opening
as upright 8-bit RGB, and the size to which the Qwen vision processors bring an image. An image may be in a tar file
(:mod:`coordexp.data.shards`).

Files, bytes, PIL images and arrays get the same treatment (:func:`open_rgb`, :func:`rgb_of`): one list of formats,
upright by EXIF, white behind transparent pixels, nothing of 16 or 32 bits, one picture a file.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, UnidentifiedImageError

from coordexp.data.files import naming
from coordexp.data.shards import MemberFile, find_member, shard_of
from coordexp.errors import DataError, whole_number
from coordexp.reading import LFS_MARK, LFS_POINTER

if TYPE_CHECKING:
    import numpy as np

MAX_ASPECT_RATIO = 200.0
_LARGEST = 1 << 28  # pixels, 800 MB, to which an image may be enlarged


def shape_problem(width: int, height: int) -> str | None:
    """Why the vision processors refuse an image of this shape; None if they don't."""
    if min(width, height) < 1:  # a crop of PIL may be empty, a file is not
        return f"image size {width}x{height} has no pixels"
    if max(height, width) / min(height, width) <= MAX_ASPECT_RATIO:
        return None
    return (
        f"image size {width}x{height} has an aspect ratio above {MAX_ASPECT_RATIO:g}, which the vision processor "
        "refuses; crop or tile the image"
    )


@dataclass(frozen=True, slots=True)
class ResizeRule:
    """Sides become multiples of ``factor`` (the model's patch_size * merge_size), the area stays within the limits, the
    aspect ratio as near as the grid allows. Limits that the grid cannot meet give way, as in the processors (very thin
    images, limits closer together than one grid step). Raises DataError for limits that no image can satisfy."""

    factor: int = 32  # patch 16 x merge 2
    min_pixels: int = 256 * 256
    max_pixels: int = 1024 * 1024  # 1024 image tokens at factor 32

    def __post_init__(self) -> None:
        for name in ("factor", "min_pixels", "max_pixels"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        factor, least, most = self.factor, self.min_pixels, self.max_pixels
        if factor < 1:
            raise DataError(
                f"resize factor is {factor}; expected patch_size * merge_size of the model, e.g. 32 for Qwen3-VL"
            )
        if least < 1 or most < least:
            raise DataError(f"min_pixels={least}, max_pixels={most}; expected 1 <= min_pixels <= max_pixels")
        if least > _LARGEST:
            raise DataError(f"min_pixels={least} would enlarge every image to as many; give at most {_LARGEST}")
        if most < factor * factor:
            raise DataError(f"max_pixels={most} is less than one {factor}x{factor} image token; raise max_pixels")

    def size(self, width: int, height: int) -> tuple[int, int]:
        """``(width, height)`` after a processor resized it. Raises DataError for an image that no processor takes."""
        if problem := shape_problem(width, height):
            raise DataError(problem)
        factor = self.factor
        # Python's round (half to even) is part of the contract: the processors use it too.
        grid_h, grid_w = round(height / factor) * factor, round(width / factor) * factor
        if grid_h * grid_w > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            grid_h = max(factor, math.floor(height / shrink / factor) * factor)
            grid_w = max(factor, math.floor(width / shrink / factor) * factor)
        elif grid_h * grid_w < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            grid_h = math.ceil(height * grow / factor) * factor
            grid_w = math.ceil(width * grow / factor) * factor
        return grid_w, grid_h

    def prepared_size(self, width: int, height: int) -> tuple[int, int]:
        """As :meth:`size`, for an image that a processor gets then: the grid can make a thin image too thin for it."""
        width, height = self.size(width, height)
        longest = int(min(width, height) * MAX_ASPECT_RATIO)
        return min(width, longest), min(height, longest)

    def is_settled(self) -> bool:
        """Whether a resized image stays as it is when it is resized again; tried with sides up to 4 to 1. Limits closer
        together than a grid step, such as equal ones, shrink some images a second time."""
        areas = [limit * scale for limit in (self.min_pixels, self.max_pixels) for scale in (0.3, 1, 1.1, 3)]
        sides = [
            (round(math.sqrt(area * k / 20)), round(math.sqrt(area * 20 / k))) for area in areas for k in range(5, 81)
        ]
        sizes = [self.size(max(1, width), max(1, height)) for width, height in sides]
        return all(self.size(*size) == size for size in sizes)

    def resize(self, image: Image.Image) -> Image.Image:
        size = self.prepared_size(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)


JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Lower-case suffixes of the images that are most common, in which drawings can be saved too."""
HEIF_SUFFIXES = (".heic", ".heif", ".hif")  # of telephones; another package reads them
_CONVERT = "convert it to PNG or JPEG"
FRAMES_CURE = "ffmpeg -i FILE frame_%05d.png"
# Suffixes of files that are not read, and why: Pillow takes a camera's raw file for the small preview in it.
UNREAD = {
    **dict.fromkeys(
        (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv"),
        f"a video; extract its frames: {FRAMES_CURE}",
    ),
    **dict.fromkeys(
        (".svg", ".psd", ".eps", ".ai", ".jxl", ".jp2", ".j2k", ".jpx", ".exr", ".hdr", ".tga", ".ico", ".pcx", ".dds",
         ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".dcm", ".fits"),
        f"a format that is not read; {_CONVERT}",
    ),
}  # fmt: skip
SEEN_SUFFIXES = (*IMAGE_SUFFIXES, ".gif", ".avif", ".mpo", ".ppm", ".pgm", ".pbm", ".pnm", *HEIF_SUFFIXES, *UNREAD)
"""Lower-case suffixes of the pictures that a search of a folder finds, also in formats that are not read."""
# Formats of Pillow that are read. Others are refused by name: Pillow would start a program for EPS, and its readers of
# rare formats take files for images that are none.
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF", "AVIF", "PPM")  # a JPEG may turn out to be an MPO
for _plugin in ("Jpeg", "Png", "WebP", "Tiff", "Bmp", "Gif", "Avif", "Ppm"):  # else the first image imports all others
    importlib.import_module(f"PIL.{_plugin}ImagePlugin")
_HEIF = "HEIF"
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_WEB_PAGE = "a web page, which a failed download leaves; download the image again"
# What is not read, by a file's first bytes in lower case.
_OTHER_CONTENTS = (
    (b"%!ps", f"a PostScript file; {_CONVERT}"),
    (b"%pdf", f"a PDF; {_CONVERT}"),
    (b"8bps", f"a Photoshop file; {_CONVERT}"),
    (b"\x00\x00\x00\x0cjp  ", f"a JPEG 2000 file; {_CONVERT}"),
    (b"<?xml", f"an XML file, such as an SVG drawing; {_CONVERT}"),
    (b"<svg", f"an SVG drawing; {_CONVERT}"),
    (b"<html", _WEB_PAGE),
    (b"<!doctype html", _WEB_PAGE),
    (LFS_MARK.lower(), LFS_POINTER),
)
_HEAD = 64  # bytes that are read for the format
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
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # read up to twice the limit
# Pillow raises these on files that are not complete images.
_PILLOW_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, RuntimeError, TypeError, LookupError, ArithmeticError, struct.error),
    Image.DecompressionBombError,
)


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


def read_header(path: Path, data: bytes | None = None) -> ImageHeader:
    """Read size, format and orientation without decoding pixels. Arguments and errors are those of
    :func:`open_rgb`."""
    with _open(path, data) as image:
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
        DataError: missing, truncated, no image, a format that is not read, an animation or several pages, not 8-bit, or
            of another size than ``expected_size``.
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
        return _to_rgb(image, header, path, apply_orientation)


def rgb_of(image: Image.Image | np.ndarray, name: str) -> Image.Image:
    """A PIL image or an array as :func:`open_rgb` opens the same picture in a file. ``name`` is for errors.

    Raises DataError as :func:`open_rgb`, and for an array that is not uint8 of (height, width), (height, width, 3) or
    (height, width, 4)."""
    if not isinstance(image, Image.Image):
        if (problem := array_problem(image)) is not None:
            raise DataError(f"{name}: {problem}")
        image = Image.fromarray(image)
    path = Path(name)
    try:  # a frame that was chosen by seek() or copy() is one picture; an animation as it was opened is not
        whole = image.tell() == 0 and getattr(image, "n_frames", 1) > 1
    except _PILLOW_ERRORS:  # its file was closed, so that this frame is all there is
        whole = False
    return _to_rgb(image, _header(image, path, whole), path, apply_orientation=True)


def array_problem(array: np.ndarray) -> str | None:
    """The reason why an array is not a picture; None if it is one."""
    if array.dtype == "uint8" and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) and array.size:
        return None
    return f"an array of shape {array.shape} and type {array.dtype}; expected uint8 of (height, width, 3), RGB"


def upright_size(image: Image.Image) -> tuple[int, int]:
    """``(width, height)`` of a PIL image as :func:`rgb_of` shows it. Decodes nothing."""
    return _header(image, Path("the image"), whole=False).size


def _to_rgb(image: Image.Image, header: ImageHeader, path: Path, apply_orientation: bool) -> Image.Image:
    if image.format == "TIFF":
        # Else Pillow maps uncompressed grey, palette and RGBA pixels by the sides of the turned picture.
        setattr(image, "filename", "")  # noqa: B010 - not an attribute of every PIL image
    try:
        if header.opaque:
            rgb = image.convert("RGB")
        else:
            layered = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
            white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
            rgb = Image.alpha_composite(white, layered).convert("RGB")
    except AssertionError as error:  # Pillow's for a picture whose `with` ended before it was decoded
        raise DataError("its file was closed before it was decoded; call image.load() earlier", path=path) from error
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


def save_image(image: Image.Image, path: Path) -> None:
    """Write an image for training: JPEG of good quality if the name says so, else PNG."""
    with naming(path):
        if path.suffix.lower() in JPEG_SUFFIXES:
            image.save(path, format="JPEG", quality=95, subsampling=0)
        else:
            image.save(path, format="PNG")


def size_of_image(path: Path) -> tuple[int, int] | None:
    """Width and height, upright; None for a file that cannot be read, which whoever opens it reports."""
    try:
        return read_header(path).size
    except DataError:
        return None


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
        raise DataError(f"cannot be looked for ({error.strerror})", path=path) from error


def _open(path: Path, data: bytes | None = None) -> Image.Image:
    if data is None and not image_exists(path):
        if path.is_symlink():
            raise DataError(f"is a link to {os.readlink(path)}, which is not there; restore it, or the link", path=path)
        raise DataError("image not found; check the path (relative paths start at the JSONL's folder)", path=path)
    if data is None and (reason := UNREAD.get(path.suffix.lower())) is not None:
        raise DataError(reason, path=path)
    fix = "replace the file" if data is None else "send the file's own bytes"
    try:
        try:
            return Image.open(_content(path, data), formats=FORMATS)
        except UnidentifiedImageError:
            head = _head(path, data)
            if not (path.suffix.lower() in HEIF_SUFFIXES or (head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS)):
                raise
            importlib.import_module("pillow_heif").register_heif_opener()
            return Image.open(_content(path, data), formats=[_HEIF])
    except ModuleNotFoundError as error:
        raise DataError(
            "is a HEIC image; pip install 'coordexp[heif]' to read it, or convert it to JPEG", path=path
        ) from error
    except UnidentifiedImageError as error:
        head = _head(path, data).lstrip().lower()
        if (other := next((what for mark, what in _OTHER_CONTENTS if head.startswith(mark)), None)) is not None:
            raise DataError(f"is {other}", path=path) from error
        # Pillow's own message names the file object in memory.
        raise DataError(f"not a readable image (cannot identify image file {str(path)!r}); {fix}", path=path) from error
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise DataError(f"has more than {most:,} pixels, which are not read; cut it into parts", path=path) from error
    except _PILLOW_ERRORS as error:
        raise DataError(f"not a readable image ({error}); {fix}", path=path) from error


def _content(path: Path, data: bytes | None) -> Path | io.BytesIO | io.BufferedReader:
    if data is not None:
        return io.BytesIO(data)
    member = find_member(path)
    return path if member is None else io.BufferedReader(MemberFile(member))


def _head(path: Path, data: bytes | None) -> bytes:
    content = _content(path, data)
    with content.open("rb") if isinstance(content, Path) else content as file:
        return file.read(_HEAD)


def _has_deep_channels(image: Image.Image) -> bool:
    # Pillow keeps the high byte of colours of 16 bits: 12 bits of a camera would be nearly black.
    tiles: Any = getattr(image, "tile", None)  # of a file that Pillow opened
    arguments = tiles[0][3] if tiles else None
    if image.format == "PPM":
        return isinstance(arguments, tuple) and any(isinstance(one, int) and one > 255 for one in arguments)
    return image.format in ("PNG", "TIFF") and ";16" in str(arguments)


def _header(image: Image.Image, path: Path, whole: bool = True) -> ImageHeader:
    # `whole`: the picture must be all that its file holds.
    if image.mode.startswith(("I", "F")) or _has_deep_channels(image):
        raise DataError(
            f"pixel type {image.mode!r} is not 8-bit; scale it to 8 bits per channel first, plain conversion clips",
            path=path,
        )
    orientation = 1
    try:
        # Otherwise getexif() would decode a PNG to look for a late chunk.
        if image.format != "PNG" or "exif" in image.info:
            orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except _PILLOW_ERRORS as error:
        raise DataError(f"unreadable EXIF data ({error}); save the image again without it", path=path) from error
    orientation = orientation if orientation in _UPRIGHT_BY_ORIENTATION else 1
    size = stored_size = image.size
    if orientation >= 5:
        turned = (image.height, image.width)
        # Pillow swaps the sides of a TIFF itself.
        size, stored_size = (size, turned) if image.format == "TIFF" else (turned, size)
    opaque = image.mode not in ("RGBA", "LA", "PA", "RGBa", "La") and "transparency" not in image.info
    if whole and (several := _pictures(image, path)) > 1:
        many = "pages" if image.format == "TIFF" else "frames"
        raise DataError(
            f"a {image.format} of {several} {many}; extract those that you need: {FRAMES_CURE} (in Python: "
            "image.seek(k), then image.copy())",
            path=path,
        )
    return ImageHeader(size, stored_size, orientation, image.format or "", image.mode, opaque)


_REDUCED, _MASK, _SUBFILE_TYPE = 1, 4, 254  # of a TIFF's page: a smaller copy, or a mask, of another


def _pictures(image: Image.Image, path: Path) -> int:
    # Further pictures of an MPO, and of HEIF, are previews, depths or the other eye's.
    if image.format not in ("GIF", "PNG", "WEBP", "AVIF", "TIFF"):
        return 1
    try:
        count = getattr(image, "n_frames", 1)
        if image.format != "TIFF" or count == 1:
            return count
        pages = 0
        for page in range(count):
            image.seek(page)
            kind = image.tag_v2.get(_SUBFILE_TYPE, 0)  # pyright: ignore[reportAttributeAccessIssue]
            pages += not kind & (_REDUCED | _MASK)
        image.seek(0)
        return max(pages, 1)
    except _PILLOW_ERRORS as error:
        raise DataError(f"not a readable image ({error}); replace the file", path=path) from error


def image_stat(image: bytes) -> os.stat_result:
    """Size and times of an image file; of an image in a shard the shard's own. Raises OSError."""
    try:
        return os.stat(image)
    except NotADirectoryError:
        shard = shard_of(os.fsdecode(image))
        if shard is None:
            raise
        return os.stat(shard)


def image_num_bytes(path: Path) -> int:
    """The size of an image file, in a folder or in a shard. Raises OSError."""
    member = find_member(path)
    return os.stat(path).st_size if member is None else member.size


def image_bytes(path: Path) -> bytes:
    """An image file's own bytes, in a folder or in a shard. Raises DataError if they cannot be read."""
    try:
        member = find_member(path)
        if member is None:
            return path.read_bytes()
        with MemberFile(member) as file:
            return file.readall()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", path=path) from error
