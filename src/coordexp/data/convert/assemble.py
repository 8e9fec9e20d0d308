"""The half that all converters share: pixel shapes and source images → resized images, JSONL and report."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from PIL import Image

from coordexp.data.convert.report import ConversionReport, Note, SkipReason
from coordexp.data.convert.simplify import simplified
from coordexp.data.images import ImageHeader, open_rgb, read_header
from coordexp.data.jsonl import clean_desc
from coordexp.data.smart_resize import (
    DEFAULT_FACTOR,
    DEFAULT_MAX_PIXELS,
    DEFAULT_MIN_PIXELS,
    MAX_ASPECT_RATIO,
    check_resize_limits,
    smart_resize,
)
from coordexp.data.write import write_jsonl
from coordexp.errors import DataError
from coordexp.records import NUM_BINS, GeometryKind, GTObject, ImageRecord

Progress = Callable[[int, int], None]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
_JPEG_SUFFIXES = (".jpg", ".jpeg")
_SUFFIXES_BY_FORMAT = {"JPEG": _JPEG_SUFFIXES, "PNG": (".png",)}


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """What happens to images and polygons.

    ``factor`` is the model's patch_size * merge_size; ``min_pixels`` / ``max_pixels`` bound the area after resizing.
    ``resize=False`` leaves images where they are and only refers to them. ``max_vertices``: polygons with more are
    simplified (:mod:`coordexp.data.convert.simplify`). ``workers``: threads that decode, resize and save.
    """

    resize: bool = True
    factor: int = DEFAULT_FACTOR
    min_pixels: int = DEFAULT_MIN_PIXELS
    max_pixels: int = DEFAULT_MAX_PIXELS
    max_vertices: int | None = None
    workers: int = min(8, os.cpu_count() or 1)

    def __post_init__(self) -> None:
        check_resize_limits(self.factor, self.min_pixels, self.max_pixels)
        if self.max_vertices is not None and self.max_vertices < 3:
            raise DataError(f"max_vertices is {self.max_vertices}; a polygon needs at least 3")
        if self.workers < 1:
            raise DataError(f"workers is {self.workers}; expected at least 1 thread")


@dataclass(frozen=True, slots=True)
class SourceObject:
    """An annotated shape in source pixels: ``(x1, y1, x2, y2)`` or a flat ring of points. ``index`` as in Problem."""

    index: int
    desc: str
    kind: GeometryKind
    points: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SourceImage:
    """An image with its sound-looking objects. ``file`` names it in the report and below ``images/`` in the output;
    ``declared_size`` is the ``(width, height)`` its annotation states, None where it states none."""

    file: str
    annotation: str
    path: Path
    declared_size: tuple[int, int] | None
    objects: tuple[SourceObject, ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """An image ready for use: its file and size, and the ``frame`` (width, height) its coordinates are measured in."""

    path: Path
    size: tuple[int, int]
    frame: tuple[int, int]
    note: tuple[Note, str] | None


class _Skip(Exception):
    def __init__(self, reason: SkipReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def to_bin(x: float, extent: int) -> int:
    """Pixel coordinate → norm1000 bin on a side of ``extent`` pixels: 0 → 0, ``extent - 1`` → 999."""
    return min(NUM_BINS - 1, max(0, round((NUM_BINS - 1) * x / max(1, extent - 1))))


def assemble(
    sources: Sequence[SourceImage],
    report: ConversionReport,
    options: ImageOptions,
    progress: Progress | None = None,
) -> ConversionReport:
    """Prepare images, quantise objects, write the JSONL and the report beside it; records stand in ``sources`` order.

    ``progress(done, total)`` is called after each image, from the calling thread.

    Raises:
        DataError: no image at all can be used.
    """
    targets = _targets(sources, report)
    records: list[ImageRecord] = []
    pool = ThreadPoolExecutor(options.workers)
    try:
        jobs = pool.map(lambda pair: _prepare(pair[0], pair[1], options), targets)
        for done, ((source, _), prepared) in enumerate(zip(targets, jobs, strict=True), start=1):
            if isinstance(prepared, _Skip):
                report.skip_image(prepared.reason, source.annotation, str(prepared), len(source.objects))
            else:
                records.append(_record(source, prepared, report, options.max_vertices))
            if progress is not None:
                progress(done, len(targets))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C must not wait for a hundred thousand images
    report.images = len(records)
    report.objects = sum(len(record.objects) for record in records)
    report.objects_by_desc.update(obj.desc for record in records for obj in record.objects)
    assert report.images_seen == report.images + report.skipped_images.total(), "an image went uncounted"
    assert report.objects_seen == report.objects + report.skipped_objects.total(), "an object went uncounted"
    report.jsonl.parent.mkdir(parents=True, exist_ok=True)
    report.path.write_text(report.to_json(), encoding="utf-8")
    if not records:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in report.skipped_images.items()) or "none found"
        raise DataError(f"no usable image ({reasons}); details in {report.path}", path=report.jsonl)
    write_jsonl(records, report.jsonl)
    return report


def _targets(sources: Sequence[SourceImage], report: ConversionReport) -> list[tuple[SourceImage, Path]]:
    """Where each image goes. No two may share a place, and none may overwrite its source."""
    images_dir = report.jsonl.parent / "images" / report.jsonl.stem
    targets: dict[Path, SourceImage] = {}
    for source in sources:
        relative = PurePosixPath(source.file)
        kept = relative.suffix.lower() in (*_JPEG_SUFFIXES, ".png")
        target = images_dir / (relative if kept else f"{relative}.png")
        if os.path.realpath(target) == os.path.realpath(source.path):
            raise DataError("the converted image would overwrite its source; choose another out_dir", path=source.path)
        if target in targets:
            detail = f"{source.file} is annotated by {targets[target].annotation} already"
            report.skip_image(SkipReason.DUPLICATE_IMAGE, source.annotation, detail, len(source.objects))
        else:
            targets[target] = source
    return [(source, target) for target, source in targets.items()]


def unsafe_file_name(file: str) -> bool:
    """True when ``file`` could leave the folder it is joined to."""
    path = PurePosixPath(file)
    return not file.strip() or path.is_absolute() or ".." in path.parts or "\0" in file


def _prepare(source: SourceImage, target: Path, options: ImageOptions) -> _Prepared | _Skip:
    try:
        if not source.path.is_file():
            raise _Skip(SkipReason.MISSING_IMAGE, f"no file {source.path}")
        try:
            header = read_header(source.path)
            frame, upright, note = _frame(source.declared_size, header)
            return _place(source, header, frame, upright, note, target, options)
        except DataError as error:
            raise _Skip(SkipReason.UNREADABLE_IMAGE, str(error)) from error
    except _Skip as skip:
        return skip


def _frame(
    declared: tuple[int, int] | None, header: ImageHeader
) -> tuple[tuple[int, int], bool, tuple[Note, str] | None]:
    """The size in which coordinates are measured, whether EXIF orientation applies, and what to note."""
    real, shown = header.size, f"{header.size[0]}x{header.size[1]}"
    if declared is None or min(declared) < 1:
        return real, True, (Note.SIZE_MISSING, f"annotation gives no size; took the image's {shown}")
    if declared == real:
        return declared, True, None
    stated = f"annotation says {declared[0]}x{declared[1]}, image is {shown}"
    if declared == header.stored_size:
        return declared, False, (Note.EXIF_IGNORED, f"{stated} after its EXIF orientation, which was left out")
    # One pixel of rounding on either side is still the same shape.
    if abs(declared[0] * real[1] - declared[1] * real[0]) <= max(*declared, *real):
        return declared, True, (Note.SIZE_SCALED, f"{stated}; coordinates were read on the annotation's scale")
    raise _Skip(SkipReason.SIZE_MISMATCH, f"{stated}: another shape")


def _place(
    source: SourceImage,
    header: ImageHeader,
    frame: tuple[int, int],
    upright: bool,
    note: tuple[Note, str] | None,
    target: Path,
    options: ImageOptions,
) -> _Prepared:
    width, height = header.size if upright else header.stored_size
    size = (width, height)
    if options.resize:
        if max(size) / min(size) > MAX_ASPECT_RATIO:
            raise _Skip(SkipReason.EXTREME_ASPECT_RATIO, f"image is {width}x{height}")
        height, width = smart_resize(height, width, options.factor, options.min_pixels, options.max_pixels)
    # Decoded even where the file is kept as it is: a truncated image must not surface in the middle of a training.
    image = open_rgb(source.path, apply_orientation=upright)
    if not options.resize and upright:
        return _Prepared(source.path, size, frame, note)
    target.parent.mkdir(parents=True, exist_ok=True)
    if (width, height) == size and _is_plain(header, target):
        shutil.copyfile(source.path, target)  # not one pixel changes: no second JPEG generation
    else:
        resized = image if (width, height) == size else image.resize((width, height), Image.Resampling.BICUBIC)
        if target.suffix.lower() in _JPEG_SUFFIXES:
            resized.save(target, format="JPEG", quality=95, subsampling=0)
        else:
            resized.save(target, format="PNG")
    return _Prepared(target, (width, height), frame, note)


def _is_plain(header: ImageHeader, target: Path) -> bool:
    """Does the file as it is hold upright RGB in the format its name promises?"""
    suffixes = _SUFFIXES_BY_FORMAT.get(header.format, ())
    return header.orientation == 1 and header.mode == "RGB" and target.suffix.lower() in suffixes


def _record(
    source: SourceImage, prepared: _Prepared, report: ConversionReport, max_vertices: int | None
) -> ImageRecord:
    if prepared.note is not None:
        report.note(prepared.note[0], source.annotation, None, prepared.note[1])
    objects: list[GTObject] = []
    for obj in source.objects:
        try:
            quantised = _quantise(obj, prepared.frame, source.annotation, report)
            if max_vertices is not None and quantised.kind == "poly" and len(quantised.bins) > 2 * max_vertices:
                quantised = _simplify(quantised, max_vertices, source.annotation, obj.index, report)
            if quantised in objects:
                detail = f"{quantised.desc} {quantised.kind} {list(quantised.bins)} is there already; both are kept"
                report.note(Note.DUPLICATE_OBJECT, source.annotation, obj.index, detail)
            objects.append(quantised)
        except _Skip as skip:
            report.skip_object(skip.reason, source.annotation, obj.index, str(skip))
    if source.objects and not objects:
        report.note(Note.EMPTIED_IMAGE, source.annotation, None, "every object was left out; it is an empty image now")
    return ImageRecord(
        sample_id=source.file,
        image=prepared.path,
        width=prepared.size[0],
        height=prepared.size[1],
        objects=tuple(objects),
        metadata={"source": {"file": source.file, "width": prepared.frame[0], "height": prepared.frame[1]}},
    )


def _quantise(obj: SourceObject, frame: tuple[int, int], file: str, report: ConversionReport) -> GTObject:
    """Pixel shape → GT object. Raises _Skip with the reason."""
    desc = _desc(obj.desc)
    shown = f"{desc} {obj.kind} {[round(value, 2) for value in obj.points]} on {frame[0]}x{frame[1]}"
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = obj.points
        if x2 < x1 or y2 < y1:
            raise _Skip(SkipReason.INVERTED, shown)
    if _area(obj.kind, obj.points) == 0:
        raise _Skip(SkipReason.ZERO_AREA, shown)
    # The image spans 0..W in pixel-edge coordinates; W itself is on the edge, not over it.
    clipped = tuple(min(max(value, 0.0), float(frame[at % 2])) for at, value in enumerate(obj.points))
    if _area(obj.kind, clipped) == 0:
        raise _Skip(SkipReason.OUTSIDE_IMAGE, shown)
    bins = tuple(to_bin(value, frame[at % 2]) for at, value in enumerate(clipped))
    if obj.kind == "poly":
        bins = _canonical_ring(bins)
        if len(bins) < 6:
            raise _Skip(SkipReason.COLLAPSED_POLYGON, shown)
    if clipped != obj.points:
        report.note(Note.CLIPPED, file, obj.index, shown)
    if _area(obj.kind, bins) == 0:
        report.note(Note.COLLAPSED_BINS, file, obj.index, shown)
    return GTObject(desc, obj.kind, bins)


def _simplify(obj: GTObject, max_vertices: int, file: str, index: int, report: ConversionReport) -> GTObject:
    simpler, iou = simplified(obj, max_vertices)
    report.simplified(iou, file, index, f"{obj.desc}: {len(obj.bins) // 2} vertices to {max_vertices}, IoU {iou:.4f}")
    return simpler


def _desc(text: str) -> str:
    if not text.strip():
        raise _Skip(SkipReason.EMPTY_DESC, "the class name is empty")
    try:
        return clean_desc(text)
    except ValueError as error:
        raise _Skip(SkipReason.REFUSED_DESC, str(error)) from error


def _area(kind: GeometryKind, points: Sequence[float]) -> float:
    """Area in square units: of the box, or enclosed by the ring."""
    if kind == "bbox_2d":
        return (points[2] - points[0]) * (points[3] - points[1])
    return abs(signed_ring_area(points))


def bounds(points: Sequence[float]) -> tuple[float, float, float, float]:
    """The box ``(x1, y1, x2, y2)`` around a flat list of points."""
    return min(points[0::2]), min(points[1::2]), max(points[0::2]), max(points[1::2])


def signed_ring_area(points: Sequence[float]) -> float:
    """Shoelace area of a flat ring; positive when it runs clockwise on the screen (y points down)."""
    xs, ys = points[0::2], points[1::2]
    following = [*range(1, len(xs)), 0]
    return math.fsum(xs[i] * ys[j] - xs[j] * ys[i] for i, j in enumerate(following)) / 2


def _canonical_ring(bins: tuple[int, ...]) -> tuple[int, ...]:
    """One writing for each ring: no repeated neighbours, clockwise, from its top-most (then left-most) point. The
    shape stays as it is; a model learns one order instead of every annotator's own."""
    points = list(zip(bins[0::2], bins[1::2], strict=True))
    ring = [point for at, point in enumerate(points) if point != points[at - 1]]
    if not ring:
        return bins[:2]
    if signed_ring_area([value for point in ring for value in point]) < 0:
        ring.reverse()
    start = min(range(len(ring)), key=lambda at: (ring[at][1], ring[at][0]))
    return tuple(value for point in ring[start:] + ring[:start] for value in point)
