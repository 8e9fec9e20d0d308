"""The order in which a run reads its samples."""

from __future__ import annotations

from pathlib import Path

import torch

from coordexp.data.dataset import RecordDataset
from coordexp.records import ImageRecord, RolloutRequest
from coordexp.training.batches import StepBatches

RECORDS = [ImageRecord(f"s{i}", Path(f"{i}.png"), 64, 64, ()) for i in range(7)]


def request(record: ImageRecord) -> RolloutRequest:
    return RolloutRequest(record.sample_id, record.image, (), (1, 2))


def batches_from(step: int) -> StepBatches:
    dataset = RecordDataset(RECORDS, request)
    batches = StepBatches(dataset, batch_size=2, accumulation_steps=2, seed=3, num_workers=0)
    batches.start(step)
    return batches


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


def test_reading_from_any_step_continues_the_order() -> None:
    whole = batches_from(0)
    steps = [taken(whole) for _ in range(5)]
    for first in range(5):
        later = batches_from(first)
        assert [taken(later) for _ in range(first, 5)] == steps[first:]
