"""Evaluation over a dataset: every sample once, in batches, dealt over ranks."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from answers import CAT, DOG, record, request
from coordexp import distributed
from coordexp.coords import serialize_objects
from coordexp.data.dataset import RecordDataset
from coordexp.evaluation import evaluate_dataset
from coordexp.records import GTObject, Rollout, RolloutRequest
from coordexp.rollouts import Answer, RolloutRound, SeedContext, in_turn
from qwen_tokenizer import qwen_vocab


class Scripted:
    """A backend that answers each sample with a given text, and remembers what it was asked."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.batches: list[tuple[list[str], SeedContext]] = []

    def generate(self, requests: Sequence[RolloutRequest], seeds: SeedContext) -> list[Rollout]:
        self.batches.append(([r.sample_id for r in requests], seeds))
        vocab = qwen_vocab()
        return [
            Rollout(r.sample_id, r.prompt_token_ids, tuple(vocab.encode(text)), text, truncated=False)
            for r in requests
            for text in [self.texts[r.sample_id]]
        ]

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[Answer]:
        return in_turn(self.generate, rounds)

    def sync_weights(self, version: int) -> None: ...

    def rest(self) -> None: ...

    def last_report(self) -> dict[str, Any]:
        return {}

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


def dataset(scenes: list[list[GTObject]]) -> RecordDataset:
    return RecordDataset([record(objects, f"s{i}") for i, objects in enumerate(scenes)], request, "file")


def test_every_sample_is_answered_once_in_batches():
    scenes = [[CAT], [DOG], [CAT, DOG], [], [DOG]]
    backend = Scripted({f"s{i}": serialize_objects(objects) for i, objects in enumerate(scenes)})
    seen = []
    figures, predictions = evaluate_dataset(
        dataset(scenes), backend, qwen_vocab(), batch_size=2, seed=7, global_step=30,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [ids for ids, _ in backend.batches] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert [seeds for _, seeds in backend.batches] == [SeedContext(7, 30, i, 0) for i in range(3)]
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert [p.record.sample_id for p in predictions] == ["s0", "s1", "s2", "s3", "s4"]
    assert figures["f1"] == figures["precision"] == figures["recall"] == 1
    assert (figures["images"], figures["gt_objects"]) == (5, 5)
    # A reported stop counts, though its token is trimmed.
    assert figures["truncated_rate"] == 0 and not any(p.parsed.truncated for p in predictions)


def test_figures_are_global_and_predictions_are_this_ranks(monkeypatch):
    scenes = [[CAT], [DOG], [CAT], [DOG], [CAT]]
    texts = {f"s{i}": serialize_objects(objects) if i % 2 else "{}" for i, objects in enumerate(scenes)}
    parts = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "world_size", lambda: 2)
        monkeypatch.setattr(distributed, "together", lambda where: nullcontext())
        monkeypatch.setattr(distributed, "gather_json", lambda mine: parts.append(mine) or [*parts])
        figures, predictions = evaluate_dataset(dataset(scenes), Scripted(texts), qwen_vocab(), batch_size=8, seed=0)
        assert [p.record.sample_id for p in predictions] == [["s0", "s2", "s4"], ["s1", "s3"]][rank]
    assert (figures["images"], figures["gt_objects"], figures["matched_objects"]) == (5, 5, 2)
    assert figures["recall"] == pytest.approx(0.4)
