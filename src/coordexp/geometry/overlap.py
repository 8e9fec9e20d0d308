"""Exact IoU of polygons, for shapes too small for a raster. Even-odd filling, as the rasteriser does it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

# Rings have integer vertices, so a real area is far larger; this is only rounding of crossing points.
_NO_AREA = 1e-9


def exact_iou(a_V2: np.ndarray, b_W2: np.ndarray) -> float:
    """Area IoU of two rings with integer vertices (self-intersections allowed), exact up to float rounding.

    Where neither ring encloses an area: 1 if their outlines are the same set of points, else 0.
    """
    shared, union = _overlay_areas(a_V2, b_W2)
    if union <= _NO_AREA:
        return float(_outline_covers(a_V2, b_W2) and _outline_covers(b_W2, a_V2))
    return shared / union


def _overlay_areas(a_V2: np.ndarray, b_W2: np.ndarray) -> tuple[float, float]:
    """Areas of intersection and union.

    The plane is cut into vertical slabs at every vertex and every crossing of two edges. Inside a slab no edges cross,
    so every piece is a trapezoid and its height at the slab's middle times the slab's width is its area.
    """
    rings = (np.asarray(a_V2, dtype=np.float64), np.asarray(b_W2, dtype=np.float64))
    start_E2 = np.concatenate(rings)
    end_E2 = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
    of_a_E = np.arange(len(start_E2)) < len(rings[0])
    upright_E = start_E2[:, 0] == end_E2[:, 0]  # bounds slabs, is never inside one
    start_E2, end_E2, of_a_E = start_E2[~upright_E], end_E2[~upright_E], of_a_E[~upright_E]

    slope_E = (end_E2[:, 1] - start_E2[:, 1]) / (end_E2[:, 0] - start_E2[:, 0])
    offset_E = start_E2[:, 1] - slope_E * start_E2[:, 0]
    low_E, high_E = np.minimum(start_E2[:, 0], end_E2[:, 0]), np.maximum(start_E2[:, 0], end_E2[:, 0])
    slope_gap_EE = slope_E[:, None] - slope_E[None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing_EE = (offset_E[None, :] - offset_E[:, None]) / slope_gap_EE
    real_EE = (slope_gap_EE != 0) & (crossing_EE >= np.maximum.outer(low_E, low_E))
    real_EE &= crossing_EE <= np.minimum.outer(high_E, high_E)
    cuts = np.unique(np.concatenate([low_E, high_E, crossing_EE[real_EE]]))

    shared = union = 0.0
    for left, right in pairwise(cuts.tolist()):
        middle = (left + right) / 2
        through = (low_E < middle) & (middle < high_E)
        y_C = start_E2[through, 1] + slope_E[through] * (middle - start_E2[through, 0])
        order = np.argsort(y_C, kind="stable")
        height_C = np.diff(y_C[order])
        in_a = np.cumsum(of_a_E[through][order])[:-1] % 2 == 1
        in_b = np.cumsum(~of_a_E[through][order])[:-1] % 2 == 1
        shared += float((right - left) * height_C[in_a & in_b].sum())
        union += float((right - left) * height_C[in_a | in_b].sum())
    return shared, union


def _outline_covers(outline_V2: np.ndarray, other_W2: np.ndarray) -> bool:
    """Whether every point of ``other``'s outline lies on ``outline``. Integer arithmetic, so exact."""
    edges = _edges(outline_V2)
    for (px, py), (qx, qy) in _edges(other_W2):
        dx, dy = qx - px, qy - py
        if dx == dy == 0:
            if not any(_on_edge(px, py, edge) for edge in edges):
                return False
            continue
        spans = []
        for (rx, ry), (sx, sy) in edges:
            if dx * (ry - py) == dy * (rx - px) and dx * (sy - py) == dy * (sx - px):
                spans.append(sorted((dx * (rx - px) + dy * (ry - py), dx * (sx - px) + dy * (sy - py))))
        reached = 0
        for low, high in sorted(spans):
            if low <= reached:
                reached = max(reached, high)
        if not spans or reached < dx * dx + dy * dy:
            return False
    return True


def _edges(ring_V2: np.ndarray) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    points = [(int(x), int(y)) for x, y in ring_V2]
    return list(zip(points, points[1:] + points[:1], strict=True))


def _on_edge(x: int, y: int, edge: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    (rx, ry), (sx, sy) = edge
    dx, dy = sx - rx, sy - ry
    return dx * (y - ry) == dy * (x - rx) and 0 <= dx * (x - rx) + dy * (y - ry) <= dx * dx + dy * dy
