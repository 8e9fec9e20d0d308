"""Shapes as rings and axis-aligned boxes, in continuous norm1000 space (a box covers ``(x2 - x1) * (y2 - y1)``), and in
the pixels of an image of any size: bin k is pixel k / 999 · (side − 1), as in preparation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coordexp.records import NUM_BINS


class Shape(Protocol):
    """Anything with a geometry: ground truth, a prediction, an evaluated detection."""

    @property
    def kind(self) -> str:
        """``"bbox_2d"`` or ``"poly"``."""
        ...

    @property
    def bins(self) -> Sequence[int]:
        """Flat norm1000 coordinates: x1, y1, x2, y2 of a box; x, y of each point of a polygon."""
        ...


def ring(shape: Shape) -> np.ndarray:
    """The outline's vertices, (V, 2) int64, clamped to 0..999; a box gives its 4 corners, in either order.

    Raises:
        ValueError: an unknown kind, a box without 4 bins, a polygon with odd or fewer than 6 bins.
    """
    bins = np.clip(np.asarray(shape.bins, dtype=np.int64), 0, NUM_BINS - 1)
    if shape.kind == "bbox_2d":
        if bins.shape != (4,):
            raise ValueError(f"bbox_2d needs 4 bins, got {bins.size}")
        x1, x2 = sorted((bins[0], bins[2]))
        y1, y2 = sorted((bins[1], bins[3]))
        return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.int64)
    if shape.kind == "poly":
        if bins.ndim != 1 or bins.size < 6 or bins.size % 2:
            raise ValueError(f"poly needs an even number of bins, at least 6, got {bins.size}")
        return bins.reshape(-1, 2)
    raise ValueError(f"unknown geometry kind {shape.kind!r}; use 'bbox_2d' or 'poly'")


def aabb(shape: Shape) -> tuple[int, int, int, int]:
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
    """:func:`aabb` of each shape: (N, 4) int64, also for N = 0."""
    corners = [shape.bins if shape.kind == "bbox_2d" and len(shape.bins) == 4 else aabb(shape) for shape in shapes]
    corners_N4 = np.array(corners, dtype=np.int64).reshape(-1, 4)
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
    return tuple((to_pixel(x, width), to_pixel(y, height)) for x, y in zip(flat[0::2], flat[1::2], strict=True))


def to_pixel(k: float, side: int) -> float:
    """Bin ``k`` → its pixel coordinate on a side of ``side`` pixels: 0 → 0, 999 → ``side - 1``."""
    return k * max(1, side - 1) / (NUM_BINS - 1)


def to_bin(x: float, side: int) -> int:
    """Pixel coordinate → the nearest bin on a side of ``side`` pixels, at most 999: the inverse of :func:`to_pixel`."""
    return min(NUM_BINS - 1, max(0, round((NUM_BINS - 1) * x / max(1, side - 1))))
