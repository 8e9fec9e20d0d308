"""Shapes: what a format's reader makes of a file's values, and their way onto the norm1000 grid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, get_args

from coordexp.data.convert.report import ConversionReport, Form, LeftOut, Note, SkipReason, SourceShape
from coordexp.data.jsonl import clean_desc
from coordexp.data.polygons import canonical_ring, clipped_shape, shape_area, simplify_ring
from coordexp.errors import DataError
from coordexp.geometry import mask_iou, to_bin
from coordexp.records import GeometryKind, GTObject

_CANVAS = 1000  # on which a simplified polygon is compared: fine enough that a lost pixel shows
_LARGEST = 1e15  # of a coordinate: an area of larger ones may not be a number
InstanceGeometry = Literal["bbox", "poly"]  # which shape of an annotation with a box and a segmentation to use
# Keep boxes and polygons; turn polygons into their bounds; or boxes into polygons of four corners.
ShapeGeometry = Literal["as_annotated", "bbox", "poly"]
PixelShape = tuple[GeometryKind, tuple[float, ...]]  # (x1, y1, x2, y2) or a flat ring of points, in pixels
Crowds = Literal["leave_out", "keep"]  # leave annotations of groups out, or keep each as one object
# How four numbers of a box are read. "auto": as the format says, and refused if the numbers look like corners.
BoxFields = Literal["auto", "xywh", "xyxy"]
_EXPECTED: dict[Form, str] = {
    "corners": "four numbers", "size": "[x, y, width, height]", "centre": "centre, width and height",
    "ellipse": "centre and two radii", "ring": "a polygon of at least 3 points",
}  # fmt: skip


def shape_of(
    index: int, desc: Any, form: Form, values: Any, shown: Any = None, *, turn: Any = 0.0, about_corner: bool = False
) -> SourceShape:
    """A shape of these ``values``; ``shown``: the file's text for them. Raises LeftOut if they are none, or if
    ``turn`` is not a number of degrees."""
    desc = desc if isinstance(desc, str) else ""
    numbers = finite_numbers(list(values) if isinstance(values, tuple) else values)
    if numbers is None or (len(numbers) < 6 or len(numbers) % 2 if form == "ring" else len(numbers) != 4):
        detail = f"{desc}: {str(values if shown is None else shown)[:80]}; expected {_EXPECTED[form]}"
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
    if (turned := finite_numbers([turn])) is None:
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, f"{desc}: turned by {str(turn)[:80]}; expected a number")
    return SourceShape(index, desc, form, numbers, turned[0], about_corner)


def degrees(radians: Any) -> float | None:
    """None unless ``radians`` is a finite number."""
    numbers = finite_numbers([radians])
    return None if numbers is None else math.degrees(numbers[0])


def check_choice(what: str, given: str, known: Any) -> None:
    if given not in get_args(known):
        raise DataError(f"{what} {given!r} is unknown; use {' or '.join(get_args(known))}")


def declared_size(width: Any, height: Any) -> tuple[int, int] | None:
    """``(width, height)`` in pixels; None unless both are positive whole numbers (640.0 is one), or texts of them."""
    numbers = finite_numbers([number(side) if isinstance(side, str) else side for side in (width, height)])
    if numbers is None or min(numbers) < 1 or any(not value.is_integer() for value in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def flat(points: Any) -> list[Any] | None:
    """``[[x, y], …]`` as ``[x, y, …]``; None for anything else."""
    if not isinstance(points, list) or any(not isinstance(point, list) or len(point) != 2 for point in points):
        return None
    return [value for point in points for value in point]


def finite_numbers(values: Any) -> tuple[float, ...] | None:
    """``values`` as floats; None unless they are a list of numbers whose products are finite."""
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        return None
    try:
        numbers = tuple(float(value) for value in values)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(abs(value) < _LARGEST for value in numbers) else None


def quantise(
    source: SourceShape,
    shape: PixelShape,
    frame: tuple[int, int],
    file: str,
    report: ConversionReport,
    max_vertices: int | None,
) -> GTObject:
    """The ``shape`` of ``source`` in pixels of ``frame`` (width, height) → an object. Odd but kept shapes are noted in
    ``report`` under ``file``. Raises LeftOut if nothing of it can be trained on."""
    kind, points = shape
    if not source.desc.strip():
        raise LeftOut(SkipReason.EMPTY_DESC, "the class name is empty")
    try:
        desc = clean_desc(source.desc)
    except ValueError as error:
        raise LeftOut(SkipReason.REFUSED_DESC, str(error)) from error
    shown = f"{desc} {kind} {[round(value, 2) for value in points]} on {frame[0]}x{frame[1]}"
    if kind == "bbox_2d":
        x1, y1, x2, y2 = points
        if x2 < x1 or y2 < y1:
            raise LeftOut(SkipReason.INVERTED, shown)
    if shape_area(kind, points) == 0:
        raise LeftOut(SkipReason.ZERO_AREA, shown)
    # The image spans 0..W in pixel-edge coordinates; W itself is on the edge, not over it.
    inside = tuple(min(max(value, 0.0), float(frame[at % 2])) for at, value in enumerate(points))
    clipped = points
    if inside != points:  # points of a polygon that are moved to the edge enclose another shape than its part inside
        clipped, _ = clipped_shape(kind, points, (0.0, 0.0, *frame))
    if not clipped:
        raise LeftOut(SkipReason.OUTSIDE_IMAGE, shown)
    bins = tuple(to_bin(value, frame[at % 2]) for at, value in enumerate(clipped))
    if kind == "poly":
        bins = canonical_ring(bins)
        if len(bins) < 6:
            raise LeftOut(SkipReason.COLLAPSED_POLYGON, shown)
    # Closer than a pixel is rounding of floats, or a shape that touches the edge.
    if max(abs(a - b) for a, b in zip(inside, points, strict=True)) >= 1:
        report.note(Note.CLIPPED, file, source.index, shown)
    if shape_area(kind, bins) == 0:
        report.note(Note.COLLAPSED_BINS, file, source.index, shown)
    quantised = GTObject(desc, kind, bins)
    if max_vertices is None or kind != "poly" or len(bins) <= 2 * max_vertices:
        return quantised
    fewer = simplify_ring(bins, max_vertices)
    canonical = canonical_ring(fewer)  # the top-most vertex may be gone
    simpler = replace(quantised, bins=canonical if len(canonical) >= 6 else fewer)
    iou = mask_iou(quantised, simpler, _CANVAS)
    report.simplified_ious.append(iou)
    detail = f"{desc}: {len(bins) // 2} vertices to {max_vertices}, IoU {iou:.4f}"
    report.note(Note.SIMPLIFIED, file, source.index, detail)
    return simpler
