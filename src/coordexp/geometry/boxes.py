"""Shapes as rings and axis-aligned boxes, in continuous norm1000 space (a box covers ``(x2 - x1) * (y2 - y1)``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coordexp.records import NUM_BINS


class Shape(Protocol):
    """Anything with a geometry: ground truth, a prediction, an evaluated detection."""

    @property
    def kind(self) -> str: ...

    @property
    def bins(self) -> Sequence[int]: ...


def ring(shape: Shape) -> np.ndarray:
    """The outline's vertices, (V, 2) int64, clamped to 0..999; a box gives its 4 corners, whatever their order was.

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
    vertices_V2 = ring(shape)
    (x1, y1), (x2, y2) = vertices_V2.min(axis=0).tolist(), vertices_V2.max(axis=0).tolist()
    return x1, y1, x2, y2


def aabbs(shapes: Sequence[Shape]) -> np.ndarray:
    """:func:`aabb` of each shape: (N, 4) int64, also for N = 0."""
    return np.array([aabb(shape) for shape in shapes], dtype=np.int64).reshape(-1, 4)


def box_iou(a_N4: np.ndarray, b_M4: np.ndarray) -> np.ndarray:
    """IoU of every box of ``a`` with every box of ``b``, corners ordered: (N, M) float64.

    A box without area has IoU 1 with an equal box and 0 with any other.
    """
    a_N14 = np.asarray(a_N4, dtype=np.float64).reshape(-1, 1, 4)
    b_1M4 = np.asarray(b_M4, dtype=np.float64).reshape(1, -1, 4)
    sides_NM2 = np.minimum(a_N14[..., 2:], b_1M4[..., 2:]) - np.maximum(a_N14[..., :2], b_1M4[..., :2])
    shared_NM = np.clip(sides_NM2, 0.0, None).prod(axis=-1)
    area_N1 = (a_N14[..., 2:] - a_N14[..., :2]).prod(axis=-1)
    area_1M = (b_1M4[..., 2:] - b_1M4[..., :2]).prod(axis=-1)
    union_NM = area_N1 + area_1M - shared_NM
    equal_NM = (a_N14 == b_1M4).all(axis=-1)
    return np.where(union_NM > 0, shared_NM / np.where(union_NM > 0, union_NM, 1.0), equal_NM.astype(np.float64))
