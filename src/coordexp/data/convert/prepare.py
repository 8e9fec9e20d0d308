"""Source images → images for the model: decoded once, upright as annotated, resized."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from coordexp.data.convert.report import LeftOut, Note, SkipReason
from coordexp.data.convert.sources import SourceImage
from coordexp.data.images import JPEG_SUFFIXES, ImageHeader, open_rgb, read_header
from coordexp.data.preparation import ResizeRule
from coordexp.data.smart_resize import (
    DEFAULT_FACTOR,
    DEFAULT_MAX_PIXELS,
    DEFAULT_MIN_PIXELS,
    MAX_ASPECT_RATIO,
    check_resize_limits,
)
from coordexp.errors import DataError

_SUFFIXES_BY_FORMAT = {"JPEG": JPEG_SUFFIXES, "PNG": (".png",)}


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """What happens to images and polygons.

    ``factor`` is the model's patch_size * merge_size; ``min_pixels`` / ``max_pixels`` bound the area after resizing.
    ``resize=False`` leaves images where they are and only refers to them. ``max_vertices``: polygons with more are
    simplified (:mod:`coordexp.data.convert.simplify`). ``workers``: threads that decode, resize and save.
    ``overwrite``: a dataset of the same name may be replaced.
    """

    resize: bool = True
    factor: int = DEFAULT_FACTOR
    min_pixels: int = DEFAULT_MIN_PIXELS
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_vertices: int | None = None
    workers: int = min(8, os.cpu_count() or 1)
    overwrite: bool = False

    @property
    def rule(self) -> ResizeRule | None:
        """How images are resized; None where they are not."""
        return ResizeRule(self.factor, self.min_pixels, self.max_pixels) if self.resize else None

    def __post_init__(self) -> None:
        check_resize_limits(self.factor, self.min_pixels, self.max_pixels)
        if self.max_vertices is not None and self.max_vertices < 3:
            raise DataError(f"max_vertices is {self.max_vertices}; a polygon needs at least 3")
        if self.workers < 1:
            raise DataError(f"workers is {self.workers}; expected at least 1 thread")


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image ready for use: its file and size, and the ``frame`` (width, height) its coordinates are measured in."""

    path: Path
    size: tuple[int, int]
    frame: tuple[int, int]
    notes: tuple[tuple[Note, str], ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """How an image is to be read: the size its coordinates are measured in, and whether it is turned upright first."""

    size: tuple[int, int]
    upright: bool
    notes: tuple[tuple[Note, str], ...]


def prepare_image(source: SourceImage, target: Path, options: ImageOptions) -> PreparedImage | LeftOut:
    """Decode an image, and write it to ``target`` as the model shall see it; or the reason why it cannot be used."""
    try:
        if source.embedded is not None:
            return _place_embedded(source, source.embedded, target, options)
        if not source.path.is_file():
            raise LeftOut(SkipReason.MISSING_IMAGE, f"no file {source.path}")
        try:
            header = read_header(source.path)
            return _place(source.path, header, _frame(source.declared_size, header), target, options)
        except DataError as error:
            raise LeftOut(SkipReason.UNREADABLE_IMAGE, str(error)) from error
    except LeftOut as reason:
        return reason


def _place_embedded(
    source: SourceImage, read: Callable[[], bytes], target: Path, options: ImageOptions
) -> PreparedImage:
    """As if the bytes lay in a file; they become one where images are only referred to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = target.with_name(f".{target.name}.embedded")
    try:
        written.write_bytes(read())
        header = read_header(written)
        placed = _place(written, header, _frame(source.declared_size, header), target, options)
        if placed.path == written:
            os.replace(written, target)
            placed = replace(placed, path=target)
    except DataError as error:
        raise LeftOut(SkipReason.UNREADABLE_IMAGE, f"its imageData: {error}") from error
    finally:
        written.unlink(missing_ok=True)
    note = (Note.EMBEDDED_IMAGE, f"no file {source.path}; took the annotation's own copy")
    return replace(placed, notes=(*placed.notes, note))


def _frame(declared: tuple[int, int] | None, header: ImageHeader) -> _Frame:
    """Raises LeftOut when the annotation is for an image of another shape."""
    real, shown = header.size, f"{header.size[0]}x{header.size[1]}"
    # A half turn, a mirror image or a square photo: its size is the same either way, so nothing tells how it was seen.
    turned = (Note.EXIF_APPLIED, f"EXIF orientation {header.orientation}; taken as annotated upright, size cannot tell")
    if declared is None:
        missing = (Note.SIZE_MISSING, f"annotation gives no size; took the image's {shown}")
        return _Frame(real, True, (missing,) if header.orientation == 1 else (missing, turned))
    if declared == real:
        ambiguous = header.orientation != 1 and header.stored_size == real
        return _Frame(declared, True, (turned,) if ambiguous else ())
    stated = f"annotation says {declared[0]}x{declared[1]}, image is {shown}"
    if declared == header.stored_size:
        ignored = (Note.EXIF_IGNORED, f"{stated} after its EXIF orientation, which was left out")
        return _Frame(declared, False, (ignored,))
    # One pixel of rounding on either side is still the same shape.
    if abs(declared[0] * real[1] - declared[1] * real[0]) <= max(*declared, *real):
        scaled = (Note.SIZE_SCALED, f"{stated}; coordinates were read on the annotation's scale")
        return _Frame(declared, True, (scaled,))
    raise LeftOut(SkipReason.SIZE_MISMATCH, f"{stated}: another shape")


def _place(path: Path, header: ImageHeader, frame: _Frame, target: Path, options: ImageOptions) -> PreparedImage:
    width, height = header.size if frame.upright else header.stored_size
    size = (width, height)
    if options.rule is not None:
        if max(size) / min(size) > MAX_ASPECT_RATIO:
            raise LeftOut(SkipReason.EXTREME_ASPECT_RATIO, f"image is {width}x{height}")
        width, height = options.rule.size(width, height)
    # Decoded even where the file is kept as it is: a truncated image must not surface in the middle of a training.
    image = open_rgb(path, apply_orientation=frame.upright)
    if not options.resize and frame.upright:
        return PreparedImage(path, size, frame.size, frame.notes)
    target.parent.mkdir(parents=True, exist_ok=True)
    if (width, height) == size and _is_plain(header, target):
        shutil.copyfile(path, target)  # not one pixel changes: no second JPEG generation
    else:
        resized = image if options.rule is None else options.rule.resize(image)
        if target.suffix.lower() in JPEG_SUFFIXES:
            resized.save(target, format="JPEG", quality=95, subsampling=0)
        else:
            resized.save(target, format="PNG")
    return PreparedImage(target, (width, height), frame.size, frame.notes)


def _is_plain(header: ImageHeader, target: Path) -> bool:
    """Does the file as it is hold upright RGB in the format its name promises?"""
    suffixes = _SUFFIXES_BY_FORMAT.get(header.format, ())
    return header.orientation == 1 and header.mode == "RGB" and target.suffix.lower() in suffixes
