"""Fewer vertices for a polygon, the least telling ones first, and what that cost."""

from __future__ import annotations

import heapq
from dataclasses import replace

from coordexp.geometry import mask_iou
from coordexp.records import GTObject

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
