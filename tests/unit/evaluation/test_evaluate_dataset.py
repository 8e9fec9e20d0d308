"""Evaluation over a dataset: every sample once, in batches, dealt over ranks."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from coordexp import distributed
from coordexp.coords import serialize_objects
from coordexp.data.dataset import RecordDataset
from coordexp.errors import AlignmentError
from coordexp.evaluation.answers import answer_dataset, share_out, to_line
from coordexp.evaluation.summary import COUNTS_ONLY, summarise
from coordexp.records import GTObject, Rollout, RolloutRequest
from coordexp.rollouts.backend import DatasetSeeds, Seeds
from support.answers import CAT, DOG, record, request
from support.qwen_tokenizer import qwen_vocab
from support.tiny_run import QuietBackend


class Scripted(QuietBackend):
    """A backend that answers each sample with a given text and records its calls."""

    def __init__(self, texts: dict[str, str], batch_size: int = 3) -> None:
        self.texts, self.batch_size = texts, batch_size
        self.batches: list[tuple[list[str], Seeds]] = []

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any = None, on_answer: Any = None) -> list[Rollout]:
        self.batches.append(([r.sample_id for r in requests], seeds))
        vocab = qwen_vocab()
        for answers in range(1, len(requests) + 1):
            if on_answer is not None:
                on_answer(answers)
        return [
            Rollout(r.sample_id, r.prompt_token_ids, tuple(vocab.encode(text)), text, truncated=False)
            for r in requests
            for text in [self.texts[r.sample_id]]
        ]


class OtherPrompt(QuietBackend):
    """Reports another prompt than it was given, like an engine that resizes images by its own rules."""

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any = None, on_answer: Any = None) -> list[Rollout]:
        return [Rollout(r.sample_id, (*r.prompt_token_ids, 1), (), "", False) for r in requests]


def test_an_answer_to_another_prompt_is_refused() -> None:
    with pytest.raises(AlignmentError, match=r"s0: .*token"):
        answer_dataset(dataset([[CAT]]), OtherPrompt(), qwen_vocab(), seed=0)


def dataset(scenes: list[list[GTObject]]) -> RecordDataset:
    return RecordDataset([record(objects, f"s{i}") for i, objects in enumerate(scenes)], request, "file")


def test_every_sample_is_answered_once_in_batches():
    scenes = [[CAT], [DOG], [CAT, DOG], [], [DOG]]
    backend = Scripted({f"s{i}": serialize_objects(objects) for i, objects in enumerate(scenes)}, 2)
    seen = []
    predictions = answer_dataset(
        dataset(scenes), backend, qwen_vocab(), seed=7,
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [ids for ids, _ in backend.batches] == [["s0", "s1"], ["s2", "s3"], ["s4"]]
    assert [seeds for _, seeds in backend.batches] == [DatasetSeeds(7, first) for first in (0, 2, 4)]
    assert seen == [(0, 5), (2, 5), (4, 5), (5, 5)]  # the first, so that a bar shows before a batch is done
    assert [answer.sample_id for answer in predictions] == ["s0", "s1", "s2", "s3", "s4"]
    figures = summarise(predictions, COUNTS_ONLY).figures
    assert figures["f1"] == figures["precision"] == figures["recall"] == 1
    assert (figures["images"], figures["gt_objects"]) == (5, 5)
    # A reported stop counts, though its token is trimmed.
    assert figures["truncated_rate"] == 0 and not any(answer.dropped for answer in predictions)


def test_progress_is_reported_within_a_batch():
    """But its last one: that is there when all of them are read and scored."""
    scenes = [[CAT]] * 8
    backend = Scripted({f"s{i}": serialize_objects(objects) for i, objects in enumerate(scenes)})
    seen = []
    answer_dataset(
        dataset(scenes), backend, qwen_vocab(), seed=7,
        on_progress=lambda done, total: seen.append(("between", done, total)),
        on_answer=lambda done, total: seen.append(("within", done, total)),
    )  # fmt: skip
    told = list(dict.fromkeys(seen))
    assert told == [
        ("between", 0, 8), ("within", 1, 8), ("within", 2, 8),
        ("between", 3, 8), ("within", 4, 8), ("within", 5, 8),
        ("between", 6, 8), ("within", 7, 8),
        ("between", 8, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("positions", "world_size", "batch_size", "shares"),
    [
        (range(5), 1, 2, [[range(0, 2), range(2, 4), range(4, 5)]]),
        (range(5), 2, 8, [[range(0, 3)], [range(3, 5)]]),  # a small set is for all ranks too
        (range(9), 2, 2, [[range(0, 2), range(4, 6), range(8, 9)], [range(2, 4), range(6, 8), range(0)]]),
        ([0, 1, 4, 5, 6], 1, 2, [[range(0, 2), range(4, 6), range(6, 7)]]),  # 2 and 3 were answered before
        ([3], 3, 4, [[range(3, 4)], [range(0)], [range(0)]]),
        ([], 2, 4, [[], []]),
    ],
    ids=str,
)
def test_batches_are_contiguous_and_ranks_make_equally_many_calls(
    positions: Sequence[int], world_size: int, batch_size: int, shares: list[list[range]]
):
    assert share_out(positions, world_size, batch_size) == shares


@pytest.mark.parametrize(
    ("world_size", "batch_size", "count"), [(1, 4, 1), (2, 3, 1), (3, 2, 1), (4, 8, 1), (2, 4, 2), (3, 4, 2)]
)
def test_each_rank_answers_its_share_and_has_all_answers_in_order(
    world_size: int, batch_size: int, count: int, monkeypatch
):
    """``count`` answers for each sample, a batch has as many."""
    data, backend = dataset([[CAT]] * 11), Scripted({f"s{i}": "{}" for i in range(11)}, batch_size)
    alone = answer_dataset(data, backend, qwen_vocab(), seed=0, count=count)
    assert [answer.sample_id for answer in alone] == [f"s{i}" for i in range(11) for _ in range(count)]
    shares = share_out(range(11), world_size, batch_size // count)
    parts = [[to_line(alone[count * i + k]) for batch in share for i in batch for k in range(count)]
             for share in shares]  # fmt: skip
    monkeypatch.setattr(distributed, "world_size", lambda: world_size)
    monkeypatch.setattr(distributed, "raise_on_all_ranks", lambda where: nullcontext())
    for rank in range(world_size):
        sent = []
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(distributed, "gather_json", lambda mine, sent=sent: sent.append(mine) or parts)
        assert answer_dataset(data, backend, qwen_vocab(), seed=0, count=count) == alone
        assert sent == [parts[rank]]
