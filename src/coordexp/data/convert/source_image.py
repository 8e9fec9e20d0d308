"""The records that each format's reader returns, and helpers that all readers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, get_args

from coordexp.errors import DataError
from coordexp.records import GeometryKind

InstanceGeometry = Literal["bbox", "poly"]
"""Which shape of an annotation with a box and a segmentation to use."""
ShapeGeometry = Literal["as_annotated", "bbox", "poly"]
"""Keep boxes and polygons; turn polygons into their bounds; or boxes into polygons of four corners."""
Crowds = Literal["leave_out", "keep"]
"""Leave annotations of groups out, or keep each as one object."""


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
    ``declared_size`` is the ``(width, height)`` its annotation states, None where it states none. ``embedded`` gives
    the bytes of an image that no file holds."""

    file: str
    annotation: str
    path: Path
    declared_size: tuple[int, int] | None
    objects: tuple[SourceObject, ...]
    embedded: Callable[[], bytes] | None = None


def check_choice(what: str, given: str, known: Any) -> None:
    """Raises DataError unless ``given`` is one of the literals of ``known``; ``what`` names the argument."""
    if given not in get_args(known):
        raise DataError(f"{what} {given!r} is unknown; use {' or '.join(get_args(known))}")


def check_folder(folder: Path, what: str) -> None:
    """Raises DataError unless ``folder`` is one; ``what`` names it."""
    if not folder.is_dir():
        raise DataError(f"{what} not found; check the path", path=folder)


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files at any depth with one of the (lower-case) ``suffixes``, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)


def with_slashes(file: str) -> str:
    """A relative file name as annotated on any system: Windows tools write backslashes."""
    return file.replace("\\", "/")


def unsafe_file_name(file: str) -> bool:
    """True when ``file`` could leave the folder it is joined to."""
    path = PurePosixPath(file)
    absolute = path.is_absolute() or PureWindowsPath(file).is_absolute()
    return not file.strip() or absolute or ".." in path.parts or "\0" in file


def declared_size(width: Any, height: Any) -> tuple[int, int] | None:
    """``(width, height)`` in pixels, or None when an annotation gives no positive whole numbers (640.0 is one)."""
    numbers = finite_numbers([width, height])
    if numbers is None or min(numbers) < 1 or any(not value.is_integer() for value in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def finite_numbers(values: Any) -> tuple[float, ...] | None:
    """``values`` as floats, or None when they are not a list of finite numbers."""
    if not isinstance(values, list) or any(type(value) not in (int, float) for value in values):
        return None
    try:
        numbers = tuple(float(value) for value in values)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(math.isfinite(value) for value in numbers) else None


def box_object(index: int, desc: str, box: Sequence[float], geometry: ShapeGeometry) -> SourceObject:
    """An annotated box ``(x1, y1, x2, y2)`` in the shape of ``geometry``."""
    x1, y1, x2, y2 = box
    if geometry == "poly" and x1 < x2 and y1 < y2:  # corners would hide that a box is inverted
        return SourceObject(index, desc, "poly", (x1, y1, x2, y1, x2, y2, x1, y2))
    return SourceObject(index, desc, "bbox_2d", (x1, y1, x2, y2))


def polygon_object(index: int, desc: str, points: tuple[float, ...], geometry: ShapeGeometry) -> SourceObject:
    """An annotated polygon (flat) in the shape of ``geometry``."""
    if geometry == "bbox":
        return SourceObject(index, desc, "bbox_2d", bounds(points))
    return SourceObject(index, desc, "poly", points)


def bounds(points: Sequence[float]) -> tuple[float, float, float, float]:
    """The box ``(x1, y1, x2, y2)`` around a flat list of points."""
    return min(points[0::2]), min(points[1::2]), max(points[0::2]), max(points[1::2])
