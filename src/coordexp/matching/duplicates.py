"""Objects that an answer names twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coordexp.geometry import Shape, aabbs, mask_iou_pairs, overlapping_boxes

DUPLICATE_IOU = 0.5
MAX_OVERLAP_OF_OTHERS = 0.2  # mask IoU up to which two predictions count as two objects
_CANVAS = 256  # pixels, independent of a run's matching resolution, so that figures of runs are comparable


class DescribedShape(Shape, Protocol):
    """Anything with ``.desc``, ``.kind`` and ``.bins``."""

    @property
    def desc(self) -> str: ...


def duplicate_indices(objects: Sequence[DescribedShape]) -> list[int]:
    """Indices of the objects that repeat an earlier one: equal description, and mask IoU of at least 0.5."""
    if len(objects) < 2:
        return []
    box_N4 = aabbs(objects)
    pairs_K2 = np.stack(overlapping_boxes(box_N4, box_N4), axis=1)
    pairs_K2 = pairs_K2[pairs_K2[:, 0] < pairs_K2[:, 1]]
    same_K = np.array([objects[i].desc == objects[j].desc for i, j in pairs_K2.tolist()], dtype=bool)
    pairs_K2 = pairs_K2[same_K]
    if not len(pairs_K2):
        return []
    iou_K = mask_iou_pairs(objects, objects, pairs_K2, _CANVAS, aabbs_of=(box_N4, box_N4))
    return np.unique(pairs_K2[iou_K >= DUPLICATE_IOU, 1]).tolist()
