"""How a checkpoint's raw confidences become probabilities: a part of its card.

``coordexp evaluate --calibrate`` fits it (:func:`coordexp.evaluation.confidence.fit`). Two numbers, by Platt's method
(1999): p = sigmoid(slope · logit(raw) + intercept). Without one, confidences are raw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST = 1e-6  # logit(0) and logit(1) are infinite


@dataclass(frozen=True, slots=True)
class Calibration:
    """``objects``: number of predictions it was fitted on; ``right``: of correct ones; ``data``: their dataset."""

    slope: float = 1.0
    intercept: float = 0.0
    objects: int = 0
    right: int = 0
    data: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and math.isfinite(self.intercept) and self.slope > 0):
            raise ValueError("a calibration's slope must be above 0, and both of its numbers finite")

    def __call__(self, raw: float) -> float:
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, self.slope * logit(raw) + self.intercept))))


def logit(probability: float) -> float:
    clamped = min(1 - _LEAST, max(_LEAST, probability))
    return math.log(clamped / (1 - clamped))
