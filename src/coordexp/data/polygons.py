"""Area, clipping, fewer vertices and canonical form of polygons, flat rings ``x, y, …``. Light commands import it
without NumPy."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

Point = tuple[float, float]


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


def clipped_shape(
    kind: str, points: Sequence[float], window: tuple[float, float, float, float]
) -> tuple[tuple[float, ...], float]:
    """The part of a shape inside the rectangle ``window`` (x1, y1, x2, y2), and its share of the shape's area. Without
    any, ``((), 0.0)``. A side or a polygon without extent counts by its length.

    A polygon that falls into several parts stays one ring, whose parts are connected along the rectangle's sides.
    """
    if kind == "bbox_2d":
        x1, y1, x2, y2 = points
        low, high = (max(x1, window[0]), max(y1, window[1])), (min(x2, window[2]), min(y2, window[3]))
        share = 1.0
        for from_, to, side in ((low[0], high[0], x2 - x1), (low[1], high[1], y2 - y1)):
            share *= (max(0.0, to - from_) / side) if side else float(from_ <= to)
        return ((*low, *high), share) if share > 0 else ((), 0.0)
    xs, ys = points[0::2], points[1::2]
    area = shape_area(kind, points)
    if area == 0:
        _, share = clipped_shape("bbox_2d", (min(xs), min(ys), max(xs), max(ys)), window)
        return (tuple(points), 1.0) if share == 1 else ((), 0.0)
    clipped = tuple(value for point in clip_ring(list(zip(xs, ys, strict=True)), window) for value in point)
    share = shape_area(kind, clipped) / area if len(clipped) >= 6 else 0.0
    return (clipped, share) if share > 0 else ((), 0.0)


def clip_ring(ring: Sequence[Point], window: tuple[float, float, float, float]) -> list[Point]:
    """The part of a ring inside the rectangle ``window`` (Sutherland and Hodgman's algorithm); empty without one. Parts
    of a ring that crosses a side several times are joined along it."""
    kept = list(ring)
    for axis, limit, sign in ((0, window[0], 1), (0, window[2], -1), (1, window[1], 1), (1, window[3], -1)):
        points, kept = kept, []
        for at, point in enumerate(points):
            before = points[at - 1]
            is_in, was_in = sign * (point[axis] - limit) >= 0, sign * (before[axis] - limit) >= 0
            if is_in != was_in:
                share = (limit - before[axis]) / (point[axis] - before[axis])
                other = before[1 - axis] + share * (point[1 - axis] - before[1 - axis])
                kept.append((limit, other) if axis == 0 else (other, limit))
            if is_in:
                kept.append(point)
    return kept


def canonical_ring(bins: Sequence[int]) -> tuple[int, ...]:
    """The ring without repeated neighbours, clockwise, from its top-most (then left-most) point, so that a model learns
    one order of vertices instead of each annotator's own. The shape is unchanged. Empty if all points are equal."""
    points = list(zip(bins[0::2], bins[1::2], strict=True))
    ring = [point for at, point in enumerate(points) if point != points[at - 1]]
    if signed_ring_area([value for point in ring for value in point]) < 0:
        ring.reverse()
    start = min(range(len(ring)), key=lambda at: (ring[at][1], ring[at][0]), default=0)
    return tuple(value for point in ring[start:] + ring[:start] for value in point)


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


def smallest_rectangle(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The four corners of the rotated rectangle of least area around ``points``, clockwise on the screen. One of its
    sides is on a side of their convex hull. Without area, the corners coincide in pairs."""
    hull = _convex_hull(points)
    best: tuple[float, list[tuple[float, float]]] | None = None
    for at, (x, y) in enumerate(hull):
        dx, dy = x - hull[at - 1][0], y - hull[at - 1][1]
        length = math.hypot(dx, dy) or 1.0
        ux, uy = (dx / length, dy / length) if dx or dy else (1.0, 0.0)
        along = [px * ux + py * uy for px, py in hull]
        across = [py * ux - px * uy for px, py in hull]
        (a1, a2), (b1, b2) = (min(along), max(along)), (min(across), max(across))
        area = (a2 - a1) * (b2 - b1)
        if best is None or area < best[0]:
            corners = ((a1, b1), (a2, b1), (a2, b2), (a1, b2))
            best = area, [(a * ux - b * uy, a * uy + b * ux) for a, b in corners]
    assert best is not None, "a shape has points"
    return best[1]


def _convex_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    # Andrew's monotone chain.
    ordered = sorted(set(points))
    if len(ordered) < 3:
        return ordered
    hull: list[tuple[float, float]] = []
    for chain in (ordered, ordered[::-1]):
        side: list[tuple[float, float]] = []
        for x, y in chain:
            while len(side) > 1 and (
                (side[-1][0] - side[-2][0]) * (y - side[-2][1]) <= (side[-1][1] - side[-2][1]) * (x - side[-2][0])
            ):
                side.pop()
            side.append((x, y))
        hull += side[:-1]
    return hull
