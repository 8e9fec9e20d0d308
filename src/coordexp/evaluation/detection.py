"""Counts per image, which add up over images and ranks, and the figures derived from their sums. Torch-free."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.geometry import Shape, aabbs, mask_iou_pairs, overlapping_boxes
from coordexp.matching import MatchingConfig, assign_pairs, duplicate_indices
from coordexp.records import NUM_BINS, GTObject

IOU_THRESHOLD = 0.5
GIANT = 0.8  # of the image's area
DENSITY_BINS = ((0, 0), (1, 5), (6, 10), (11, 20), (21, 50), (51, None))
OTHER_DESC = "(not annotated anywhere)"
_CANVAS = 256


@dataclass(frozen=True, slots=True)
class ImageCounts:
    """One image: its counts, and those of each description (of ground truth, predictions and matches)."""

    counts: Counter[str]
    by_desc: Mapping[str, Counter[str]] = field(default_factory=dict)

    @property
    def density(self) -> str:
        return density_bin(int(self.counts["gt"]))


def density_bin(num_objects: int) -> str:
    """The name of the density bin of an image with ``num_objects`` annotated objects."""
    for low, high in DENSITY_BINS:
        if high is None:
            return f"{low}+"
        if low <= num_objects <= high:
            return f"{low}" if low == high else f"{low}-{high}"
    raise AssertionError("the last bin is open")


def match_by_desc(
    predicted: Sequence[Detection], truth: Sequence[GTObject], threshold: float = IOU_THRESHOLD
) -> list[tuple[int, int, float]]:
    """Assign within equal descriptions, mask IoU at least ``threshold``: ``(pred_idx, gt_idx, iou)`` triples."""
    pairs = _overlapping(predicted, truth, threshold)
    return pairs.of_equal_desc(predicted, truth).assigned(threshold)


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


def match_any_desc(
    predicted: Sequence[Detection], truth: Sequence[GTObject], threshold: float = IOU_THRESHOLD
) -> list[tuple[int, int]]:
    """``(pred_idx, gt_idx)`` of objects matched one to one by mask IoU, whatever their descriptions."""
    return [(i, j) for i, j, _ in _overlapping(predicted, truth, threshold).assigned(threshold)]


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Pairs of (prediction, ground truth) with their mask IoU: what an assignment chooses from."""

    pairs_K2: np.ndarray
    iou_K: np.ndarray

    def of_equal_desc(self, predicted: Sequence[Detection], truth: Sequence[GTObject]) -> _Pairs:
        same = [k for k, (i, j) in enumerate(self.pairs_K2.tolist()) if predicted[i].desc == truth[j].desc]
        return _Pairs(self.pairs_K2[same], self.iou_K[same])

    def assigned(self, threshold: float) -> list[tuple[int, int, float]]:
        """The assignment: ``(pred_idx, gt_idx, iou)`` in order of prediction. Descriptions share no object, so the one
        of all descriptions together is each description's own."""
        config = MatchingConfig(maskiou_gate=threshold)
        chosen = assign_pairs(self.pairs_K2[:, 0], self.pairs_K2[:, 1], self.iou_K, config)
        return sorted(
            (i, j, iou) for (i, j), iou in zip(self.pairs_K2[chosen].tolist(), self.iou_K[chosen].tolist(), strict=True)
        )


def _overlapping(predicted: Sequence[Shape], truth: Sequence[Shape], threshold: float) -> _Pairs:
    """Pairs that may reach ``threshold``: those whose bounding boxes overlap, and with a threshold of 0 all."""
    boxes = aabbs(predicted), aabbs(truth)
    first_K, second_K = (
        overlapping_boxes(*boxes) if threshold > 0 else np.nonzero(np.ones((len(predicted), len(truth)), dtype=bool))
    )
    pairs_K2 = np.stack([first_K, second_K], axis=1)
    return _Pairs(pairs_K2, mask_iou_pairs(predicted, truth, pairs_K2, _CANVAS, aabbs_of=boxes))


def count_image(answer: ImageAnswer, threshold: float = IOU_THRESHOLD) -> ImageCounts:
    """The counts of one answer. Soft objects are not ground truth, and predictions that found one are not counted.

    Raises:
        DataError: the image has no annotations.
    """
    ignored = ignored_predictions(answer, threshold)
    objects = [prediction for i, prediction in enumerate(answer.pred) if i not in ignored]
    truth = answer.truth
    pairs = _overlapping(objects, truth, threshold)
    matched = pairs.of_equal_desc(objects, truth).assigned(threshold)
    matched_pred = {i for i, _, _ in matched}
    giants = _areas(objects) >= GIANT * (NUM_BINS - 1) ** 2
    counts = Counter(
        images=1,
        gt=len(truth),
        pred=len(objects),
        matched=len(matched),
        matched_any_desc=len(pairs.assigned(threshold)),
        dropped=answer.num_dropped,
        duplicates=len(duplicate_indices(objects)),
        giants=sum(1 for i in np.flatnonzero(giants).tolist() if i not in matched_pred),
        truncated=int(answer.truncated),
        repeat_terminated=int(answer.repeat_terminated),
        empty=int(not objects),
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
    ``giant_rate``: unmatched predictions whose box covers at least 80 % of the image. ``invalid_rate``: entries the
    strict parser dropped, of all entries. A rate with nothing below the line is 0. So are precision where nothing was
    predicted although something was there, and recall where nothing was there but something was predicted; with
    neither, precision, recall and F1 are 1. ``pred_objects`` and ``gt_objects`` distinguish these cases.
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
        "invalid_rate": ratio("dropped", pred + counts.get("dropped", 0)),
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


def _areas(objects: Sequence[Shape]) -> np.ndarray:
    box_N4 = aabbs(objects)
    return (box_N4[:, 2] - box_N4[:, 0]) * (box_N4[:, 3] - box_N4[:, 1])
