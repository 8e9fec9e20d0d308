"""Shapes in norm1000 space: boxes, outlines, mask IoU. Torch-free. :mod:`coordexp.transport` aligns two point sets.

Boxes are axis-aligned and continuous (a box covers ``(x2 - x1) * (y2 - y1)``). :func:`to_pixel` and :func:`to_bin` are
the only places that relate bins to pixels.

Mask IoU is that of a fixed virtual canvas of R x R pixels: bins are clamped to 0..999 and projected by
``bin * (R - 1) / 999``; pycocotools rasterises the ring. If a raster is empty, the exact IoU in norm1000 space counts
(with even-odd filling, as the rasteriser has it), so that a shape always has IoU 1 with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from coordexp.records import NUM_BINS
from coordexp.transport import barycentric_targets as barycentric_targets


class Shape(Protocol):
    """Anything with a geometry: ground truth, a prediction, an evaluated detection."""

    @property
    def kind(self) -> str:
        """``"bbox_2d"`` or ``"poly"``."""
        ...

    @property
    def bins(self) -> Sequence[float]:
        """Flat norm1000 coordinates: x1, y1, x2, y2 of a box; x, y of each point of a polygon. Whole numbers, except
        in the answers of tiles, which are finer than a bin of their photograph."""
        ...


def ring(shape: Shape) -> np.ndarray:
    """The outline's vertices, (V, 2), clamped to 0..999; a box gives its 4 corners, in either order. Raises
    ValueError for an unknown kind, a box without 4 bins, a polygon with odd or fewer than 6 bins."""
    bins = np.clip(np.asarray(shape.bins), 0, NUM_BINS - 1)
    if shape.kind == "bbox_2d":
        if bins.shape != (4,):
            raise ValueError(f"bbox_2d needs 4 bins, got {bins.size}")
        x1, x2 = sorted((bins[0], bins[2]))
        y1, y2 = sorted((bins[1], bins[3]))
        return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)])
    if shape.kind == "poly":
        if bins.ndim != 1 or bins.size < 6 or bins.size % 2:
            raise ValueError(f"poly needs an even number of bins, at least 6, got {bins.size}")
        return bins.reshape(-1, 2)
    raise ValueError(f"unknown geometry kind {shape.kind!r}; use 'bbox_2d' or 'poly'")


def aabb(shape: Shape) -> tuple[float, float, float, float]:
    """Axis-aligned bounding box ``(x1, y1, x2, y2)`` of a box or polygon, clamped to 0..999."""
    bins = shape.bins
    is_box, is_poly = shape.kind == "bbox_2d", shape.kind == "poly"
    if not ((is_box and len(bins) == 4) or (is_poly and len(bins) >= 6 and len(bins) % 2 == 0)):
        ring(shape)  # raises
    # For a dozen numbers Python's min is several times faster than NumPy's.
    x, y = bins[::2], bins[1::2]
    x1, y1, x2, y2 = (min(max(value, 0), NUM_BINS - 1) for value in (min(x), min(y), max(x), max(y)))
    return x1, y1, x2, y2


def aabbs(shapes: Sequence[Shape]) -> np.ndarray:
    """:func:`aabb` of each shape: (N, 4), int64 unless some shape has fractions of bins."""
    corners = [shape.bins if shape.kind == "bbox_2d" and len(shape.bins) == 4 else aabb(shape) for shape in shapes]
    corners_N4 = np.array(corners, dtype=None if corners else np.int64).reshape(-1, 4)
    # NumPy's narrower and unsigned integers are whole numbers too; a polygon's fractions may be inside its box.
    inside = (k for shape in shapes if shape.kind == "poly" for k in shape.bins)
    is_whole = corners_N4.dtype.kind in "iu" and not any(isinstance(k, float | np.floating) for k in inside)
    corners_N4 = corners_N4.astype(np.int64 if is_whole else np.float64, copy=False)
    corners_N4 = np.minimum(np.maximum(corners_N4, 0), NUM_BINS - 1)  # np.clip is slower: it looks up its bounds' types
    low_N2, high_N2 = corners_N4[:, :2], corners_N4[:, 2:]
    return np.concatenate([np.minimum(low_N2, high_N2), np.maximum(low_N2, high_N2)], axis=1)


def box_iou(a_N4: np.ndarray, b_M4: np.ndarray) -> np.ndarray:
    """IoU of every box of ``a`` with every box of ``b``, corners ordered: (N, M) float64.

    A box without area has IoU 1 with an equal box and 0 with any other.
    """
    return box_iou_pairs(a_N4[:, None, :], b_M4[None, :, :])


def box_iou_pairs(a_K4: np.ndarray, b_K4: np.ndarray) -> np.ndarray:
    """:func:`box_iou` of box k with box k: (K,) float64; axes before the last one broadcast."""
    ax1, ay1, ax2, ay2 = np.moveaxis(np.asarray(a_K4, dtype=np.float64), -1, 0)
    bx1, by1, bx2, by2 = np.moveaxis(np.asarray(b_K4, dtype=np.float64), -1, 0)
    width = np.maximum(np.minimum(ax2, bx2) - np.maximum(ax1, bx1), 0.0)
    height = np.maximum(np.minimum(ay2, by2) - np.maximum(ay1, by1), 0.0)
    shared = width * height
    union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - shared
    equal = (ax1 == bx1) & (ay1 == by1) & (ax2 == bx2) & (ay2 == by2)
    return np.where(union > 0, shared / np.where(union > 0, union, 1.0), equal.astype(np.float64))


def overlapping_boxes(a_N4: np.ndarray, b_M4: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (K,), (K,) of all pairs with :func:`box_iou` above 0, ordered by the first and then by the second."""
    a_N14, b_1M4 = a_N4[:, None, :], b_M4[None, :, :]
    near_NM = (a_N14[..., 0] <= b_1M4[..., 2]) & (b_1M4[..., 0] <= a_N14[..., 2])
    near_NM &= (a_N14[..., 1] <= b_1M4[..., 3]) & (b_1M4[..., 1] <= a_N14[..., 3])
    first_K, second_K = np.nonzero(near_NM)  # touching boxes stay: coincident boxes may have no area
    overlap_K = box_iou_pairs(a_N4[first_K], b_M4[second_K]) > 0
    return first_K[overlap_K], second_K[overlap_K]


def nearest_on_outline(points_N2: np.ndarray, box: tuple[float, float, float, float]) -> np.ndarray:
    """The nearest point of the box's outline for each point: (N, 2) float64. Between equally near sides the first of
    left, right, top, bottom counts."""
    x1, y1, x2, y2 = box
    nearest_N2 = np.clip(np.asarray(points_N2, dtype=np.float64), (x1, y1), (x2, y2))  # outside points are on it now
    x_N, y_N = nearest_N2[:, 0], nearest_N2[:, 1]
    side_N = np.argmin([x_N - x1, x2 - x_N, y_N - y1, y2 - y_N], axis=0)
    for side, (axis, at) in enumerate(((0, x1), (0, x2), (1, y1), (1, y2))):
        nearest_N2[side_N == side, axis] = at
    return nearest_N2


def pixel_box(shape: Shape, width: int, height: int) -> tuple[float, float, float, float]:
    """``(x1, y1, x2, y2)`` of the shape's bounds, in pixels."""
    x1, y1, x2, y2 = aabb(shape)
    return to_pixel(x1, width), to_pixel(y1, height), to_pixel(x2, width), to_pixel(y2, height)


def pixel_ring(shape: Shape, width: int, height: int) -> tuple[tuple[float, float], ...]:
    """The shape's outline in pixels: a box's four corners, or a polygon's vertices."""
    if shape.kind == "bbox_2d":
        x1, y1, x2, y2 = pixel_box(shape, width, height)
        return (x1, y1), (x2, y1), (x2, y2), (x1, y2)
    flat = tuple(shape.bins)
    points = zip(flat[0::2], flat[1::2], strict=True)
    return tuple((to_pixel(x, width), to_pixel(y, height)) for x, y in points)


def to_pixel(k: float, side: int) -> float:
    """Bin ``k`` → its place on a side of ``side`` pixels: 0 → 0, the first pixel's outer edge, 999 → ``side``, the last
    one's."""
    return k * side / (NUM_BINS - 1)


def to_bin(x: float, side: int) -> int:
    """Pixel coordinate → the nearest bin on a side of ``side`` pixels, 0..999: the inverse of :func:`to_pixel`."""
    return round(to_fraction(x, side))


def to_fraction(x: float, side: int) -> float:
    """As :func:`to_bin`, without rounding."""
    return min(NUM_BINS - 1.0, max(0.0, (NUM_BINS - 1) * x / side))


_ROWS = 32  # shapes that are overlaid with all their partners in one call
_AREAS = 255  # masks per call of pycocotools' area: it writes their number into a byte


def mask_iou(a: Shape, b: Shape, resolution: int = 256) -> float:
    """IoU, 0..1, of two shapes (``.kind`` and ``.bins``) on a ``resolution`` x ``resolution`` canvas: a run passes
    ``rollout_matching.maskiou_resolution``. Raises ValueError for a malformed shape, or a resolution under 2."""
    return float(mask_iou_pairs([a], [b], np.zeros((1, 2), dtype=np.int64), resolution)[0])


def mask_iou_pairs(
    first: Sequence[Shape],
    second: Sequence[Shape],
    pairs_K2: np.ndarray,
    resolution: int,
    aabbs_of: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """:func:`mask_iou` of chosen pairs only: (K,) float64 for (K, 2) indices into ``first`` and ``second``.

    Each polygon (and each box that meets one) is rasterised once; boxes against boxes are computed in closed form.
    If bounding boxes share no area, and are not equal, the mask IoU is 0: a raster stays within the pixels of its
    bounding box, and disjoint boxes share no pixel. ``aabbs_of``: :func:`aabbs` of ``first`` and ``second``, if the
    caller has them. With fractions of bins among them, the IoU is exact instead: small objects of a large photograph
    are smaller than the canvas's pixels.
    """
    if resolution < 2:
        raise ValueError(f"the canvas needs at least 2 pixels a side, got {resolution}")
    pairs_K2 = np.asarray(pairs_K2, dtype=np.int64).reshape(-1, 2)
    is_box_1 = np.array([shape.kind == "bbox_2d" for shape in first], dtype=bool)
    is_box_2 = np.array([shape.kind == "bbox_2d" for shape in second], dtype=bool)
    aabbs_1, aabbs_2 = aabbs_of or (aabbs(first), aabbs(second))
    aabb_1, aabb_2 = aabbs_1[pairs_K2[:, 0]], aabbs_2[pairs_K2[:, 1]]
    both_boxes_K = is_box_1[pairs_K2[:, 0]] & is_box_2[pairs_K2[:, 1]]
    iou_K = np.zeros(len(pairs_K2), dtype=np.float64)
    fractions = not aabbs_1.dtype == aabbs_2.dtype == np.int64
    of_boxes = box_iou_pairs if fractions else partial(_box_pairs, resolution=resolution)
    iou_K[both_boxes_K] = of_boxes(aabb_1[both_boxes_K], aabb_2[both_boxes_K])
    drawn_D = np.flatnonzero(~both_boxes_K)
    if drawn_D.size:
        drawn_D = drawn_D[box_iou_pairs(aabb_1[drawn_D], aabb_2[drawn_D]) > 0]
    if drawn_D.size and fractions:
        iou_K[drawn_D] = _exact_pairs(first, second, pairs_K2[drawn_D])
    elif drawn_D.size:
        iou_K[drawn_D] = _drawn_pairs(first, second, pairs_K2[drawn_D], resolution)
    return iou_K


def _drawn_pairs(first: Sequence[Shape], second: Sequence[Shape], pairs_D2: np.ndarray, resolution: int) -> np.ndarray:
    """Mask IoU of pairs that need rasters, (D,): all shapes are drawn in one call, then overlaid a few rows a call.

    Extra pairs cost less than extra calls: pycocotools skips pairs of disjoint boxes itself.
    """
    from pycocotools import mask as coco_mask

    shapes_1, shapes_2 = np.unique(pairs_D2[:, 0]), np.unique(pairs_D2[:, 1])
    shapes = [first[i] for i in shapes_1.tolist()] + [second[j] for j in shapes_2.tolist()]
    outlines: Any = [_outline(shape, resolution) for shape in shapes]  # pycocotools' stubs know no lists of rings
    rles: Any = coco_mask.frPyObjects(outlines, resolution, resolution)
    is_empty = np.concatenate([coco_mask.area(rles[i : i + _AREAS]) for i in range(0, len(rles), _AREAS)]) == 0
    rows_D = np.searchsorted(shapes_1, pairs_D2[:, 0])
    columns_D = np.searchsorted(shapes_2, pairs_D2[:, 1]) + len(shapes_1)
    iou_D = np.empty(len(pairs_D2), dtype=np.float64)
    by_row = np.argsort(rows_D, kind="stable")
    starts = np.searchsorted(rows_D[by_row], np.arange(0, len(shapes_1), _ROWS))
    for of_rows in np.split(by_row, starts[1:]):
        rows, row_R = np.unique(rows_D[of_rows], return_inverse=True)
        columns, column_R = np.unique(columns_D[of_rows], return_inverse=True)
        others = [rles[column] for column in columns.tolist()]
        iou_RC = np.asarray(coco_mask.iou([rles[row] for row in rows.tolist()], others, [0] * len(others)))
        iou_D[of_rows] = iou_RC[row_R, column_R]
    small_E = np.flatnonzero(is_empty[rows_D] | is_empty[columns_D])  # too small for the raster
    iou_D[small_E] = _exact_pairs(first, second, pairs_D2[small_E])
    return iou_D


def _exact_pairs(first: Sequence[Shape], second: Sequence[Shape], pairs_E2: np.ndarray) -> list[float]:
    # Of equal pairs once: a model that repeats itself writes the same small shape a hundred times.
    known: dict[Any, float] = {}
    found = []
    for i, j in pairs_E2.tolist():
        a, b = first[i], second[j]
        key = a.kind, tuple(a.bins), b.kind, tuple(b.bins)
        if key not in known:
            known[key] = exact_iou(ring(a), ring(b))
        found.append(known[key])
    return found


def _outline(shape: Shape, resolution: int) -> list[float]:
    # A shape's ring on the canvas, (x, y, x, y, …) for pycocotools. Lists: faster for a dozen numbers.
    bins: Any = shape.bins  # whole numbers: fractions are not drawn
    if min(bins) < 0 or max(bins) >= NUM_BINS:
        bins = [min(max(k, 0), NUM_BINS - 1) for k in bins]
    if shape.kind == "bbox_2d":
        (x1, x2), (y1, y2) = sorted(bins[::2]), sorted(bins[1::2])
        bins = [x1, y1, x2, y1, x2, y2, x1, y2]
    projected_B = _projected(resolution)
    return [projected_B[k] for k in bins]


@lru_cache(maxsize=8)
def _projected(resolution: int) -> list[float]:
    return [k * (resolution - 1) / (NUM_BINS - 1) for k in range(NUM_BINS)]


@lru_cache(maxsize=8)
def _cell_edge(resolution: int) -> np.ndarray:
    """Pixel edge of a box side at each bin: (1000,) int64; a box fills pixels [edge(x1), edge(x2)).

    This is pycocotools' rule for polygons: vertices are rounded to a grid five times finer than the pixels, and a
    pixel is inside if its middle fine cell (2 of 0..4) is right of the edge.
    """
    bins_B = np.arange(NUM_BINS, dtype=np.float64)
    fine_B = (5.0 * (bins_B * (resolution - 1) / (NUM_BINS - 1)) + 0.5).astype(np.int64)
    return (fine_B + 2) // 5


def _box_pairs(a_K4: np.ndarray, b_K4: np.ndarray, resolution: int) -> np.ndarray:
    """Mask IoU of box k with box k, (K,), from pixel counts; equal to rasterising both."""
    edge_B = _cell_edge(resolution)
    cells_a_K4, cells_b_K4 = edge_B[a_K4], edge_B[b_K4]
    area_a_K = (cells_a_K4[:, 2:] - cells_a_K4[:, :2]).prod(axis=1)
    area_b_K = (cells_b_K4[:, 2:] - cells_b_K4[:, :2]).prod(axis=1)
    sides_K2 = np.minimum(cells_a_K4[:, 2:], cells_b_K4[:, 2:]) - np.maximum(cells_a_K4[:, :2], cells_b_K4[:, :2])
    shared_K = np.maximum(sides_K2, 0).prod(axis=1)
    empty_K = (area_a_K == 0) | (area_b_K == 0)
    iou_K = shared_K / np.where(empty_K, 1, area_a_K + area_b_K - shared_K)
    if empty_K.any():
        iou_K[empty_K] = box_iou_pairs(a_K4[empty_K], b_K4[empty_K])
    return iou_K


# The vertices of rings are bins, or thousandths of one, so a real area is far larger; this is only rounding.
_NO_AREA = 1e-9


def exact_iou(a_V2: np.ndarray, b_W2: np.ndarray) -> float:
    """Area IoU of two rings (self-intersections allowed), exact up to float rounding.

    Where neither ring encloses an area: 1 if their outlines are the same set of points, else 0.
    """
    # The plane is cut into vertical slabs at every vertex and every crossing of two edges. Inside a slab no edges
    # cross, so every piece is a trapezoid, and its height at the slab's middle times the slab's width is its area.
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
    if union <= _NO_AREA:
        return float(_outline_covers(a_V2, b_W2) and _outline_covers(b_W2, a_V2))
    return shared / union


def _outline_covers(outline_V2: np.ndarray, other_W2: np.ndarray) -> bool:
    """Whether ``outline`` contains every point of ``other``'s outline. Exact, in integers: thousandths of a bin."""
    (points, others) = (np.rint(1000 * ring_V2).astype(np.int64).tolist() for ring_V2 in (outline_V2, other_W2))
    edges = list(zip(points, points[1:] + points[:1], strict=True))
    for (px, py), (qx, qy) in zip(others, others[1:] + others[:1], strict=True):
        # Which part of p → q does each edge cover? If p = q, an edge covers it or not.
        dx, dy = qx - px, qy - py
        spans = []
        for (rx, ry), (sx, sy) in edges:
            if dx == dy == 0:
                is_inside = min(rx, sx) <= px <= max(rx, sx) and min(ry, sy) <= py <= max(ry, sy)
                if is_inside and (sx - rx) * (py - ry) == (sy - ry) * (px - rx):
                    spans.append((0, 0))
            elif dx * (ry - py) == dy * (rx - px) and dx * (sy - py) == dy * (sx - px):
                low, high = sorted((dx * (rx - px) + dy * (ry - py), dx * (sx - px) + dy * (sy - py)))
                spans.append((low, high))
        reached = 0
        for low, high in sorted(spans):
            if low <= reached:
                reached = max(reached, high)
        if not spans or reached < dx * dx + dy * dy:
            return False
    return True
