"""Two ranks share an epoch of weighted files: each sample on one of them, and together what one process would read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from coordexp import distributed
from coordexp.data.dataset import RecordDataset
from coordexp.data.epochs import EpochPlan
from coordexp.records import ImageRecord, RolloutRequest
from coordexp.training.batches import StepBatches
from support.torchrun import results_of_two

RECORDS = [ImageRecord(f"s{i}", Path(f"{i}.png"), 64, 64, ()) for i in range(8)]
FACTORS = np.array([0.5, 0.5, 0.5, 0.5, 2.0, 2.0, 1.0, 1.0])


def epochs() -> list[list[list[str]]]:
    """The sample ids of the batches of two epochs, on this rank."""
    dataset = RecordDataset(RECORDS, lambda record: RolloutRequest(record.sample_id, record.image, (), (1,)))
    plan = EpochPlan(FACTORS, [4, 4], 3)
    batches = StepBatches(dataset, batch_size=2, accumulation_steps=1, seed=3, num_workers=0, plan=plan)
    steps = batches.steps_per_epoch
    return [
        [[sample.record.sample_id for sample in batch] for _ in range(steps) for batch in batches.take()]
        for _ in range(2)
    ]


def write_share(folder: Path) -> None:
    distributed.join(use_cpu=True)
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(epochs()), encoding="utf-8")


def test_two_ranks_read_disjoint_shares_of_the_order_of_one_process(tmp_path: Path) -> None:
    alone = epochs()
    for whole, first, second in zip(alone, *results_of_two(tmp_path, write_share, tmp_path), strict=True):
        assert [batch for pair in zip(first, second, strict=True) for batch in pair] == whole
        assert sum(map(len, whole)) == 8
