"""Which GT objects are worth an expensive mask IoU with each prediction."""

from __future__ import annotations

import numpy as np

from coordexp.geometry import box_iou


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
