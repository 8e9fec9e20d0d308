"""Annotated shapes: the records that each format's reader returns, and their way onto the norm1000 grid."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, get_args

from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason
from coordexp.data.jsonl import clean_desc
from coordexp.data.polygons import canonical_ring, shape_area
from coordexp.errors import DataError
from coordexp.geometry import mask_iou, to_bin
from coordexp.records import GeometryKind, GTObject

InstanceGeometry = Literal["bbox", "poly"]
"""Which shape of an annotation with a box and a segmentation to use."""
ShapeGeometry = Literal["as_annotated", "bbox", "poly"]
"""Keep boxes and polygons; turn polygons into their bounds; or boxes into polygons of four corners."""
Crowds = Literal["leave_out", "keep"]
"""Leave annotations of groups out, or keep each as one object."""

_CANVAS = 1000  # on which a simplified polygon is compared: fine enough that a lost pixel shows


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
    ``declared_size`` is the ``(width, height)`` in its annotation, None without one. ``embedded`` returns the bytes of
    an image that is in no file."""

    file: str
    annotation: str
    path: Path
    declared_size: tuple[int, int] | None
    objects: tuple[SourceObject, ...]
    embedded: Callable[[], bytes] | None = None


def check_choice(what: str, given: str, known: Any) -> None:
    if given not in get_args(known):
        raise DataError(f"{what} {given!r} is unknown; use {' or '.join(get_args(known))}")


def check_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{what} not found; check the path", path=folder)


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)


def with_slashes(file: str) -> str:
    """A relative file name as annotated on any system: Windows tools write backslashes."""
    return file.replace("\\", "/")


def unsafe_file_name(file: str) -> bool:
    """Whether ``file`` could leave the folder it is joined to."""
    path = PurePosixPath(file)
    absolute = path.is_absolute() or PureWindowsPath(file).is_absolute()
    return not file.strip() or absolute or ".." in path.parts or "\0" in file


def declared_size(width: Any, height: Any) -> tuple[int, int] | None:
    """``(width, height)`` in pixels; None unless both are positive whole numbers (640.0 is one)."""
    numbers = finite_numbers([width, height])
    if numbers is None or min(numbers) < 1 or any(not value.is_integer() for value in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def finite_numbers(values: Any) -> tuple[float, ...] | None:
    """``values`` as floats; None unless they are a list of finite numbers."""
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        return None
    try:
        numbers = tuple(float(value) for value in values)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(math.isfinite(value) for value in numbers) else None


def box_object(index: int, desc: str, box: Sequence[float], geometry: ShapeGeometry) -> SourceObject:
    x1, y1, x2, y2 = box
    if geometry == "poly" and x1 < x2 and y1 < y2:  # corners would hide that a box is inverted
        return SourceObject(index, desc, "poly", (x1, y1, x2, y1, x2, y2, x1, y2))
    return SourceObject(index, desc, "bbox_2d", (x1, y1, x2, y2))


def polygon_object(index: int, desc: str, points: tuple[float, ...], geometry: ShapeGeometry) -> SourceObject:
    if geometry == "bbox":
        return SourceObject(index, desc, "bbox_2d", bounds(points))
    return SourceObject(index, desc, "poly", points)


def bounds(points: Sequence[float]) -> tuple[float, float, float, float]:
    return min(points[0::2]), min(points[1::2]), max(points[0::2]), max(points[1::2])


def quantise(
    obj: SourceObject, frame: tuple[int, int], file: str, report: ConversionReport, max_vertices: int | None
) -> GTObject:
    """A shape in pixels of ``frame`` (width, height) → an object. Odd but kept shapes are noted in ``report`` under
    ``file``. Raises LeftOut if nothing of it can be trained on."""
    if not obj.desc.strip():
        raise LeftOut(SkipReason.EMPTY_DESC, "the class name is empty")
    try:
        desc = clean_desc(obj.desc)
    except ValueError as error:
        raise LeftOut(SkipReason.REFUSED_DESC, str(error)) from error
    shown = f"{desc} {obj.kind} {[round(value, 2) for value in obj.points]} on {frame[0]}x{frame[1]}"
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = obj.points
        if x2 < x1 or y2 < y1:
            raise LeftOut(SkipReason.INVERTED, shown)
    if shape_area(obj.kind, obj.points) == 0:
        raise LeftOut(SkipReason.ZERO_AREA, shown)
    # The image spans 0..W in pixel-edge coordinates; W itself is on the edge, not over it.
    clipped = tuple(min(max(value, 0.0), float(frame[at % 2])) for at, value in enumerate(obj.points))
    if shape_area(obj.kind, clipped) == 0:
        raise LeftOut(SkipReason.OUTSIDE_IMAGE, shown)
    bins = tuple(to_bin(value, frame[at % 2]) for at, value in enumerate(clipped))
    if obj.kind == "poly":
        bins = canonical_ring(bins)
        if len(bins) < 6:
            raise LeftOut(SkipReason.COLLAPSED_POLYGON, shown)
    if clipped != obj.points:
        report.note(Note.CLIPPED, file, obj.index, shown)
    if shape_area(obj.kind, bins) == 0:
        report.note(Note.COLLAPSED_BINS, file, obj.index, shown)
    quantised = GTObject(desc, obj.kind, bins)
    if max_vertices is None or obj.kind != "poly" or len(bins) <= 2 * max_vertices:
        return quantised
    simpler = replace(quantised, bins=simplify_ring(bins, max_vertices))
    iou = mask_iou(quantised, simpler, _CANVAS)
    report.simplified_ious.append(iou)
    detail = f"{desc}: {len(bins) // 2} vertices to {max_vertices}, IoU {iou:.4f}"
    report.note(Note.SIMPLIFIED, file, obj.index, detail)
    return simpler


def simplify_ring(bins: tuple[int, ...], max_vertices: int) -> tuple[int, ...]:
    """At most ``max_vertices`` (>= 3) of a flat ring's vertices, in their order.

    Visvalingam and Whyatt's algorithm: repeatedly remove the vertex that forms the smallest triangle with its two
    neighbours; ties go to the first.
    """
    assert max_vertices >= 3, "a polygon needs three vertices"
    points = list(zip(bins[0::2], bins[1::2], strict=True))
    count = len(points)
    if count <= max_vertices:
        return bins
    before = [(i - 1) % count for i in range(count)]
    after = [(i + 1) % count for i in range(count)]

    def area(i: int) -> int:
        (x1, y1), (x2, y2), (x3, y3) = points[before[i]], points[i], points[after[i]]
        return abs((x2 - x1) * (y3 - y1) - (x3 - x1) * (y2 - y1))

    areas: list[int | None] = [area(i) for i in range(count)]
    queue = [(area_i, i) for i, area_i in enumerate(areas) if area_i is not None]
    heapq.heapify(queue)
    left = count
    while left > max_vertices:
        smallest, i = heapq.heappop(queue)
        if areas[i] != smallest:
            continue  # outdated: a neighbour was removed, or the vertex itself
        areas[i] = None
        after[before[i]], before[after[i]] = after[i], before[i]
        left -= 1
        for neighbour in (before[i], after[i]):
            # Never smaller than the last one removed, or a long flat run would vanish in invisible steps.
            areas[neighbour] = larger = max(smallest, area(neighbour))
            heapq.heappush(queue, (larger, neighbour))
    return tuple(value for i, point in enumerate(points) if areas[i] is not None for value in point)
