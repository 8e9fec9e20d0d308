"""How a checkpoint's raw confidences become probabilities: :data:`CALIBRATION`, a small JSON next to its weights.

``coordexp evaluate --calibrate`` fits it (:func:`coordexp.evaluation.confidence.fit`). Two numbers, by Platt's method
(1999): p = sigmoid(slope · logit(raw) + intercept). Without the file, confidences are raw.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from coordexp.errors import CheckpointError

CALIBRATION = "calibration.json"
_LEAST = 1e-6  # logit(0) and logit(1) are infinite


@dataclass(frozen=True, slots=True)
class Calibration:
    """``objects``: number of predictions it was fitted on; ``right``: of correct ones; ``data``: their dataset."""

    slope: float = 1.0
    intercept: float = 0.0
    objects: int = 0
    right: int = 0
    data: str = ""

    def __call__(self, raw: float) -> float:
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, self.slope * logit(raw) + self.intercept))))


def logit(probability: float) -> float:
    clamped = min(1 - _LEAST, max(_LEAST, probability))
    return math.log(clamped / (1 - clamped))


def read_calibration(folder: str | Path) -> Calibration | None:
    """The calibration of the checkpoint in ``folder``; None if it has none. Raises CheckpointError for another file of
    this name."""
    path = Path(folder) / CALIBRATION
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        numbers = float(fields["slope"]), float(fields["intercept"]), int(fields["objects"]), int(fields["right"])
        if not (math.isfinite(numbers[0]) and math.isfinite(numbers[1]) and numbers[0] > 0):
            raise ValueError("slope must be above 0, and both numbers finite")
        return Calibration(*numbers, str(fields["data"]))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not a calibration ({error}); write it again with: coordexp evaluate CONFIG --calibrate"
        ) from error


def write_calibration(calibration: Calibration | None, folder: str | Path) -> Path:
    """Write :data:`CALIBRATION` into ``folder``; None removes the file, which belongs to earlier weights."""
    path = Path(folder) / CALIBRATION
    if calibration is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps({"schema_version": 1, **asdict(calibration)}, indent=2) + "\n", encoding="utf-8")
    return path
