"""Completion: the outcome of each prediction and the completed record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.tiles import Tiling
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.inference.completion import (
    Completed,
    CompletionCounts,
    CompletionRules,
    PredictionOutcome,
    complete_records,
    most_likely_missed,
)
from coordexp.records import GTObject, ImageRecord

ORIGIN = {"model": "models/start", "fingerprint": "0123456789abcdef"}
CUP = GTObject("cup", "bbox_2d", (0, 0, 200, 200))
SOFT_JUG = GTObject("jug", "bbox_2d", (700, 700, 900, 900), 0.6)


def record(*objects: GTObject, number: int = 1, **metadata: Any) -> ImageRecord:
    return ImageRecord(f"s.jsonl:{number}", Path(f"/data/{number}.png"), 64, 64, objects, metadata)


DEFAULTS = CompletionRules()


def completed(
    record: ImageRecord, *pred: ScoredObject, rules: CompletionRules = DEFAULTS, **answer: Any
) -> tuple[Completed, CompletionCounts]:
    found = ImageAnswer(
        record.sample_id, answer.pop("image", str(record.image)), 64, 64, record.objects, pred, **answer
    )
    (done,), counts = complete_records([record], {record.sample_id: found}, rules, ORIGIN)
    return done, counts


def box(x: int, y: int, side: int = 100, score: float | None = 0.9, desc: str = "cup") -> ScoredObject:
    return ScoredObject(desc, "bbox_2d", (x, y, x + side, y + side), score)


def test_each_prediction_has_one_outcome_and_is_counted_by_it() -> None:
    cases = [
        (box(10, 10, 180), PredictionOutcome.MATCHED),
        (box(20, 20, 170), PredictionOutcome.OVERLAPS_ANNOTATED),
        (box(300, 0, score=0.4999), PredictionOutcome.BELOW_THRESHOLD),
        (box(300, 0, 9), PredictionOutcome.TOO_SMALL),
        (box(300, 0, desc="a<|im_end|>b"), PredictionOutcome.REFUSED_DESC),
        (box(300, 0, desc="mug"), PredictionOutcome.UNKNOWN_DESC),
        (box(710, 710, 180, desc="cup"), PredictionOutcome.MATCHED),
        (box(720, 720, 160, desc="cup"), PredictionOutcome.OVERLAPS_SOFT),
        (box(300, 400, score=0.7), PredictionOutcome.OVERLAPS_ADDED),  # the higher score is added first, in any order
        (box(310, 410, score=0.8), PredictionOutcome.ADDED),
        (box(500, 400, score=0.5), PredictionOutcome.ADDED),
    ]
    before = record(CUP, SOFT_JUG)
    done, counts = completed(before, *(pred for pred, _ in cases), rules=CompletionRules(known_descs=True))
    assert list(done.outcomes) == [outcome for _, outcome in cases]
    assert done.record.objects == (
        CUP, SOFT_JUG,
        GTObject("cup", "bbox_2d", (310, 410, 410, 510), 0.8), GTObject("cup", "bbox_2d", (500, 400, 600, 500), 0.5),
    )  # fmt: skip
    assert sum(counts.outcomes.values()) == counts.predicted == len(cases)
    assert (counts.annotated, counts.soft_before, counts.added_by_class) == (1, 1, {"cup": 2})


def test_overlap_is_allowed_up_to_its_limit() -> None:
    shifted = box(100, 0, 200)  # half of CUP: a third of the union
    for limit, outcome in [(0.3, PredictionOutcome.MATCHED), (0.34, PredictionOutcome.ADDED)]:
        done, _ = completed(record(CUP), shifted, rules=CompletionRules(max_overlap=limit))
        assert done.outcomes == (outcome,)


def test_a_fixed_weight_and_the_thresholds_are_kept_with_the_record(tmp_path: Path) -> None:
    rules = CompletionRules(threshold=0.6, weight=0.25)
    done, _ = completed(record(CUP, source="camera"), box(500, 500), box(300, 0, score=0.1), rules=rules)
    assert [obj.soft for obj in done.record.objects] == [None, 0.25]
    assert done.record.metadata["source"] == "camera"
    (entry,) = done.record.metadata["completion"]
    assert entry == {
        "model": "models/start", "fingerprint": "0123456789abcdef", "threshold": 0.6, "max_overlap": 0.2,
        "added": [{"object": 1, "score": 0.9}], "refused": {"below_threshold": 1},
    }  # fmt: skip
    write_jsonl([done.record], tmp_path / "s.jsonl")
    (read,) = read_jsonl(tmp_path / "s.jsonl")
    assert read.objects == done.record.objects and read.metadata == done.record.metadata
    again, _ = completed(done.record, box(500, 500), box(300, 0))
    assert (
        again.outcomes == (PredictionOutcome.MATCHED, PredictionOutcome.ADDED)
        and len(again.record.metadata["completion"]) == 2
    )
    assert again.record.metadata["completion"][1]["added"] == [{"object": 2, "score": 0.9}]


def test_merged_tiles_add_what_is_left_after_rounding_and_once() -> None:
    def shape(*bins: float, kind: Any = "bbox_2d") -> ScoredObject:
        return ScoredObject("cup", kind, bins, 0.9)

    cases = [
        (shape(500.6, 500.6, 501.4, 502.4), PredictionOutcome.TOO_SMALL),  # without a side in whole bins
        (shape(10.4, 10.1, 11.6, 10.9, 11.6, 12.4, kind="poly"), PredictionOutcome.ADDED),
        (shape(20.1, 20.1, 21.4, 21.4, 22.4, 22.4, kind="poly"), PredictionOutcome.TOO_SMALL),
        (shape(30.45, 30, 30.55, 34), PredictionOutcome.ADDED),
    ]
    tiles = Tiling(1, 1)
    first, _ = completed(record(), *(pred for pred, _ in cases), tiling=tiles)
    assert first.outcomes == tuple(outcome for _, outcome in cases)
    assert [obj.bins for obj in first.added] == [(10, 10, 12, 11, 12, 12), (30, 30, 31, 34)]
    again, _ = completed(first.record, *(pred for pred, _ in cases), tiling=tiles)
    assert again.outcomes.count(PredictionOutcome.MATCHED) == 2 and not again.added


def test_an_answer_for_another_image_is_refused() -> None:
    with pytest.raises(DataError, match=r"s\.jsonl:1: .*/data/1\.png.*/data/other\.png"):
        completed(record(CUP), image="/data/other.png")
    with pytest.raises(DataError, match="has no answer"):
        complete_records([record(CUP)], {}, CompletionRules(), ORIGIN)
    with pytest.raises(DataError, match="has no score"):
        completed(record(CUP), box(500, 500, score=None))
    with pytest.raises(DataError, match=r"metadata\.completion"):
        completed(record(CUP, completion="mine"))


@pytest.mark.parametrize("rule", [{"threshold": 0.0}, {"max_overlap": 1.5}, {"min_size": -1}, {"weight": 0.0}])
def test_rules_out_of_range_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"{next(iter(rule))} is .*expected"):
        CompletionRules(**rule)


def test_most_likely_missed_objects_are_shown_first() -> None:
    done = [completed(record(CUP, number=n), box(500, 500, score=s))[0] for n, s in enumerate((0.6, 0.9, 0.3, 0.7))]
    shown = most_likely_missed(done, 2)
    assert [r.objects[1] for r in shown] == [
        replace(done[n].record.objects[1], desc=f"cup {score}") for n, score in ((1, "0.90"), (3, "0.70"))
    ]
