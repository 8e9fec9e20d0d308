"""The meaning of a data set's numbers, in one pass for every format: units, corners in place of sizes,
parts of objects; then shapes in pixels.

A set whose numbers say that they are something else is refused as a whole; a part of it is left out, and counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from coordexp.data.convert.report import ConversionReport, Form, LeftOut, Note, SkipReason, SourceImage, SourceShape
from coordexp.data.convert.shapes import BoxFields, PixelShape, ShapeGeometry, check_choice
from coordexp.data.images import size_of_image
from coordexp.data.polygons import Point, shape_area
from coordexp.errors import DataError

Unit = Literal["pixels", "shares", "percent"]
_SHARES = 1.01  # numbers up to this are shares, with a little rounding
_LARGEST: dict[Unit, float] = {"pixels": math.inf, "shares": 2, "percent": 200}  # objects may leave the image a little
_LEAVING = 0.05  # share of a side by which a box reaches over the edge, as no annotator draws it
_SUSPICIOUS, _FITTING = 0.1, 0.95  # shares of boxes that leave the image, and that fit as what they look like
_ENOUGH = 5  # equal boxes that are evidence
_LOOKED_AT = 1000  # lines of a set
_SMALL = 0.25  # share of the image's area


@dataclass(frozen=True, slots=True)
class Meaning:
    """How a file's numbers are read. ``boxes``: as the format says ("xywh"), checked ("auto"), or all as corners.
    Raises DataError for an unknown choice."""

    file: Path
    unit: Unit = "pixels"
    geometry: ShapeGeometry = "as_annotated"
    boxes: BoxFields = "xywh"

    def __post_init__(self) -> None:
        check_choice("geometry", self.geometry, ShapeGeometry)
        check_choice("boxes", self.boxes, BoxFields)


def check_numbers(sources: Sequence[SourceImage], meaning: Meaning) -> None:
    """Raise DataError if the numbers of all shapes together say that they are not what they would be read as."""
    shapes = [shape for source in sources for shape in source.shapes]
    largest = max((max(map(abs, shape.numbers)) for shape in shapes), default=0.0)
    if meaning.unit != "shares" and 0 < largest <= _SHARES:
        raise DataError(
            f"all {len(shapes)} shapes have numbers of at most {largest:g}: shares of the image, not {meaning.unit}; "
            "multiply them by the image's width and height (csv: add --normalised)",
            path=meaning.file,
        )
    if shapes and all(max(map(abs, shape.numbers)) > _LARGEST[meaning.unit] for shape in shapes):
        raise DataError(
            f"all {len(shapes)} shapes have numbers above {_LARGEST[meaning.unit]:g}: pixels, not {meaning.unit} of "
            "the image; divide them by its width and height",
            path=meaning.file,
        )
    if meaning.boxes == "auto":
        _check_sizes(sources, meaning)
    _check_corners(sources, meaning)


def _check_sizes(sources: Sequence[SourceImage], meaning: Meaning) -> None:
    # Boxes of a corner or centre and a size, which are corners: many leave the image, or all of them are small and in
    # the upper left corner, as every width is above its x.
    boxes = leaving = fitting = alike = 0
    for shape, (x, y, width, height) in _boxes(sources, meaning, "size", "centre"):
        if _other_unit(shape, meaning) is None:
            boxes += 1
            sides = _corners(shape, (x, y, width, height), meaning)
            leaving += not (min(sides) >= -_LEAVING and max(sides) <= 1 + _LEAVING)
            fitting += _fits(x, y, width, height)
            alike += width > x and height > y and (x > 0 or y > 0) and width * height <= _SMALL
    fields = "centre, width and height" if any(shape.form == "centre" for s in sources for shape in s.shapes) else (
        "[x, y, width, height]")  # fmt: skip
    if leaving and leaving >= _SUSPICIOUS * boxes and fitting >= _FITTING * boxes:
        seen = f"{leaving} of {boxes} boxes leave the image"
    elif fitting == boxes and alike >= _ENOUGH and alike == boxes:
        seen = f"all {boxes} boxes are small and in the upper left corner"
    else:
        return
    raise DataError(
        f"{seen} if they are {fields}, and {fitting} fit as [x1, y1, x2, y2]; add --boxes xyxy to read them so, or "
        "--boxes xywh if they are right as they are",
        path=meaning.file,
    )


def _check_corners(sources: Sequence[SourceImage], meaning: Meaning) -> None:
    # Corners which are a corner and a size: many are inverted, and nearly all fit as the latter.
    boxes = inverted = fitting = 0
    for _, (x, y, width, height) in _boxes(sources, meaning, "corners"):
        boxes += 1
        inverted += width < x or height < y
        fitting += width > 0 and height > 0 and _fits(x, y, x + width, y + height)
    if boxes >= _ENOUGH and inverted >= _SUSPICIOUS * boxes and fitting >= _FITTING * boxes:
        raise DataError(
            f"{inverted} of {boxes} boxes are inverted if they are [x1, y1, x2, y2], and {fitting} fit as "
            "[x, y, width, height]; correct the file, or name the columns of a table: --columns x=…,y=…,w=…,h=…",
            path=meaning.file,
        )


def _fits(x1: float, y1: float, x2: float, y2: float) -> bool:
    return -0.01 <= x1 < x2 <= 1.01 and -0.01 <= y1 < y2 <= 1.01


def _boxes(
    sources: Sequence[SourceImage], meaning: Meaning, *forms: Form
) -> Iterator[tuple[SourceShape, tuple[float, ...]]]:
    # The shapes of these forms, with their numbers in shares of the image's sides; none of an image of unknown size.
    whole = {"shares": (1.0, 1.0), "percent": (100.0, 100.0)}.get(meaning.unit)
    for source in sources:
        shapes = [shape for shape in source.shapes if shape.form in forms]
        if shapes and (size := whole or source.declared_size or size_of_image(source.path)) is not None:
            for shape in shapes:
                yield shape, tuple(value / size[at % 2] for at, value in enumerate(shape.numbers))


def _other_unit(shape: SourceShape, meaning: Meaning) -> str | None:
    largest = max(map(abs, shape.numbers))
    if largest > _LARGEST[meaning.unit]:
        return f"looks like pixels, not {meaning.unit} of the image"
    # Whole numbers may be a box of one pixel.
    sides = shape.numbers if shape.form in ("ring", "ellipse") else _corners(shape, shape.numbers, meaning)
    if meaning.unit != "shares" and 0 < largest <= _SHARES and any(value % 1 for value in sides):
        return f"looks like shares of the image, not {meaning.unit}"
    return None


def read_object(
    parts: Sequence[SourceShape], frame: tuple[int, int], meaning: Meaning, file: str, report: ConversionReport
) -> PixelShape:
    """The shapes of an object in pixels of ``frame`` (width, height), as one: a box around all parts, or the largest
    polygon, with a note. Raises LeftOut for numbers of another unit."""
    for shape in parts:
        if (problem := _other_unit(shape, meaning)) is not None:
            shown = ", ".join(f"{value:g}" for value in shape.numbers[:8])
            raise LeftOut(SkipReason.OTHER_UNIT, f"{shape.desc}: {shown}: {problem}")
    first, read = parts[0], [_in_pixels(shape, frame, meaning) for shape in parts]
    if len(read) == 1:
        return read[0]
    if all(kind == "bbox_2d" for kind, _ in read):
        around = bounds([value for _, numbers in read for value in numbers])
        report.note(Note.JOINED_PARTS, file, first.index, f"{first.desc}: one box around {len(read)} parts")
        return "bbox_2d", around
    report.note(Note.MULTIPART_POLYGON, file, first.index, f"{first.desc}: kept the largest of {len(read)} parts")
    return max(read, key=lambda part: shape_area(*part))


def _in_pixels(shape: SourceShape, frame: tuple[int, int], meaning: Meaning) -> PixelShape:
    scale: tuple[float, float] = (1.0, 1.0)
    if meaning.unit != "pixels":
        share = 1 if meaning.unit == "shares" else 100
        scale = frame[0] / share, frame[1] / share
    numbers = tuple(value * scale[at % 2] for at, value in enumerate(shape.numbers))
    poly = meaning.geometry == "poly"
    if shape.form == "ring":
        return _polygon(numbers, meaning)
    if shape.form == "ellipse":
        return _ellipse(shape, numbers, poly)
    x1, y1, x2, y2 = _corners(shape, numbers, meaning)
    ring = (x1, y1, x2, y1, x2, y2, x1, y2)
    if shape.turn % 360:
        middle = (x1, y1) if shape.about_corner else ((x1 + x2) / 2, (y1 + y2) / 2)
        return _polygon(_turned(ring, middle, shape.turn), meaning)
    if poly and x1 < x2 and y1 < y2:  # corners would hide that a box is inverted
        return "poly", ring
    return "bbox_2d", (x1, y1, x2, y2)


def _corners(shape: SourceShape, numbers: Sequence[float], meaning: Meaning) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = numbers
    if shape.form == "corners" or meaning.boxes == "xyxy":
        return x1, y1, x2, y2
    if shape.form == "centre":
        x1, y1 = x1 - x2 / 2, y1 - y2 / 2
    return x1, y1, x1 + x2, y1 + y2


def _polygon(points: tuple[float, ...], meaning: Meaning) -> PixelShape:
    return ("bbox_2d", bounds(points)) if meaning.geometry == "bbox" else ("poly", points)


_ROUND = 24  # vertices of an ellipse: 99% of its area


def _ellipse(shape: SourceShape, numbers: tuple[float, ...], poly: bool) -> PixelShape:
    x, y, width, height = numbers
    if poly:
        angles = [2 * math.pi * k / _ROUND for k in range(_ROUND)]
        ring = tuple(v for a in angles for v in (x + width * math.cos(a), y + height * math.sin(a)))
        return "poly", _turned(ring, (x, y), shape.turn)
    cos, sin = math.cos(math.radians(shape.turn)), math.sin(math.radians(shape.turn))
    across, down = math.hypot(width * cos, height * sin), math.hypot(width * sin, height * cos)
    return "bbox_2d", (x - across, y - down, x + across, y + down)


def _turned(ring: Sequence[float], about: tuple[float, float], degrees: float) -> tuple[float, ...]:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    points = ((x - about[0], y - about[1]) for x, y in zip(ring[0::2], ring[1::2], strict=True))
    return tuple(v for x, y in points for v in (about[0] + x * cos - y * sin, about[1] + x * sin + y * cos))


def bounds(points: Sequence[float]) -> tuple[float, float, float, float]:
    return min(points[0::2]), min(points[1::2]), max(points[0::2]), max(points[1::2])


# --- images without objects ---


def refuse_unlabelled(images: int, where: str, path: Path, cure: str) -> None:
    """Raise DataError: no image of a set has a label, so that all of them would become images without objects."""
    raise DataError(
        f"none of {images} images {where}, so all would become images without objects; {cure}",
        path=path,
    )


def check_keypoints(lines: Sequence[Sequence[float]], file: Path) -> None:
    """Raise DataError if lines of shares hold a box and keypoints, which would be read as polygons."""
    longer = [line for line in lines if len(line) > 4]
    if len(longer) < len(lines) or not longer or len({len(line) for line in longer}) > 1:
        return
    count = len(longer[0]) - 4
    marked = count % 3 == 0 and all(set(line[6::3]) <= {0.0, 1.0, 2.0} for line in longer)
    seen = marked and (any(2.0 in line[6::3] for line in longer) or len(longer) >= _ENOUGH)
    inside = count % 2 == 0 and len(longer) >= _ENOUGH and all(map(_around_points, longer))
    some = longer[:_LOOKED_AT]
    if seen or (inside and sum(map(_is_ring, some)) < _FITTING * len(some)):
        raise DataError(
            f"all {len(longer)} lines hold a box and {count // (3 if seen else 2)} keypoints, not a polygon; only "
            "boxes and polygons are read: keep the first five numbers of each line",
            path=file,
        )


def _around_points(line: Sequence[float]) -> bool:
    x, y, width, height = line[:4]
    points = zip(line[4::2], line[5::2], strict=True)
    return all(abs(px - x) <= width / 2 + 0.001 and abs(py - y) <= height / 2 + 0.001 for px, py in points)


def _is_ring(line: Sequence[float]) -> bool:
    # Whether the numbers go around one shape, as those of a small polygon do. A box's width and height among points
    # are a point far from the others, or one to which sides cross.
    for values in (line[0::2], line[1::2]):
        others = (values[0], *values[2:])
        low, high = min(others), max(others)
        reach = 1.5 * (high - low)  # that of a square on its corner is 1
        if not low - reach <= values[1] <= high + reach:
            return False
    ring = list(zip(line[0::2], line[1::2], strict=True))
    if len(ring) == 4:  # as corners of a box are: the diagonals cross
        return _cross(ring[0], ring[2], ring[1], ring[3])
    sides = [(ring[at - 1], point) for at, point in enumerate(ring)]
    return shape_area("poly", line) > 0 and not any(_cross(*a, *b) for a, b in combinations(sides, 2))


def _cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    # Whether the line from a to b and that from c to d cross, not merely touch.
    def turn(p: Point, q: Point, r: Point) -> float:
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0
