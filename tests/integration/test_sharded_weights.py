"""Adapters, coordinate rows and the learner's weights where a model is replicated or split over two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.torchrun import torchrun

TESTS = Path(__file__).parents[1]
CLAIMS = [
    ("ddp gradients", "every trained weight reaches DDP's reducer, also recomputed, and gets both ranks' mean"),
    ("fsdp weights", "gathered and merged, the shards are the unsharded model's merged weights, bit for bit"),
    ("fsdp adapter", "an adapter push carries whole tensors"),
    ("shards untouched", "reading them changes no shard"),
    ("fsdp gradients", "the offset's hooks see gathered parameters, and its gradient is reduced"),
    ("fsdp untied head", "the loss reads the weight of a head that is a unit of its own, and its gradient is reduced"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("sharded")
    done = torchrun(Path(__file__).with_name("sharded_worker.py"), folder)
    assert done.returncode == 0, done.output[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("claim", "reason"), CLAIMS)
def test_it_holds_on_both_ranks(claim: str, reason: str, ranks: list[dict]) -> None:
    assert [rank[claim] for rank in ranks] == [True, True], reason


def test_a_source_says_whether_reading_it_is_collective(ranks: list[dict]) -> None:
    assert [rank["collective"] for rank in ranks] == [[False, True], [False, True]]


def test_adapters_saved_from_gathered_shards_load_into_a_whole_model(ranks: list[dict]) -> None:
    assert ranks[0]["saved adapter"] is True
