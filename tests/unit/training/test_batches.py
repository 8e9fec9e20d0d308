"""The samples of each step, and its channel: exact over ten thousand steps, a function of nothing but the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from decimal import ROUND_FLOOR, Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordexp import distributed
from coordexp.data.dataset import RecordDataset
from coordexp.data.epochs import EpochPlan
from coordexp.records import ImageRecord, RolloutRequest
from coordexp.training.batches import ChannelSchedule, StepBatches

STEPS = 10_000
RATIOS = ["0.0", "0.1", "0.29", "0.333", "0.333333333333333", "0.5", "0.57", "0.95", "1.0", "0.00001"]


def by_definition(ratio: str) -> list[str]:
    """⌊(s+1)·b⌋ > ⌊s·b⌋ in decimal arithmetic of sixty digits, on the number as typed."""
    with localcontext() as context:
        context.prec = 60
        floors = [(Decimal(s) * Decimal(ratio)).to_integral_value(ROUND_FLOOR) for s in range(STEPS + 1)]
    return ["B" if after > before else "A" for before, after in pairwise(floors)]


@pytest.mark.parametrize("ratio", RATIOS)
def test_ten_thousand_steps_follow_the_definition_on_the_typed_decimal(ratio: str) -> None:
    schedule = ChannelSchedule.from_ratio(float(ratio))
    channels = [schedule.channel(step) for step in range(STEPS)]
    assert channels == by_definition(ratio)
    assert channels.count("B") == int(STEPS * Fraction(ratio)) == schedule.b_steps_before(STEPS)


@given(thousandths=st.integers(0, 1000), start=st.integers(0, 10**9), length=st.integers(0, 200))
def test_any_stretch_of_steps_is_within_one_step_of_its_share(thousandths: int, start: int, length: int) -> None:
    schedule = ChannelSchedule.from_ratio(thousandths / 1000)
    stretch = [schedule.channel(step) for step in range(start, start + length)].count("B")
    assert abs(stretch - length * Fraction(thousandths, 1000)) < 1
    assert stretch == schedule.b_steps_before(start + length) - schedule.b_steps_before(start)


def test_the_realised_share_counts_the_steps_so_far() -> None:
    schedule = ChannelSchedule.from_ratio(0.5)
    assert [schedule.realised(step) for step in range(4)] == [0.0, 0.5, pytest.approx(1 / 3), 0.5]


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan"), float("inf")])
def test_an_invalid_share_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError):
        ChannelSchedule.from_ratio(ratio)


# -- the order in which a run reads its samples ------------------------------------------------------------------------


def request(record: ImageRecord) -> RolloutRequest:
    return RolloutRequest(record.sample_id, record.image, (), (1, 2))


def batches_from(step: int, count: int = 7, accumulation_steps: int = 2, plan: EpochPlan | None = None) -> StepBatches:
    records = [ImageRecord(f"s{i}", Path(f"{i}.png"), 64, 64, ()) for i in range(count)]
    batches = StepBatches(
        RecordDataset(records, request), batch_size=2, accumulation_steps=accumulation_steps, seed=3, num_workers=0,
        plan=plan,
    )  # fmt: skip
    batches.start(step)
    return batches


def planned_from(step: int) -> StepBatches:
    """Seven records of two files; an epoch has the first four one and a half times, the others twice."""
    return batches_from(step, plan=EpochPlan(np.array([1.5, 1.5, 1.5, 1.5, 2.0, 2.0, 2.0]), [4, 3], 3))


def ids(step_batches: list[list[str]]) -> list[str]:
    return [sample_id for batch in step_batches for sample_id in batch]


def taken(batches: StepBatches) -> list[list[str]]:
    return [[sample.record.sample_id for sample in batch] for batch in batches.take()]


def test_each_epoch_is_a_permutation_seeded_by_seed_and_epoch() -> None:
    batches = batches_from(0)
    assert batches.steps_per_epoch == 2
    for epoch in range(3):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
        assert ids(taken(batches)) + ids(taken(batches)) == [f"s{i}" for i in order]


def test_a_weighted_epoch_has_the_samples_of_its_plan_in_a_new_order() -> None:
    batches = planned_from(0)
    assert batches.steps_per_epoch == 3  # twelve samples, four per step
    epochs = [[one for _ in range(3) for one in ids(taken(batches))] for _ in range(2)]
    for seen in epochs:
        counts = Counter(seen)
        assert [counts[f"s{k}"] for k in (4, 5, 6)] == [2, 2, 2]
        assert sorted(counts[f"s{k}"] for k in range(4)) == [1, 1, 2, 2]
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert batches.epoch_after(3) == 1.0


@pytest.mark.parametrize(
    ("count", "accumulation_steps", "sizes"),
    [(7, 3, [[2, 2, 2], [1]]), (7, 4, [[2, 2, 2, 1]]), (7, 5, [[2, 2, 2, 1]]), (11, 4, [[2, 2, 2, 2], [2, 1]])],
)
def test_the_last_step_of_an_epoch_reads_all_that_is_left(
    count: int, accumulation_steps: int, sizes: list[list[int]]
) -> None:
    """In batches of two samples, of which it may have several."""
    batches = batches_from(0, count, accumulation_steps)
    steps = [taken(batches) for _ in range(batches.steps_per_epoch)]
    assert [[len(batch) for batch in step] for step in steps] == sizes
    assert sorted(name for step in steps for name in ids(step)) == sorted(f"s{k}" for k in range(count))


def test_every_rank_reads_its_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples on two ranks: together they read each of them once."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_reduce", lambda values, how: [float(value) for value in values])
    seen = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        batches = batches_from(0, count=8)
        seen.append([one for _ in range(batches.steps_per_epoch) for one in ids(taken(batches))])
    assert [len(one) for one in seen] == [4, 4]
    assert sorted(seen[0] + seen[1]) == [f"s{k}" for k in range(8)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batches_at", [batches_from, planned_from], ids=["plain", "weighted"])
def test_samples_of_a_number_of_steps_are_those_that_all_ranks_read(
    batches_at: Callable[[int], StepBatches], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    monkeypatch.setattr(distributed, "all_reduce", lambda values, how: [float(value) for value in values])
    read = [0] * 7
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        batches = batches_at(0)
        for step in range(7):
            read[step] += len(ids(taken(batches)))
    assert [batches_at(0).samples_before(step) for step in range(8)] == [sum(read[:step]) for step in range(8)]


@pytest.mark.parametrize("batches_at", [batches_from, planned_from], ids=["plain", "weighted"])
def test_reading_from_any_step_continues_the_order(batches_at: Callable[[int], StepBatches]) -> None:
    whole = batches_at(0)
    steps = [taken(whole) for _ in range(5)]
    for first in range(5):
        later = batches_at(first)
        assert [taken(later) for _ in range(first, 5)] == steps[first:]
