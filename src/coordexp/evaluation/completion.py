"""What a model finds and the annotations lack → soft objects. Every prediction has one fate, and is counted by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from coordexp.data.record_line import clean_desc
from coordexp.errors import DataError
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.geometry import Shape, aabb, mask_iou
from coordexp.matching import MAX_OVERLAP_OF_OTHERS, MatchingConfig, match_objects
from coordexp.records import NUM_BINS, GTObject, ImageRecord

PROVENANCE = "completion"  # the field of a record's metadata: a list, one entry per completion


class Fate(StrEnum):
    """What becomes of a prediction: the first of these that holds."""

    MATCHED = "matched"  # is there already: one to one with an object of the dataset, by mask IoU
    BELOW_THRESHOLD = "below_threshold"
    TOO_SMALL = "too_small"
    REFUSED_DESC = "refused_desc"  # a dataset may not hold this description
    UNKNOWN_DESC = "unknown_desc"  # annotated nowhere in the dataset; where that was asked for
    OVERLAPS_ANNOTATED = "overlaps_annotated"  # an annotated object, which another prediction was matched with
    OVERLAPS_SOFT = "overlaps_soft"  # an object of an earlier completion
    OVERLAPS_ADDED = "overlaps_added"  # a prediction of higher confidence, added already
    ADDED = "added"


@dataclass(frozen=True, slots=True)
class CompletionRules:
    """When an object is added, and with which weight.

    ``threshold``: least confidence, 0.001 to 1. ``max_overlap``: most mask IoU with any other object, 0 to 1.
    ``min_size``: percent, square root of the bounding box's share of the image. ``weight``: of every added object, in
    (0, 1]; None takes its confidence. ``known_descs``: only descriptions that the dataset's annotations hold.

    Raises:
        DataError: a number outside of its range.
    """

    threshold: float = 0.5
    max_overlap: float = MAX_OVERLAP_OF_OTHERS
    min_size: float = 1.0
    weight: float | None = None
    known_descs: bool = False

    def __post_init__(self) -> None:
        ranges = {"threshold": (0.001, 1), "max_overlap": (0, 1), "min_size": (0, 100), "weight": (0.001, 1)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise DataError(f"{name} is {value:g}; expected {low} to {high}")


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Who found the added objects: the checkpoint's folder, and the fingerprint of what lay in it."""

    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Completed:
    """A record with its soft objects; ``fates`` by prediction; ``scores`` of those added, which stand last in the
    record, in this order."""

    record: ImageRecord
    fates: tuple[Fate, ...]
    scores: tuple[float, ...]

    @property
    def added(self) -> tuple[GTObject, ...]:
        """The objects that this completion added."""
        return self.record.objects[len(self.record.objects) - len(self.scores) :]


@dataclass(frozen=True, slots=True)
class CompletionCounts:
    """``annotated``, ``soft``: objects before; ``fates`` of ``predicted`` objects; ``classes`` of those added;
    ``dropped``: entries that the parser could not use, by reason; ``answered``: images with a prediction."""

    images: int = 0
    answered: int = 0
    truncated: int = 0
    annotated: int = 0
    soft: int = 0
    predicted: int = 0
    fates: Counter[Fate] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """The counts for machines; every fate is named."""
        return {
            "images": self.images,
            "images_with_predictions": self.answered,
            "truncated_answers": self.truncated,
            "annotated": self.annotated,
            "soft_before": self.soft,
            "predicted": self.predicted,
            "fates": {fate.value: self.fates[fate] for fate in Fate},
            "added_by_class": dict(self.classes.most_common()),
            "dropped_entries": dict(self.dropped),
        }


def complete_records(
    records: Sequence[ImageRecord], answers: Mapping[str, ImageAnswer], rules: CompletionRules, origin: ModelOrigin
) -> tuple[list[Completed], CompletionCounts]:
    """Add what ``answers`` (by sample id, with confidences as scores) hold and ``records`` lack, in their order.

    Raises:
        DataError: an image without an answer, an answer for another image, or metadata that is in the way.
    """
    known = {obj.desc for record in records for obj in record.objects if obj.soft is None}
    done = [_complete(record, _answer_of(record, answers), rules, origin, known) for record in records]
    of = [answers[record.sample_id] for record in records]
    objects = [obj for record in records for obj in record.objects]
    soft = sum(obj.soft is not None for obj in objects)
    counts = CompletionCounts(
        images=len(records),
        answered=sum(bool(answer.pred) for answer in of),
        truncated=sum(answer.truncated for answer in of),
        annotated=len(objects) - soft,
        soft=soft,
        predicted=sum(len(answer.pred) for answer in of),
        fates=Counter(fate for item in done for fate in item.fates),
        classes=Counter(obj.desc for item in done for obj in item.added),
        dropped=sum((Counter(dict(answer.dropped)) for answer in of), Counter()),
    )
    assert counts.fates.total() == counts.predicted, "a prediction went uncounted"
    return done, counts


def most_likely_missed(done: Sequence[Completed], count: int) -> list[ImageRecord]:
    """The records of the most confident added objects, each once; added objects carry their confidence in the
    description, for a picture."""
    completed = [item for item in done if item.scores]
    completed.sort(key=lambda item: -max(item.scores))
    return [_labelled(item) for item in completed[:count]]


def _labelled(item: Completed) -> ImageRecord:
    named = [replace(obj, desc=f"{obj.desc} {score:.2f}") for obj, score in zip(item.added, item.scores, strict=True)]
    before = item.record.objects[: len(item.record.objects) - len(named)]
    return replace(item.record, objects=(*before, *named))


def _answer_of(record: ImageRecord, answers: Mapping[str, ImageAnswer]) -> ImageAnswer:
    answer = answers.get(record.sample_id)
    if answer is None:
        raise DataError(f"{record.sample_id}: has no answer; answer every image of the dataset first")
    if answer.image != str(record.image):
        raise DataError(
            f"{record.sample_id}: is {record.image} now, but the answer is for {answer.image}; remove the saved "
            "answers, so that the dataset as it is now is answered"
        )
    return answer


def _complete(
    record: ImageRecord, answer: ImageAnswer, rules: CompletionRules, origin: ModelOrigin, known: set[str]
) -> Completed:
    fates: list[Fate | None] = [None] * len(answer.pred)
    # A pair that overlaps more than is allowed is one object; a gate is passed by what is exactly at it.
    gate = min(1.0, float(np.nextafter(rules.max_overlap, 2.0)))
    for pair in match_objects(answer.pred, record.objects, MatchingConfig(maskiou_gate=gate)).pairs:
        fates[pair.pred_idx] = Fate.MATCHED
    annotated = [obj for obj in record.objects if obj.soft is None]
    soft = [obj for obj in record.objects if obj.soft is not None]
    added: list[int] = []
    for i in sorted(range(len(answer.pred)), key=lambda i: -_score(answer, i)):  # stable: equal ones as written
        if fates[i] is None:
            others = {
                Fate.OVERLAPS_ANNOTATED: annotated,
                Fate.OVERLAPS_SOFT: soft,
                Fate.OVERLAPS_ADDED: [answer.pred[j] for j in added],
            }
            fate = next(_refusals(answer.pred[i], _score(answer, i), rules, known, others), Fate.ADDED)
            fates[i] = fate
            if fate is Fate.ADDED:
                added.append(i)
    judged = tuple(fate for fate in fates if fate is not None)
    kept = sorted(added)
    objects = record.objects + tuple(_soft_object(answer.pred[i], _score(answer, i), rules) for i in kept)
    scores = tuple(round(_score(answer, i), 4) for i in kept)
    noted = _with_provenance(record, len(record.objects), scores, judged, rules, origin)
    return Completed(replace(record, objects=objects, metadata=noted), judged, scores)


def _score(answer: ImageAnswer, i: int) -> float:
    score = answer.pred[i].score
    if score is None:
        raise DataError(f"{answer.sample_id}: {answer.pred[i].desc!r} has no score, so nothing says how sure it is")
    return score


def _refusals(
    detection: Detection, score: float, rules: CompletionRules, known: set[str], others: Mapping[Fate, Sequence[Shape]]
) -> Iterator[Fate]:
    """Why a prediction without a partner is not added."""
    if score < rules.threshold:
        yield Fate.BELOW_THRESHOLD
    x1, y1, x2, y2 = aabb(detection)
    if x1 == x2 or y1 == y2 or 100 * ((x2 - x1) * (y2 - y1)) ** 0.5 / (NUM_BINS - 1) < rules.min_size:
        yield Fate.TOO_SMALL
    if not _may_be_written(detection.desc):
        yield Fate.REFUSED_DESC
    elif rules.known_descs and clean_desc(detection.desc) not in known:
        yield Fate.UNKNOWN_DESC
    for fate, objects in others.items():
        if any(mask_iou(detection, other) > rules.max_overlap for other in objects):
            yield fate


def _may_be_written(desc: str) -> bool:
    try:
        clean_desc(desc)
    except ValueError:
        return False
    return True


def _soft_object(detection: Detection, score: float, rules: CompletionRules) -> GTObject:
    weight = min(1.0, round(score, 4)) if rules.weight is None else rules.weight
    return GTObject(clean_desc(detection.desc), detection.kind, detection.bins, weight)


def _with_provenance(
    record: ImageRecord,
    first: int,
    scores: Sequence[float],
    fates: Sequence[Fate],
    rules: CompletionRules,
    origin: ModelOrigin,
) -> dict[str, Any]:
    earlier = record.metadata.get(PROVENANCE, [])
    if not isinstance(earlier, list):
        raise DataError(f"{record.sample_id}: metadata.{PROVENANCE} is no list of completions; rename that field")
    refused = Counter(fate.value for fate in fates if fate not in (Fate.ADDED, Fate.MATCHED))
    entry = {
        "model": origin.model,
        "fingerprint": origin.fingerprint,
        "threshold": rules.threshold,
        "max_overlap": rules.max_overlap,
        "added": [{"object": first + k, "score": score} for k, score in enumerate(scores)],
        "refused": dict(refused),
    }
    return {**record.metadata, PROVENANCE: [*earlier, entry]}
