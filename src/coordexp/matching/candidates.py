"""Which GT objects are worth an expensive mask IoU with each prediction."""

from __future__ import annotations

import numpy as np

from coordexp.geometry import box_iou, box_iou_pairs, overlapping_boxes


def top_k_candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``min(k, G)`` best GT boxes of each predicted box.

    Overlapping boxes come first, by IoU and then by index. Where fewer than k overlap (or none), those with the nearest
    centres fill up, by squared distance and then by index.

    Args:
        pred_P4, gt_G4: boxes as (x1, y1, x2, y2). k: at least 1.

    Returns: candidate indices (P, K) int64, and their box IoU (P, K) float64.
    """
    iou_PG = box_iou(pred_P4, gt_G4)
    # Twice the centre, so that squared distances stay integers and ties are exact.
    offset_PG2 = (pred_P4[:, None, :2] + pred_P4[:, None, 2:]) - (gt_G4[None, :, :2] + gt_G4[None, :, 2:])
    distance_PG = np.where(iou_PG > 0, 0, (offset_PG2**2).sum(axis=-1))
    order_PG = np.lexsort((distance_PG, -iou_PG), axis=-1)  # stable: equal keys keep index order
    chosen_PK = order_PG[:, :k]
    return chosen_PK, np.take_along_axis(iou_PG, chosen_PK, axis=1)


def overlapping_candidates(pred_P4: np.ndarray, gt_G4: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Those of :func:`top_k_candidates` whose boxes overlap: (N,) prediction and (N,) GT indices, by prediction.

    Shapes whose boxes do not overlap have mask IoU 0, so above a gate of 0 the others could never match. Their number
    grows with the crowd, that of overlaps hardly does.
    """
    pred_N, gt_N = overlapping_boxes(pred_P4, gt_G4)
    if pred_N.size == 0 or np.bincount(pred_N).max() <= k:
        return pred_N, gt_N
    order = np.lexsort((gt_N, -box_iou_pairs(pred_P4[pred_N], gt_G4[gt_N]), pred_N))
    starts_P = np.searchsorted(pred_N, np.arange(len(pred_P4)))  # the order within a prediction is all that changed
    rank_N = np.arange(len(pred_N)) - starts_P[pred_N]
    chosen = np.sort(order[rank_N < k])
    return pred_N[chosen], gt_N[chosen]
