"""Shapes in pixels → objects on the norm1000 grid, or the reason why not; polygons lose their least telling vertices
first."""

from __future__ import annotations

import heapq
from dataclasses import replace

from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason
from coordexp.data.convert.source_image import SourceObject
from coordexp.data.polygons import canonical_ring, shape_area
from coordexp.data.record_line import clean_desc
from coordexp.geometry import mask_iou, to_bin
from coordexp.records import GTObject

_CANVAS = 1000  # on which a simplified polygon is compared: fine enough that a lost pixel shows


def quantise(
    obj: SourceObject, frame: tuple[int, int], file: str, report: ConversionReport, max_vertices: int | None
) -> GTObject:
    """A shape in pixels → an object. ``frame`` is the ``(width, height)`` that its coordinates are measured in;
    polygons of more than ``max_vertices`` are simplified. Odd but kept shapes are noted in ``report`` under ``file``.

    Raises:
        LeftOut: nothing of it can be trained on.
    """
    desc = _desc(obj.desc)
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
    simpler, iou = simplified(quantised, max_vertices)
    report.simplified(iou, file, obj.index, f"{desc}: {len(bins) // 2} vertices to {max_vertices}, IoU {iou:.4f}")
    return simpler


def _desc(text: str) -> str:
    if not text.strip():
        raise LeftOut(SkipReason.EMPTY_DESC, "the class name is empty")
    try:
        return clean_desc(text)
    except ValueError as error:
        raise LeftOut(SkipReason.REFUSED_DESC, str(error)) from error


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
