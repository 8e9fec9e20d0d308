"""Where each coordinate of a matched prediction should have been: the true box, or by transport between outlines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordexp.geometry.transport import barycentric_targets_of
from coordexp.records import NUM_BINS, GTObject, PredictedObject
from coordexp.settings import TransportConfig


def coordinate_targets(
    pairs: Sequence[tuple[PredictedObject, GTObject]], transport: TransportConfig
) -> list[Sequence[float]]:
    """Where each coordinate of each prediction should have been, given its object: as many float bins as it has.

    Two boxes: the true box. Otherwise both shapes are point sets (a box is its four corners) and each predicted point
    goes to the barycentre of its transport plan; a predicted box takes the bounds of its transported corners.
    """
    targets: list[Sequence[float]] = [truth.bins for _, truth in pairs]
    transported = [k for k, (pred, truth) in enumerate(pairs) if pred.kind == "poly" or truth.kind == "poly"]
    if not transported:
        return targets
    moved = barycentric_targets_of(
        [(_points(pairs[k][0]), _points(pairs[k][1])) for k in transported],
        cost=transport.cost,
        epsilon=transport.epsilon,
        iters=transport.iters,
    )
    for k, moved_N2 in zip(transported, moved, strict=True):
        points = np.minimum(np.maximum(moved_N2, 0), NUM_BINS - 1)
        if pairs[k][0].kind == "bbox_2d":
            targets[k] = [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
        else:
            targets[k] = points.reshape(-1).tolist()
    return targets


def _points(shape: PredictedObject | GTObject) -> np.ndarray:
    if shape.kind == "poly":
        return np.array(shape.bins, dtype=np.float64).reshape(-1, 2)
    x1, y1, x2, y2 = shape.bins
    return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.float64)
