"""Mask IoU of norm1000 shapes on a fixed virtual canvas of R x R pixels.

Bins are clamped to 0..999 and projected by ``bin * (R - 1) / 999``; pycocotools rasterises the ring. Shapes whose
raster is empty fall back to their exact IoU in norm1000 space, so that a shape always has IoU 1 with itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from coordexp.geometry.boxes import Shape, aabbs, box_iou, ring
from coordexp.geometry.overlap import exact_iou
from coordexp.records import NUM_BINS


def mask_iou(a: Shape, b: Shape, resolution: int = 256) -> float:
    """IoU, 0..1, of two shapes (``.kind`` and ``.bins``) on a ``resolution`` x ``resolution`` canvas.

    Raises:
        ValueError: a malformed shape, or a resolution under 2.
    """
    return float(mask_iou_pairs([a], [b], np.zeros((1, 2), dtype=np.int64), resolution)[0])


def mask_iou_pairs(
    first: Sequence[Shape], second: Sequence[Shape], pairs_K2: np.ndarray, resolution: int = 256
) -> np.ndarray:
    """:func:`mask_iou` of chosen pairs only: (K,) float64 for (K, 2) indices into ``first`` and ``second``.

    Each polygon (and each box that meets one) is rasterised once; boxes against boxes are computed in closed form.
    """
    if resolution < 2:
        raise ValueError(f"the canvas needs at least 2 pixels a side, got {resolution}")
    pairs_K2 = np.asarray(pairs_K2, dtype=np.int64).reshape(-1, 2)
    is_box_1 = np.array([shape.kind == "bbox_2d" for shape in first], dtype=bool)
    is_box_2 = np.array([shape.kind == "bbox_2d" for shape in second], dtype=bool)
    both_boxes_K = is_box_1[pairs_K2[:, 0]] & is_box_2[pairs_K2[:, 1]]
    iou_K = np.empty(len(pairs_K2), dtype=np.float64)
    boxes_K2 = pairs_K2[both_boxes_K]
    iou_K[both_boxes_K] = _box_pairs(aabbs(first)[boxes_K2[:, 0]], aabbs(second)[boxes_K2[:, 1]], resolution)
    masks_1: dict[int, dict[str, Any]] = {}
    masks_2: dict[int, dict[str, Any]] = {}
    for k in np.flatnonzero(~both_boxes_K):
        i, j = pairs_K2[k].tolist()
        for index, shapes, masks in ((i, first, masks_1), (j, second, masks_2)):
            if index not in masks:
                masks[index] = _rasterise(shapes[index], resolution)
        iou_K[k] = _raster_iou(masks_1[i], masks_2[j])
        if np.isnan(iou_K[k]):
            iou_K[k] = exact_iou(ring(first[i]), ring(second[j]))
    return iou_K


@lru_cache(maxsize=8)
def _cell_edge(resolution: int) -> np.ndarray:
    """Where a box side at each bin falls on the pixel grid: (1000,) int64; a box fills pixels [edge(x1), edge(x2)).

    This is pycocotools' own rule for polygons: vertices are rounded to a grid five times finer than the pixels, and a
    pixel is inside when its middle fine cell (2 of 0..4) lies right of the edge.
    """
    bins_B = np.arange(NUM_BINS, dtype=np.float64)
    fine_B = (5.0 * (bins_B * (resolution - 1) / (NUM_BINS - 1)) + 0.5).astype(np.int64)
    return (fine_B + 2) // 5


def _box_pairs(a_K4: np.ndarray, b_K4: np.ndarray, resolution: int) -> np.ndarray:
    """Mask IoU of box k with box k, (K,), from pixel counts; equal to what rasterising both would give."""
    edge_B = _cell_edge(resolution)
    cells_a_K4, cells_b_K4 = edge_B[a_K4], edge_B[b_K4]
    area_a_K = (cells_a_K4[:, 2:] - cells_a_K4[:, :2]).prod(axis=1)
    area_b_K = (cells_b_K4[:, 2:] - cells_b_K4[:, :2]).prod(axis=1)
    sides_K2 = np.minimum(cells_a_K4[:, 2:], cells_b_K4[:, 2:]) - np.maximum(cells_a_K4[:, :2], cells_b_K4[:, :2])
    shared_K = np.clip(sides_K2, 0, None).prod(axis=1)
    empty_K = (area_a_K == 0) | (area_b_K == 0)
    iou_K = shared_K / np.where(empty_K, 1, area_a_K + area_b_K - shared_K)
    for k in np.flatnonzero(empty_K):
        iou_K[k] = box_iou(a_K4[k : k + 1], b_K4[k : k + 1])[0, 0]
    return iou_K


def _rasterise(shape: Shape, resolution: int) -> dict[str, Any]:
    """Run-length mask of a shape on the canvas, with its pixel count under ``"area"``."""
    from pycocotools import mask as coco_mask

    outline_V2 = ring(shape) * (resolution - 1) / (NUM_BINS - 1)
    polygons: Any = [outline_V2.ravel().tolist()]  # pycocotools' stubs know no lists of float rings
    (rle,) = coco_mask.frPyObjects(polygons, resolution, resolution)
    return {"rle": rle, "area": int(coco_mask.area(rle))}


def _raster_iou(a: dict[str, Any], b: dict[str, Any]) -> float:
    """IoU of two masks; NaN where one of them is empty and the raster says nothing."""
    from pycocotools import mask as coco_mask

    if a["area"] == 0 or b["area"] == 0:
        return float("nan")
    return float(np.asarray(coco_mask.iou([a["rle"]], [b["rle"]], [0]))[0, 0])
