"""Two runs on the same images: is the difference more than luck? A paired bootstrap over images."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer
from coordexp.evaluation.coco import average_precision
from coordexp.evaluation.detection import (
    DENSITY_BINS,
    IOU_THRESHOLD,
    ImageCounts,
    count_image,
    density_bin,
    detection_metrics,
)

RESAMPLES = 1000
CONFIDENCE = 0.95  # of every interval
_COUNTS = ("images", "gt", "pred", "matched", "matched_any_desc", "matched_iou_sum", "dropped", "duplicates", "giants",
           "truncated", "repeat_terminated", "empty", "tokens")  # fmt: skip
COMPARED = ("f1", "precision", "recall", "mean_matched_iou", "duplicate_rate", "giant_rate", "invalid_rate",
            "truncated_rate", "empty_rate", "pred_per_image")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of both runs, and the interval that holds ``b - a`` in ``confidence`` of all resamples; None for average
    precision, which is not a sum of counts."""

    name: str
    a: float
    b: float
    interval: tuple[float, float] | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """F1 of the objects of one description, or of the images of one density. ``ap`` is None for densities."""

    name: str
    gt: int
    f1: Difference
    ap: Difference | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """``figures`` of all images; ``by_class`` of the annotated descriptions, most frequent first; ``by_density``."""

    images: int
    resamples: int
    confidence: float
    seed: int
    figures: tuple[Difference, ...]
    by_class: tuple[GroupDifference, ...]
    by_density: tuple[GroupDifference, ...]


def compare(
    a: Sequence[ImageAnswer],
    b: Sequence[ImageAnswer],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    constant_score: float | None = None,
) -> Comparison:
    """Every figure of both runs, those made of counts with the percentile interval of their difference.

    Images are paired by ``sample_id`` and drawn with replacement, the same ones for both runs, so that an image that is
    hard for both cancels. The same answers and ``seed`` give the same intervals.

    Raises:
        DataError: the runs did not answer the same images with the same annotations.
    """
    b = paired(a, b)
    # How often each image is drawn: each row sums to the number of images.
    weights_RN = np.random.default_rng(seed).multinomial(len(a), np.full(len(a), 1 / len(a)), size=resamples)
    counted = [[count_image(answer, IOU_THRESHOLD) for answer in run] for run in (a, b)]
    aps = [average_precision(run, constant_score=constant_score) for run in (a, b)]
    before, after = (run.figures.get("AP", 0.0) for run in aps)
    return Comparison(
        len(a),
        resamples,
        CONFIDENCE,
        seed,
        (Difference("AP", before, after), *_figures(counted, weights_RN)),
        tuple(_by_class(counted, [run.by_class for run in aps], weights_RN)),
        tuple(_by_density(counted, weights_RN)),
    )


def _figures(counted: Sequence[Sequence[ImageCounts]], weights_RN: np.ndarray) -> list[Difference]:
    matrices = [
        np.array([[part.counts[name] for name in _COUNTS] for part in run], dtype=np.float64) for run in counted
    ]
    whole = [detection_metrics(dict(zip(_COUNTS, run.sum(axis=0).tolist(), strict=True))) for run in matrices]
    drawn = [
        [detection_metrics(dict(zip(_COUNTS, row, strict=True))) for row in (weights_RN @ run).tolist()]
        for run in matrices
    ]
    differences = []
    for name in COMPARED:
        values = np.array([after[name] - before[name] for before, after in zip(*drawn, strict=True)])
        differences.append(Difference(name, whole[0][name], whole[1][name], _interval(values)))
    return differences


def _by_class(
    counted: Sequence[Sequence[ImageCounts]], aps: Sequence[Mapping[str, float]], weights_RN: np.ndarray
) -> list[GroupDifference]:
    images_of: defaultdict[str, set[int]] = defaultdict(set)
    for run in counted:
        for n, part in enumerate(run):
            for desc in part.by_desc:
                images_of[desc].add(n)
    rows = []
    for desc, images in images_of.items():
        of_N = np.array(sorted(images))
        parts = [[run[n].by_desc.get(desc, {}) for n in of_N.tolist()] for run in counted]
        ap = Difference("AP", aps[0][desc], aps[1][desc]) if desc in aps[0] else None
        rows.append(_group(desc, parts, weights_RN[:, of_N], ap))
    return sorted((row for row in rows if row.gt), key=lambda row: (-row.gt, row.name))


def _by_density(counted: Sequence[Sequence[ImageCounts]], weights_RN: np.ndarray) -> list[GroupDifference]:
    names = np.array([part.density for part in counted[0]])
    rows = []
    for name in [density_bin(low) for low, _ in DENSITY_BINS if low]:
        of_N = np.flatnonzero(names == name)
        if of_N.size:
            parts = [[run[n].counts for n in of_N.tolist()] for run in counted]
            rows.append(_group(f"{name} objects", parts, weights_RN[:, of_N]))
    return rows


def _group(
    name: str, parts: Sequence[Sequence[Mapping[str, float]]], weights_RN: np.ndarray, ap: Difference | None = None
) -> GroupDifference:
    """F1 from the counts of both runs on the images of a group."""
    counts = [
        np.array([[part.get(key, 0) for key in ("gt", "pred", "matched")] for part in run], dtype=np.float64)
        for run in parts
    ]
    before, after = (float(_f1(count_N3.sum(axis=0, keepdims=True))[0]) for count_N3 in counts)
    before_R, after_R = (_f1(weights_RN @ count_N3) for count_N3 in counts)
    f1 = Difference("f1", before, after, _interval(after_R - before_R))
    return GroupDifference(name, int(counts[0][:, 0].sum()), f1, ap)


def _f1(count_R3: np.ndarray) -> np.ndarray:
    """(R,), 1 where there is nothing to find and nothing was found."""
    gt_R, pred_R, matched_R = count_R3.T
    return np.divide(2 * matched_R, gt_R + pred_R, out=np.ones(len(count_R3)), where=gt_R + pred_R > 0)


def paired(a: Sequence[ImageAnswer], b: Sequence[ImageAnswer]) -> list[ImageAnswer]:
    """``b`` in the order of ``a``.

    Raises:
        DataError: other images, or other annotations.
    """
    by_id = {answer.sample_id: answer for answer in b}
    lone = sorted({answer.sample_id for answer in a} ^ by_id.keys())
    if lone:
        raise DataError(
            f"{len(lone)} images were answered by one run only ({lone[0]} first); predict both from one JSONL"
        )
    for answer in a:
        if by_id[answer.sample_id].gt != answer.gt or answer.gt is None:
            raise DataError(f"{answer.sample_id}: the two runs have other annotations; predict both from one JSONL")
    return [by_id[answer.sample_id] for answer in a]


def _interval(values_R: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values_R, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return low, high
