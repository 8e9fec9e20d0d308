"""How good a set of answers is: detection counts per image, additive, and the figures derived from their sums."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordexp.geometry import mask_iou
from coordexp.matching import MatchingConfig, match_objects
from coordexp.records import GTObject, ImageRecord, ParsedRollout, PredictedObject, Rollout

IOU_THRESHOLD = 0.5
_CANVAS = 256


@dataclass(frozen=True, slots=True)
class Prediction:
    """A record with what the model answered and what was read from it."""

    record: ImageRecord
    rollout: Rollout
    parsed: ParsedRollout


def match_by_desc(
    predicted: Sequence[PredictedObject], truth: Sequence[GTObject], threshold: float = IOU_THRESHOLD
) -> list[tuple[int, int, float]]:
    """Assign within equal descriptions, mask IoU at least ``threshold``: ``(pred_idx, gt_idx, iou)`` triples."""
    by_desc: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for i, obj in enumerate(predicted):
        by_desc[obj.desc][0].append(i)
    for j, obj in enumerate(truth):
        by_desc[obj.desc][1].append(j)
    triples = []
    for preds, gts in by_desc.values():
        config = MatchingConfig(candidate_top_k=max(1, len(gts)), maskiou_gate=threshold, maskiou_resolution=_CANVAS)
        result = match_objects([predicted[i] for i in preds], [truth[j] for j in gts], config)
        triples += [(preds[pair.pred_idx], gts[pair.gt_idx], pair.iou) for pair in result.pairs]
    return sorted(triples)


def detection_counts(predictions: Iterable[Prediction], threshold: float = IOU_THRESHOLD) -> Counter[str]:
    """Sums over images; add the counters of several ranks before deriving figures from them."""
    total: Counter[str] = Counter()
    for prediction in predictions:
        objects, truth = prediction.parsed.objects, prediction.record.objects
        matched = match_by_desc(objects, truth, threshold)
        anywhere = match_objects(
            objects, truth, MatchingConfig(max(1, len(truth)), threshold, maskiou_resolution=_CANVAS)
        )
        total += Counter(
            images=1,
            gt=len(truth),
            pred=len(objects),
            matched=len(matched),
            matched_any_desc=len(anywhere.pairs),
            dropped=prediction.parsed.num_dropped,
            duplicates=_num_duplicates(objects),
            truncated=int(prediction.rollout.truncated),
            empty=int(not objects),
            tokens=len(prediction.rollout.response_token_ids),
        )
        # Counter addition drops zero and negative values, so the float sum is added apart.
        total["matched_iou_sum"] += sum(iou for _, _, iou in matched)  # pyright: ignore[reportArgumentType]
    return total


def detection_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Figures of a whole set: precision, recall and F1 at IoU 0.5 with equal description, and what they hide.

    ``duplicate_rate``: predictions that overlap an earlier one of the same description with IoU ≥ 0.5.
    ``invalid_rate``: entries the strict parser dropped, of all entries. Rates with nothing below the line are 0, but
    precision is 1 where nothing was predicted and recall is 1 where nothing was there.
    """

    def ratio(above: str, below: float, nothing: float = 0.0) -> float:
        return counts.get(above, 0) / below if below else nothing

    pred, gt, images = counts.get("pred", 0), counts.get("gt", 0), counts.get("images", 0)
    return {
        "f1": 2 * counts.get("matched", 0) / (pred + gt) if pred + gt else 1.0,
        "precision": ratio("matched", pred, 1.0),
        "recall": ratio("matched", gt, 1.0),
        "f1_any_desc": 2 * counts.get("matched_any_desc", 0) / (pred + gt) if pred + gt else 1.0,
        "mean_matched_iou": ratio("matched_iou_sum", counts.get("matched", 0)),
        "duplicate_rate": ratio("duplicates", pred),
        "invalid_rate": ratio("dropped", pred + counts.get("dropped", 0)),
        "truncated_rate": ratio("truncated", images),
        "empty_rate": ratio("empty", images),
        "pred_per_image": ratio("pred", images),
        "gt_per_image": ratio("gt", images),
        "tokens_per_image": ratio("tokens", images),
        "images": images,
        "pred_objects": pred,
        "gt_objects": gt,
        "matched_objects": counts.get("matched", 0),
    }


def _num_duplicates(objects: Sequence[PredictedObject]) -> int:
    return sum(
        any(
            earlier.desc == later.desc and mask_iou(earlier, later, _CANVAS) >= IOU_THRESHOLD for earlier in objects[:i]
        )
        for i, later in enumerate(objects)
    )
