"""Area and canonical form of polygons, flat rings ``x, y, x, y, …``. Light commands import it without NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def signed_ring_area(points: Sequence[float]) -> float:
    """Shoelace area of a flat ring, in squares of its unit; positive if clockwise on the screen (y points down)."""
    xs, ys = points[0::2], points[1::2]
    nexts = zip([*xs[1:], *xs[:1]], [*ys[1:], *ys[:1]], strict=True)
    return math.fsum(x * next_y - next_x * y for x, y, (next_x, next_y) in zip(xs, ys, nexts, strict=True)) / 2


def shape_area(kind: str, points: Sequence[float]) -> float:
    """Area in squares of the unit of ``points``: of a ``"bbox_2d"`` (x1, y1, x2, y2), or enclosed by a ring."""
    if kind == "bbox_2d":
        return (points[2] - points[0]) * (points[3] - points[1])
    return abs(signed_ring_area(points))


def canonical_ring(bins: Sequence[int]) -> tuple[int, ...]:
    """The ring without repeated neighbours, clockwise, from its top-most (then left-most) point, so that a model learns
    one order of vertices instead of each annotator's own. The shape is unchanged. Empty if all points are equal."""
    points = list(zip(bins[0::2], bins[1::2], strict=True))
    ring = [point for at, point in enumerate(points) if point != points[at - 1]]
    if signed_ring_area([value for point in ring for value in point]) < 0:
        ring.reverse()
    start = min(range(len(ring)), key=lambda at: (ring[at][1], ring[at][0]), default=0)
    return tuple(value for point in ring[start:] + ring[:start] for value in point)
