"""A step's rollouts: targets are built while others decode, a failure leaves a checkpoint, each round leaves a line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordexp import distributed
from coordexp.coords import TURN_END
from coordexp.data.dataset import Sample
from coordexp.errors import RolloutError
from coordexp.matching import MatchingConfig
from coordexp.modeling.load import LoadedModel
from coordexp.recording.writer import RolloutLog
from coordexp.records import Rollout
from coordexp.rollouts.backend import IndexedRollout, RolloutRound, SeedContext
from coordexp.training.step_answers import AnswerReader, RolloutQueue
from support.tiny_run import InMemoryBackend, prepare, run_config, task_of, tiny_samples, train


@pytest.fixture(scope="module")
def samples(loaded: LoadedModel) -> list[Sample]:
    return tiny_samples(loaded, 4)


class Staged(InMemoryBackend):
    """Answers the last request first, and continues only when that answer has been parsed."""

    def __init__(self, vocab: Any, built: threading.Event) -> None:
        super().__init__(vocab, lambda request: "{}" + TURN_END)
        self._built = built
        self.waited_for_target = False
        self.rested = 0

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        places = [(r, i) for r, one in enumerate(rounds) for i in range(len(one.requests))]
        for round_idx, index in reversed(places):
            (rollout,) = self.generate([rounds[round_idx].requests[index]], rounds[round_idx].seeds)
            yield IndexedRollout(round_idx, index, rollout)
            if not self.waited_for_target:
                self.waited_for_target = self._built.wait(20)

    def release(self) -> None:
        self.rested += 1


def queue_of(backend: InMemoryBackend, loaded: LoadedModel) -> RolloutQueue:
    return RolloutQueue(backend, AnswerReader(loaded.vocab, MatchingConfig()), 3)


def test_each_micro_step_and_rank_has_seeds_of_its_own(
    loaded: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-steps of step 5 on rank 2, training seed 3."""
    monkeypatch.setattr(distributed, "rank", lambda: 2)
    backend = InMemoryBackend(loaded.vocab, lambda request: "{}" + TURN_END)
    queue_of(backend, loaded).take([samples[:2], samples[2:]], 5, {})
    assert backend.seeds == [SeedContext(3, 5, 0, 2), SeedContext(3, 5, 1, 2)]


def test_answers_are_parsed_while_others_decode_and_keep_the_loaders_order(
    loaded: LoadedModel, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_one = threading.Event()
    backend = Staged(loaded.vocab, read_one)
    read = AnswerReader.__call__

    def read_and_tell(self: AnswerReader, sample: Sample, rollout: Rollout) -> Any:
        result = read(self, sample, rollout)
        read_one.set()
        return result

    monkeypatch.setattr(AnswerReader, "__call__", read_and_tell)
    metrics: dict[str, float] = {}
    answers = queue_of(backend, loaded).take([samples[:3], [], samples[3:]], 0, metrics)
    assert backend.waited_for_target and backend.rested == 1
    assert [[answer.rollout.sample_id for answer in batch] for batch in answers.by_micro_step] == [
        [s.record.sample_id for s in samples[:3]], [], [samples[3].record.sample_id],
    ]  # fmt: skip
    assert {"time/weight_sync_s", "time/rollout_wait_s"} <= metrics.keys()


class Reversed(InMemoryBackend):
    """Answers the last request first; request i of a window has 2 ** i tokens."""

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        places = [(r, i) for r, one in enumerate(rounds) for i in range(len(one.requests))]
        for number, (round_idx, index) in reversed(list(enumerate(places))):
            request = rounds[round_idx].requests[index]
            ids = (self._vocab.encode("a")[0],) * 2**number
            rollout = Rollout(request.sample_id, request.prompt_token_ids, ids, "a" * 2**number, False)
            yield IndexedRollout(round_idx, index, rollout)


@pytest.mark.scenario("Multi-server request distribution is deterministic")
def test_answers_in_any_order_become_the_segments_of_their_own_samples(
    loaded: LoadedModel, samples: list[Sample]
) -> None:
    task = task_of(loaded, Reversed(loaded.vocab, lambda request: ""), capacity=None)
    prepared, _ = prepare(task, [samples[:3], samples[3:]])
    outcomes, segments = prepared.outcomes, [row.segments for row in prepared.rows]
    assert [len(outcome.rollout.response_token_ids) for outcome in outcomes] == [1, 2, 4, 8]
    for sample, outcome in zip(samples, outcomes, strict=True):
        assert outcome.rollout.sample_id == sample.record.sample_id
    asked = [[sample.request.prompt_token_ids for sample in batch] for batch in (samples[:3], samples[3:])]
    assert [[segment.prompt_token_ids for segment in batch] for batch in segments] == asked


def test_the_99th_percentile_of_lengths_is_logged(loaded: LoadedModel, samples: list[Sample]) -> None:
    """For the lengths 1, 2, 4, 8 it is 2.97 steps up: between the third and the fourth."""
    _, metrics = prepare(task_of(loaded, Reversed(loaded.vocab, lambda request: ""), capacity=None), [samples])
    assert metrics["rollout/gen_new_tokens_p99"] == pytest.approx(4 + 0.97 * 4)


def test_nothing_is_saved_before_the_first_step(loaded: LoadedModel, tmp_path: Path) -> None:
    class Dead(InMemoryBackend):
        def sync_weights(self, version: int) -> None:
            raise RolloutError("no server")

    with pytest.raises(RolloutError, match="no server"):
        train(run_config(tmp_path, 2), Dead(loaded.vocab, lambda request: "{}"))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_resumed_run_leaves_each_step_once_and_loses_nothing(tmp_path: Path) -> None:
    """Killed in step 5, in the middle of a line; resumed from step 3."""
    first, report = RolloutLog(tmp_path, 0), {"by": "the killed one"}
    for step in range(5):
        first.write(step, report)
    with first.path.open("a") as file:
        file.write('{"global_step": 5, "by": "the ki')
    resumed = RolloutLog(tmp_path, 0)
    for step in range(3, 6):
        resumed.write(step, {"by": "the resumed one"})
    lines = [json.loads(line) for line in resumed.path.read_text().splitlines()]
    assert [line["global_step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["by"] for line in lines] == ["the killed one"] * 3 + ["the resumed one"] * 3
    aside = resumed.superseded.read_text().splitlines()
    assert [json.loads(line)["global_step"] for line in aside[:2]] == [3, 4] and len(aside) == 3


def test_a_line_that_cannot_be_written_is_logged_instead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    report: Mapping[str, Any] = {"seeds": [7]}
    RolloutLog(tmp_path / "file" / "below", 0).write(2, report)
    assert '"seeds": [7]' in caplog.text and '"global_step": 2' in caplog.text


@pytest.mark.parametrize("truncated", [False, True])
def test_truncation_is_taken_from_the_backend(truncated: bool, loaded: LoadedModel, samples: list[Sample]) -> None:
    """Answers come without their stop token, so the tokens do not show it."""
    request = samples[0].request
    rollout = Rollout(request.sample_id, request.prompt_token_ids, tuple(loaded.vocab.encode("{}")), "{}", truncated)
    answer = AnswerReader(loaded.vocab, MatchingConfig())(samples[0], rollout)
    assert answer.parsed.truncated is truncated
