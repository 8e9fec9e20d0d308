"""Confidences of predictions: their calibration on annotated images, how well they hold, and the threshold with the
best F1. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from coordexp.checkpoints.card import Calibration, logit
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, each_changed
from coordexp.evaluation.detection import IOU_THRESHOLD, count_image, judged, sum_counts

ALL = "(all)"
LEAST_OBJECTS = 20  # predictions, for two numbers
_DIGITS = 4  # of thresholds, which users copy
BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Threshold:
    """The figures of a class, or of :data:`ALL`, without predictions below ``confidence``, which has the best F1."""

    name: str
    confidence: float
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions with a confidence in a bin: their number, mean confidence and the share that is right."""

    low: float
    high: float
    objects: int
    confidence: float
    right: float


def outcomes(answers: Sequence[ImageAnswer], iou: float = IOU_THRESHOLD) -> list[tuple[str, float, bool]]:
    """(description, confidence, whether it is right) of each prediction with a confidence; right means matched one to
    one, with an equal description and a mask IoU from ``iou``. Predictions that found a soft object are left out."""
    found = []
    for answer in answers:
        objects, _, assign = judged(answer, iou)
        right = {i for i, _, _ in assign(True)}
        found += [(o.desc, o.confidence, i in right) for i, o in enumerate(objects) if o.confidence is not None]
    return found


def fit(answers: Sequence[ImageAnswer], data: str) -> Calibration:
    """The calibration of raw confidences by which they agree best with what is right (maximum likelihood, with Platt's
    smoothed targets). ``data`` names the dataset. Raises DataError for too few predictions, or all of one outcome."""
    from scipy.optimize import minimize  # takes as long to import as all of this package
    from scipy.special import expit

    found = outcomes(answers)
    right = sum(is_right for _, _, is_right in found)
    if len(found) < LEAST_OBJECTS or right in (0, len(found)):
        raise DataError(
            f"{len(found)} predictions, {right} of them right: a calibration needs at least {LEAST_OBJECTS}, right and "
            "wrong ones; use more images, or a model that was trained longer",
            path=data,
        )
    logit_N = np.array([logit(raw) for _, raw, _ in found])
    high, low = (right + 1) / (right + 2), 1 / (len(found) - right + 2)
    target_N = np.array([high if is_right else low for _, _, is_right in found])

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        slope, intercept = parameters
        z_N = slope * logit_N + intercept
        gap_N = expit(z_N) - target_N
        return float(np.mean(np.logaddexp(0, z_N) - target_N * z_N)), np.array([gap_N @ logit_N, gap_N.sum()]) / len(
            found
        )

    # A slope above 0 keeps the order of confidences.
    best = minimize(loss, np.array([1.0, 0.0]), jac=True, method="L-BFGS-B", bounds=[(0.01, None), (None, None)])
    return Calibration(round(float(best.x[0]), 6), round(float(best.x[1]), 6), len(found), right, data)


def calibrated(answers: Sequence[ImageAnswer], calibration: Calibration) -> list[ImageAnswer]:
    """The answers with raw confidences mapped to probabilities."""
    return each_changed(
        answers, lambda o: o if o.confidence is None else replace(o, confidence=calibration(o.confidence))
    )


def reliability(answers: Sequence[ImageAnswer]) -> list[Reliability]:
    """Bins of confidence that have predictions, in ascending order."""
    found = outcomes(answers)
    rows = []
    for low, high in pairwise(BINS):
        inside = [(c, is_right) for _, c, is_right in found if low <= c < high or (high == 1.0 and c == 1.0)]
        if inside:
            confidence, right = (sum(column) / len(inside) for column in zip(*inside, strict=True))
            rows.append(Reliability(low, high, len(inside), confidence, right))
    return rows


def at_least(answers: Sequence[ImageAnswer], confidence: float | Mapping[str, float]) -> tuple[list[ImageAnswer], int]:
    """The answers without predictions of a lower confidence (one number, or one by description), and how many were left
    out. Raises DataError for a prediction without a confidence."""
    kept, left_out = [], 0
    for answer in answers:
        pred = []
        for obj in answer.pred:
            if obj.confidence is None:
                raise DataError(
                    f"{answer.sample_id}: {obj.desc!r} has no confidence; predict again, without --constant-score"
                )
            least = confidence.get(obj.desc, 0.0) if isinstance(confidence, Mapping) else confidence
            if obj.confidence >= least:
                pred.append(obj)
        left_out += len(answer.pred) - len(pred)
        kept.append(replace(answer, pred=tuple(pred)))
    return kept, left_out


def best_thresholds(answers: Sequence[ImageAnswer], iou: float = IOU_THRESHOLD) -> list[Threshold]:
    """Curves of all classes together, then of each annotated class with a prediction, by frequency. F1 is at mask IoU
    ``iou``. Empty if a prediction has no confidence, or nothing is annotated or predicted."""
    predicted = [obj for answer in answers for obj in answer.pred]
    gt_of = Counter(obj.desc for answer in answers for obj in answer.truth)
    if not predicted or not gt_of or any(obj.confidence is None for obj in predicted):
        return []
    of_class: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    for desc, confidence, is_right in outcomes(answers, iou):
        of_class[desc].append((confidence, is_right))
        of_class[ALL].append((confidence, is_right))
    gt_of[ALL] = gt_of.total()
    least = {name: _best(found, gt_of[name]) for name, found in of_class.items() if gt_of[name]}
    if not least:
        return []
    # Which predictions are matched can change as others are left out, so figures are counted again.
    counts_of: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in at_least(answers, least)[0]:
        for desc, counts in count_image(one, iou).by_desc.items():
            counts_of[desc].update(counts)
    counts_of[ALL] = sum_counts(count_image(one, iou).counts for one in at_least(answers, least[ALL])[0])
    names = sorted(least, key=lambda name: (-gt_of[name], name != ALL, name))
    rows = []
    for name in names:
        right, gt, pred = (counts_of[name].get(key, 0) for key in ("matched", "gt", "pred"))
        rows.append(Threshold(name, least[name], right / pred if pred else 0.0, right / gt, 2 * right / (gt + pred)))
    return rows


def _best(found: Sequence[tuple[float, bool]], gt: int) -> float:
    # F1 if the k most confident predictions are kept, at the last of equal confidences.
    ordered = sorted(found, key=lambda one: -one[0])
    confidence_K = np.array([confidence for confidence, _ in ordered])
    f1_K = 2 * np.cumsum([is_right for _, is_right in ordered]) / (np.arange(1, len(ordered) + 1) + gt)
    f1_K[:-1][confidence_K[:-1] == confidence_K[1:]] = -1
    best = float(confidence_K[int(np.argmax(f1_K))])
    rounded = round(best, _DIGITS)  # never up, or a threshold that is copied would leave out the object it is from
    return rounded if rounded <= best else round(rounded - 10**-_DIGITS, _DIGITS)


def scored_at_least(answers: Sequence[ImageAnswer], score: float) -> tuple[list[ImageAnswer], int]:
    """The answers without predictions of a lower score, and how many were left out. Those without a score stay."""
    kept = [replace(a, pred=tuple(o for o in a.pred if o.score is None or o.score >= score)) for a in answers]
    return kept, sum(len(a.pred) for a in answers) - sum(len(a.pred) for a in kept)
