"""Counts per image, which add up over images and ranks, and the figures derived from their sums. Torch-free."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.geometry import aabbs, mask_iou_pairs, overlapping_boxes
from coordexp.matching import DescribedShape, MatchingConfig, assign_pairs, duplicate_indices
from coordexp.records import NUM_BINS, GTObject, PredictedObject

IOU_THRESHOLD = 0.5
GIANT = 0.8  # of the image's area
DENSITIES = {  # bins of images by their number of annotated objects
    "0": range(1),
    "1-5": range(1, 6),
    "6-10": range(6, 11),
    "11-20": range(11, 21),
    "21-50": range(21, 51),
    "51+": range(51, sys.maxsize),
}
OTHER_DESC = "(not annotated anywhere)"
_CANVAS = 256


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """One image: its counts, and those of each description (of ground truth, predictions and matches)."""

    counts: Counter[str]
    by_desc: Mapping[str, Counter[str]] = field(default_factory=dict)

    @property
    def density(self) -> str:
        """The name of the image's bin of :data:`DENSITIES`."""
        return next(name for name, numbers in DENSITIES.items() if self.counts["gt"] in numbers)


def match_by_desc(
    predicted: Sequence[ScoredObject], truth: Sequence[DescribedShape], threshold: float = IOU_THRESHOLD
) -> list[tuple[int, int, float]]:
    """Assign within equal descriptions, mask IoU at least ``threshold``: ``(pred_idx, gt_idx, iou)`` triples, in order
    of prediction."""
    return assigner(predicted, truth, threshold)(True)


def match_answer(answer: ImageAnswer, threshold: float = IOU_THRESHOLD) -> list[tuple[int, int, float]]:
    """An answer's predictions assigned to its ``gt`` as by :func:`match_by_desc`: first to annotated objects, then what
    is left to soft ones. In order of prediction."""
    gt = answer.gt or ()
    annotated = [j for j, obj in enumerate(gt) if obj.soft is None]
    soft = [j for j, obj in enumerate(gt) if obj.soft is not None]
    pairs = match_by_desc(answer.pred, [gt[j] for j in annotated], threshold)
    matched = [(i, annotated[j], iou) for i, j, iou in pairs]
    if soft:
        taken = {i for i, _, _ in matched}
        left = [i for i in range(len(answer.pred)) if i not in taken]
        pairs = match_by_desc([answer.pred[i] for i in left], [gt[j] for j in soft], threshold)
        matched += [(left[i], soft[j], iou) for i, j, iou in pairs]
    return sorted(matched)


def ignored_predictions(answer: ImageAnswer, threshold: float = IOU_THRESHOLD) -> set[int]:
    """Predictions that are neither right nor wrong, because they found a soft object."""
    gt = answer.gt or ()
    if all(obj.soft is None for obj in gt):
        return set()
    return {i for i, j, _ in match_answer(answer, threshold) if gt[j].soft is not None}


def assigner(
    predicted: Sequence[ScoredObject | PredictedObject], truth: Sequence[DescribedShape], threshold: float
) -> Callable[[bool], list[tuple[int, int, float]]]:
    """A function of "equal descriptions only" that returns the assigned (pred_idx, gt_idx, iou), by prediction.

    Descriptions share no object, so one assignment of all descriptions together is each description's own.
    """
    # Only pairs with overlapping bounding boxes can reach a threshold above 0.
    boxes = aabbs(predicted), aabbs(truth)
    every = np.ones((len(predicted), len(truth)), dtype=bool)
    pairs_K2 = np.stack(overlapping_boxes(*boxes) if threshold > 0 else np.nonzero(every), axis=1)
    same_K = np.array([predicted[i].desc == truth[j].desc for i, j in pairs_K2.tolist()], dtype=bool)
    iou_K = mask_iou_pairs(predicted, truth, pairs_K2, _CANVAS, aabbs_of=boxes)

    def assign(same_desc: bool) -> list[tuple[int, int, float]]:
        chosen = same_K if same_desc else slice(None)
        pair_N2, iou_N = pairs_K2[chosen], iou_K[chosen]
        best = assign_pairs(pair_N2[:, 0], pair_N2[:, 1], iou_N, MatchingConfig(maskiou_gate=threshold))
        return sorted((i, j, iou) for (i, j), iou in zip(pair_N2[best].tolist(), iou_N[best].tolist(), strict=True))

    return assign


def judged(
    answer: ImageAnswer, threshold: float = IOU_THRESHOLD
) -> tuple[list[ScoredObject], tuple[GTObject, ...], Callable[[bool], list[tuple[int, int, float]]]]:
    """The predictions that are right or wrong, the annotated objects, and their :func:`assigner`. Soft objects are not
    ground truth, and predictions that found one are neither. Raises DataError if the image has no annotations."""
    ignored = ignored_predictions(answer, threshold)
    objects = [prediction for i, prediction in enumerate(answer.pred) if i not in ignored]
    return objects, answer.truth, assigner(objects, answer.truth, threshold)


def count_image(answer: ImageAnswer, threshold: float = IOU_THRESHOLD) -> ImageCounts:
    """The counts of one answer's objects that are :func:`judged`."""
    objects, truth, assign = judged(answer, threshold)
    matched = assign(True)
    unmatched = sorted(set(range(len(objects))) - {i for i, _, _ in matched})
    box_N4 = aabbs([objects[i] for i in unmatched])
    area_N = (box_N4[:, 2] - box_N4[:, 0]) * (box_N4[:, 3] - box_N4[:, 1])
    counts = Counter(
        images=1,
        gt=len(truth),
        pred=len(objects),
        matched=len(matched),
        matched_any_desc=len(assign(False)),
        valid=answer.num_valid,
        dropped=answer.num_dropped,
        duplicates=len(duplicate_indices(objects)),
        giants=int((area_N >= GIANT * (NUM_BINS - 1) ** 2).sum()),
        truncated=int(answer.truncated),
        repeat_terminated=int(answer.repeat_terminated),
        empty=int(not answer.pred),
        tokens=answer.num_tokens,
    )
    counts["matched_iou_sum"] = sum(iou for _, _, iou in matched)  # pyright: ignore[reportArgumentType]
    by_desc: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for kind, descs in (("gt", truth), ("pred", objects)):
        for obj in descs:
            by_desc[obj.desc][kind] += 1
    for i, _, iou in matched:
        by_desc[objects[i].desc]["matched"] += 1
        by_desc[objects[i].desc]["matched_iou_sum"] += iou  # pyright: ignore[reportArgumentType]
    return ImageCounts(counts, dict(by_desc))


def sum_counts(parts: Iterable[Mapping[str, float]]) -> Counter[str]:
    """Zeros are kept: ``Counter``'s own addition would drop them."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return total


def detection_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Figures of a whole set: precision, recall and F1 at one IoU with equal description, and what they hide.

    ``duplicate_rate``: predictions that overlap an earlier one of the same description with IoU ≥ 0.5.
    ``giant_rate``: unmatched predictions with a box of at least 80 % of the image. ``invalid_rate``: share of entries
    that the strict parser dropped; one that found a soft object is valid. A rate without a denominator is 0, also
    precision without predictions and recall without ground truth; without both, precision, recall and F1 are 1.
    ``pred_objects`` and ``gt_objects`` distinguish these cases.
    """

    def ratio(above: str, below: float, nothing: float = 0.0) -> float:
        return counts.get(above, 0) / below if below else nothing

    pred, gt, images = counts.get("pred", 0), counts.get("gt", 0), counts.get("images", 0)
    neither = 1.0 if not pred and not gt else 0.0
    return {
        "f1": 2 * counts.get("matched", 0) / (pred + gt) if pred + gt else 1.0,
        "precision": ratio("matched", pred, neither),
        "recall": ratio("matched", gt, neither),
        "f1_any_desc": 2 * counts.get("matched_any_desc", 0) / (pred + gt) if pred + gt else 1.0,
        "mean_matched_iou": ratio("matched_iou_sum", counts.get("matched", 0)),
        "duplicate_rate": ratio("duplicates", pred),
        "giant_rate": ratio("giants", pred),
        "invalid_rate": ratio("dropped", counts.get("valid", 0) + counts.get("dropped", 0)),
        "truncated_rate": ratio("truncated", images),
        "repeat_terminated_rate": ratio("repeat_terminated", images),
        "empty_rate": ratio("empty", images),
        "pred_per_image": ratio("pred", images),
        "gt_per_image": ratio("gt", images),
        "tokens_per_image": ratio("tokens", images),
        "images": images,
        "pred_objects": pred,
        "gt_objects": gt,
        "matched_objects": counts.get("matched", 0),
    }
