"""Shapes in pixels → objects on the norm1000 grid, or the reason why not; polygons lose their least telling vertices
first. And masks → outlines: COCO's run-length encodings, and any boolean array."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason
from coordexp.data.convert.sources import SourceObject
from coordexp.data.record_line import clean_desc
from coordexp.geometry import mask_iou
from coordexp.records import NUM_BINS, GeometryKind, GTObject


def to_bin(x: float, extent: int) -> int:
    """Pixel coordinate → norm1000 bin on a side of ``extent`` pixels: 0 → 0, ``extent - 1`` → 999."""
    return min(NUM_BINS - 1, max(0, round((NUM_BINS - 1) * x / max(1, extent - 1))))


def quantise(
    obj: SourceObject, frame: tuple[int, int], file: str, report: ConversionReport, max_vertices: int | None
) -> GTObject:
    """A shape in pixels → an object. ``frame`` is the ``(width, height)`` that its coordinates are measured in;
    polygons of more than ``max_vertices`` are simplified. What is odd but kept is noted in ``report`` under ``file``.

    Raises:
        LeftOut: nothing of it can be trained on.
    """
    desc = _desc(obj.desc)
    shown = f"{desc} {obj.kind} {[round(value, 2) for value in obj.points]} on {frame[0]}x{frame[1]}"
    if obj.kind == "bbox_2d":
        x1, y1, x2, y2 = obj.points
        if x2 < x1 or y2 < y1:
            raise LeftOut(SkipReason.INVERTED, shown)
    if _area(obj.kind, obj.points) == 0:
        raise LeftOut(SkipReason.ZERO_AREA, shown)
    # The image spans 0..W in pixel-edge coordinates; W itself is on the edge, not over it.
    clipped = tuple(min(max(value, 0.0), float(frame[at % 2])) for at, value in enumerate(obj.points))
    if _area(obj.kind, clipped) == 0:
        raise LeftOut(SkipReason.OUTSIDE_IMAGE, shown)
    bins = tuple(to_bin(value, frame[at % 2]) for at, value in enumerate(clipped))
    if obj.kind == "poly":
        bins = _canonical_ring(bins)
        if len(bins) < 6:
            raise LeftOut(SkipReason.COLLAPSED_POLYGON, shown)
    if clipped != obj.points:
        report.note(Note.CLIPPED, file, obj.index, shown)
    if _area(obj.kind, bins) == 0:
        report.note(Note.COLLAPSED_BINS, file, obj.index, shown)
    quantised = GTObject(desc, obj.kind, bins)
    if max_vertices is None or obj.kind != "poly" or len(bins) <= 2 * max_vertices:
        return quantised
    simpler, iou = simplified(quantised, max_vertices)
    report.simplified(iou, file, obj.index, f"{desc}: {len(bins) // 2} vertices to {max_vertices}, IoU {iou:.4f}")
    return simpler


def signed_ring_area(points: Sequence[float]) -> float:
    """Shoelace area of a flat ring; positive when it runs clockwise on the screen (y points down)."""
    xs, ys = points[0::2], points[1::2]
    following = [*range(1, len(xs)), 0]
    return math.fsum(xs[i] * ys[j] - xs[j] * ys[i] for i, j in enumerate(following)) / 2


def _desc(text: str) -> str:
    if not text.strip():
        raise LeftOut(SkipReason.EMPTY_DESC, "the class name is empty")
    try:
        return clean_desc(text)
    except ValueError as error:
        raise LeftOut(SkipReason.REFUSED_DESC, str(error)) from error


def _area(kind: GeometryKind, points: Sequence[float]) -> float:
    """Area in square units: of the box, or enclosed by the ring."""
    if kind == "bbox_2d":
        return (points[2] - points[0]) * (points[3] - points[1])
    return abs(signed_ring_area(points))


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


_CANVAS = 1000  # fine enough that a lost pixel shows


def simplify_ring(bins: tuple[int, ...], max_vertices: int) -> tuple[int, ...]:
    """At most ``max_vertices`` (>= 3) of a flat ring's vertices, in their order.

    Visvalingam and Whyatt's rule: again and again the vertex goes whose triangle with its two neighbours is smallest;
    of equals the one that comes first.
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
            continue  # outdated: a neighbour went, or the vertex itself
        areas[i] = None
        after[before[i]], before[after[i]] = after[i], before[i]
        left -= 1
        for neighbour in (before[i], after[i]):
            # Never smaller than what went before, or a long flat run would vanish one invisible step after another.
            areas[neighbour] = larger = max(smallest, area(neighbour))
            heapq.heappush(queue, (larger, neighbour))
    return tuple(value for i, point in enumerate(points) if areas[i] is not None for value in point)


def simplified(obj: GTObject, max_vertices: int) -> tuple[GTObject, float]:
    """The polygon with at most ``max_vertices``, and its mask IoU with what it was."""
    simpler = replace(obj, bins=simplify_ring(obj.bins, max_vertices))
    return simpler, mask_iou(obj, simpler, _CANVAS)


_SIGNED, _MORE, _LOW = 0x10, 0x20, 0x1F  # of a character of a compressed count, from which 48 is taken first
_LARGEST = 1 << 28  # pixels


def decode_runs(segmentation: Any, size: tuple[int, int] | None) -> np.ndarray:
    """A COCO run-length mask, compressed or as a list of counts → (height, width) of bool.

    Every pixel must be accounted for: what lacks runs, or has too many, would be read from foreign memory by decoders
    that trust it.

    Args:
        size: the (width, height) that the annotation gives its image; None where it gives none.

    Raises:
        ValueError: no run-length mask, or one of another size.
    """
    if not isinstance(segmentation, dict):
        raise ValueError("expected a mapping with counts and size")
    shape, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(side) is not int or side < 1 for side in shape):
        raise ValueError(f"size is {shape!r}, not [height, width]")
    height, width = shape
    if height * width > _LARGEST or (size is not None and (width, height) != size):
        raise ValueError(f"the mask is {width}x{height}, the image {'of another size' if size is None else size}")
    runs = _inflated(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or any(type(run) is not int or run < 0 for run in runs):
        raise ValueError("counts are neither a list of numbers nor COCO's text")
    if sum(runs) != height * width:
        raise ValueError(f"the runs add up to {sum(runs)} pixels, and the mask has {height * width}")
    values = np.arange(len(runs)) % 2 == 1  # the first run is outside
    return np.repeat(values, runs).reshape(width, height).T  # column by column


def encode_runs(mask: np.ndarray) -> dict[str, Any]:
    """The inverse of :func:`decode_runs`, counts as a list."""
    flat = mask.T.ravel()
    ends = [*(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    runs = np.diff([0, *ends]).tolist()
    return {"size": list(mask.shape), "counts": [0, *runs] if flat[0] else runs}


def outline(mask: np.ndarray) -> tuple[tuple[float, ...], int]:
    """The outer ring of a mask's largest part, in pixels from the image's corner, and how many parts it has.

    Holes are filled: a ring cannot have any.

    Args:
        mask: (height, width) of bool.

    Raises:
        ValueError: nothing is in it.
    """
    from contourpy import contour_generator

    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        raise ValueError("the mask is empty")
    top, left = int(rows[0]), int(columns[0])
    part = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    # Through the corners of pixels would be a stair; through the middle between in and out it cuts their corners.
    lines = contour_generator(z=np.pad(part, 1).astype(np.float64), name="serial").lines(0.5)
    corner_2 = np.array([left - 0.5, top - 0.5])
    rings = [_corners(np.asarray(line)[:-1] + corner_2) for line in lines]
    areas = [signed_ring_area(ring) for ring in rings]
    largest = max(range(len(rings)), key=lambda k: abs(areas[k]))  # the outermost ring is larger than any hole
    parts = sum((area > 0) == (areas[largest] > 0) for area in areas)  # holes turn the other way
    return rings[largest], parts


def _corners(points_N2: np.ndarray) -> tuple[float, ...]:
    """A closed line without the points at which it goes straight on, flat."""
    before_N2, after_N2 = points_N2 - np.roll(points_N2, 1, axis=0), np.roll(points_N2, -1, axis=0) - points_N2
    turns_N = before_N2[:, 0] * after_N2[:, 1] != before_N2[:, 1] * after_N2[:, 0]
    return tuple(points_N2[turns_N].ravel().tolist())


def _inflated(text: str) -> list[int]:
    """COCO's compressed counts: groups of five bits, the least first; from the third on, differences to the count two
    before."""
    runs: list[int] = []
    at = 0
    while at < len(text):
        value, shift, group = 0, 0, _MORE
        while group & _MORE:
            if at == len(text) or not 0 <= (group := ord(text[at]) - 48) < 64 or shift > 40:
                raise ValueError("counts are cut off, or no COCO text")
            value |= (group & _LOW) << shift
            at, shift = at + 1, shift + 5
        if group & _SIGNED:
            value -= 1 << shift
        runs.append(value + runs[-2] if len(runs) > 2 else value)
    return runs
