"""Two runs on the same images: is the difference more than luck? A paired bootstrap over images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer
from coordexp.evaluation.coco import coco_figures, resampled_ap
from coordexp.evaluation.detection import IOU_THRESHOLD, count_image, detection_metrics

_COUNTS = ("images", "gt", "pred", "matched", "matched_any_desc", "matched_iou_sum", "dropped", "duplicates", "giants",
           "truncated", "repeat_terminated", "empty", "tokens")  # fmt: skip
COMPARED = ("f1", "precision", "recall", "mean_matched_iou", "duplicate_rate", "giant_rate", "invalid_rate",
            "truncated_rate", "empty_rate", "pred_per_image")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of both runs, and the interval in which ``b - a`` lies in ``confidence`` of all resamples."""

    name: str
    a: float
    b: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low > 0 or self.high < 0


def compare(
    a: Sequence[ImageAnswer],
    b: Sequence[ImageAnswer],
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    threshold: float = IOU_THRESHOLD,
    coco: bool = True,
    constant_score: float | None = None,
) -> list[Difference]:
    """Every figure of both runs with the percentile interval of their difference.

    Images are drawn with replacement, the same ones for both runs, so that an image that is hard for both cancels.

    Raises:
        DataError: the runs did not answer the same images with the same annotations.
    """
    b = _paired(a, b)
    counts = [_count_matrix(run, threshold) for run in (a, b)]
    weights_RN = _resample_weights(len(a), resamples, seed)
    differences = []
    whole = [detection_metrics(dict(zip(_COUNTS, run.sum(axis=0).tolist(), strict=True))) for run in counts]
    drawn = [
        [detection_metrics(dict(zip(_COUNTS, row, strict=True))) for row in (weights_RN @ run).tolist()]
        for run in counts
    ]
    for name in COMPARED:
        values = np.array([after[name] - before[name] for before, after in zip(*drawn, strict=True)])
        differences.append(Difference(name, whole[0][name], whole[1][name], *_interval(values, confidence)))
    if coco:
        curves = [coco_figures(run, "bbox", None, constant_score).curves for run in (a, b)]
        ones_N = np.ones(len(a), dtype=np.int64)
        before, after = (resampled_ap(run, ones_N) for run in curves)
        values = np.array([resampled_ap(curves[1], w_N) - resampled_ap(curves[0], w_N) for w_N in weights_RN])
        differences.insert(0, Difference("AP", before, after, *_interval(values, confidence)))
    return differences


def _paired(a: Sequence[ImageAnswer], b: Sequence[ImageAnswer]) -> list[ImageAnswer]:
    """``b`` in the order of ``a``."""
    by_id = {answer.sample_id: answer for answer in b}
    lone = sorted({answer.sample_id for answer in a} ^ by_id.keys())
    if lone:
        raise DataError(
            f"{len(lone)} images were answered by one run only ({lone[0]} first); predict both from one JSONL"
        )
    for answer in a:
        if by_id[answer.sample_id].truth != answer.truth:
            raise DataError(f"{answer.sample_id}: the two runs have other annotations; predict both from one JSONL")
    return [by_id[answer.sample_id] for answer in a]


def _count_matrix(answers: Sequence[ImageAnswer], threshold: float) -> np.ndarray:
    rows = [count_image(answer, threshold).counts for answer in answers]
    return np.array([[row[name] for name in _COUNTS] for row in rows], dtype=np.float64)


def _resample_weights(num_images: int, resamples: int, seed: int) -> np.ndarray:
    """How often each image is drawn: (R, N) int64, each row sums to N."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_images, np.full(num_images, 1 / num_images), size=resamples)


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return low, high
