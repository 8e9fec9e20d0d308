"""Objects that a run loses and gains since its first evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordexp.evaluation.answers import ImageAnswer, ScoredObject, read_answers
from coordexp.evaluation.compare import changed_rates, compare
from coordexp.records import GTObject
from coordexp.training.watches import RunLedger
from support.answers import CAT, DOG

GHOST = GTObject("ghost", "bbox_2d", (800, 10, 900, 90))


def answers(*found: GTObject, truth: tuple[GTObject, ...] = (CAT, DOG)) -> list[ImageAnswer]:
    pred = tuple(ScoredObject(obj.desc, obj.kind, obj.bins, 1.0) for obj in found)
    return [ImageAnswer("s", "a.png", 640, 480, truth, pred)]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def ledger(tmp_path: Path, notes: list[str]) -> RunLedger:
    return RunLedger(tmp_path, notes.append)


def test_later_evaluations_are_compared_with_the_first(ledger: RunLedger) -> None:
    assert ledger.rates(answers(CAT), is_first=True) == {}

    def of_one_image(lost: float, gained: float, false_gained: float) -> dict[str, float]:
        shares = {"lost": lost, "gained": gained, "false_gained": false_gained}
        return {f"{name}_rate{end}": share for name, share in shares.items() for end in ("", "_low", "_high")}

    assert ledger.rates(answers(CAT), is_first=False) == of_one_image(0, 0, 0)
    assert ledger.rates(answers(DOG, GHOST), is_first=False) == of_one_image(1, 1, 0.5)
    assert ledger.rates(answers(CAT, DOG), is_first=False) == of_one_image(0, 1, 0)


def test_of_a_share_of_nothing_nothing_is_known() -> None:
    nothing = {"lost_rate": 0.0, "lost_rate_low": 0.0, "lost_rate_high": 1.0}
    assert changed_rates([], []).items() >= nothing.items()
    rates = changed_rates(answers(), answers(CAT))
    assert rates.items() >= nothing.items() and rates["gained_rate_low"] == rates["gained_rate_high"] == 0.5


def test_resamples_without_the_only_object_do_not_count() -> None:
    first = [
        replace(one, sample_id=f"{n}") for n in range(3) for one in (answers(CAT) if n == 0 else answers(truth=()))
    ]
    later = [replace(one, pred=()) for one in first]
    rates = changed_rates(first, later)
    assert (rates["lost_rate"], rates["lost_rate_low"], rates["lost_rate_high"]) == (1.0, 1.0, 1.0)


def test_intervals_are_those_of_a_comparison() -> None:
    """Of 100 images, whose object the later evaluation misses in every fifth."""
    first = [replace(one, sample_id=f"{n}") for n in range(100) for one in answers(CAT)]
    later = [replace(one, sample_id=f"{n}") for n in range(100) for one in (answers(CAT) if n % 5 else answers(GHOST))]
    rates, ledger = changed_rates(first, later), compare(first, later).ledger
    assert rates["lost_rate"] == 0.2 and 0.1 < rates["lost_rate_low"] < 0.2 < rates["lost_rate_high"] < 0.3
    assert (rates["lost_rate_low"], rates["lost_rate_high"]) == ledger.lost.interval
    assert (rates["false_gained_rate_low"], rates["false_gained_rate_high"]) == ledger.false_gained.interval


def test_predictions_that_found_a_soft_object_are_of_no_share() -> None:
    """As in a comparison: they are neither right nor wrong."""
    truth = (CAT, replace(DOG, soft=0.5))
    first, later = answers(CAT, truth=truth), answers(CAT, DOG, GHOST, truth=truth)
    ledger = compare(first, later).ledger
    assert changed_rates(first, later)["false_gained_rate"] == ledger.false_gained.value == 0.5


def test_a_resumed_run_reads_its_first_evaluation(ledger: RunLedger, tmp_path: Path, notes: list[str]) -> None:
    ledger.rates(answers(CAT), is_first=True)
    assert RunLedger(tmp_path, notes.append).rates(answers(DOG), is_first=False)["lost_rate"] == 1.0
    assert notes == []


@pytest.mark.parametrize("damage", [None, '{"bin_rule": "pixel_centres"}\n', ""])
def test_without_a_first_evaluation_of_these_images_counting_starts_anew(
    damage: str | None, ledger: RunLedger, tmp_path: Path, notes: list[str]
) -> None:
    ledger.rates(answers(CAT, truth=(CAT,)), is_first=True)
    if damage is not None:
        (tmp_path / "first_evaluation.jsonl").write_text(damage)
    resumed = RunLedger(tmp_path, notes.append)
    assert resumed.rates(answers(DOG), is_first=False) == {}
    assert resumed.rates(answers(CAT), is_first=False)["lost_rate"] == 1.0
    (note,) = notes
    assert "first_evaluation.jsonl" in note and "from this evaluation on" in note
    assert ("best checkpoint" in note) == (damage is None)


def test_ranks_of_a_resumed_run_agree_however_late_one_is(tmp_path: Path, notes: list[str]) -> None:
    """The first rank writes the file that is missing; a later one must not take it for the run's first evaluation."""
    first, late = RunLedger(tmp_path, notes.append), RunLedger(tmp_path, notes.append)
    assert first.rates(answers(DOG), is_first=False) == {} == late.rates(answers(DOG), is_first=False)
    assert first.has_other_images == late.has_other_images


def test_a_new_run_replaces_the_first_evaluation_of_an_older_one(ledger: RunLedger, tmp_path: Path) -> None:
    ledger.rates(answers(CAT), is_first=True)
    RunLedger(tmp_path, print).rates(answers(DOG), is_first=True)
    (kept,) = read_answers(tmp_path / "first_evaluation.jsonl")
    assert [obj.desc for obj in kept.pred] == ["dog"]
