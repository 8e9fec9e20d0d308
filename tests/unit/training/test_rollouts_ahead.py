"""Prefetched rollouts: always one step old, saved in checkpoints, and cleaned up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import load_config
from coordexp.data.jsonl import read_jsonl
from coordexp.errors import CheckpointError, ConfigError, DataError, RolloutError
from coordexp.objective import RowTensors
from coordexp.records import Rollout
from coordexp.rollouts.backend import IndexedRollout, RolloutRound
from coordexp.training.saving import load_answers, save_answers
from coordexp.training.step_answers import SavedAnswers
from support.config_samples import stage2, write_yaml
from support.fake_servers import FakeRolloutServer
from support.tiny_run import (
    InMemoryBackend,
    Killed,
    figures,
    kill_at,
    nearly_right,
    run_config,
    same_weights,
    step_lines,
    tiny_processor_and_vocab,
    tiny_scenes,
    train,
    weights,
)

# Twelve scenes, so an epoch of three steps; rows of 150 tokens, so that segments wait too.
KEYS: dict[str, Any] = {
    "global_max_length": 150,
    "training__per_device_train_batch_size": 4,
    "training__max_steps": 7,
    "rollout_matching__rollouts_ahead": 1,
}


class Aging(InMemoryBackend):
    """Answers worse with every version of the weights, so that training differs where another version answers. It
    records its calls, and fails if weights are pushed while answers are pending."""

    def __init__(self, slow: float = 0.0) -> None:
        self._objects = {record.sample_id: record.objects for record in read_jsonl(tiny_scenes())}
        vocab = tiny_processor_and_vocab().vocab
        super().__init__(vocab, lambda request: nearly_right(self._objects[request.sample_id], self._shift))
        self.told: list[tuple[str, int]] = []
        self._slow = slow
        self._owes = False

    @property
    def _shift(self) -> int:
        return 5 + 10 * self.versions[-1]

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        seeds: Any = rounds[0].seeds
        self.told.append(("ask", seeds.global_step))
        self._owes = True
        time.sleep(self._slow)
        yield from super().generate_rounds(rounds)
        self._owes = False

    def sync_weights(self, version: int) -> None:
        assert not self._owes, "pushed while answers are pending"
        self.told.append(("push", version))
        super().sync_weights(version)


@pytest.fixture(scope="module")
def keys() -> Iterator[dict[str, Any]]:
    """Of a configuration that names a (fake) server."""
    with FakeRolloutServer(1) as fake:
        server = {"servers": [{"base_url": fake.url, "group_port": 40000}], "timeout_s": 5.0}
        vllm = {"mode": "server", "tensor_parallel_size": 1, "server": server}
        yield KEYS | {"rollout_matching__rollout_backend": "vllm", "rollout_matching__vllm": vllm}


@pytest.fixture
def ahead(keys: dict[str, Any], tmp_path: Path) -> Any:
    """Trains on answers of a backend in memory."""

    def run(name: str = "run", stage: Any = 2, backend: Any = None, on_built: Any = None, **more: Any) -> Any:
        return train(run_config(tmp_path, stage, name, **keys | more), backend or Aging(), on_built)

    return run


@pytest.fixture(scope="module")
def whole(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The trainer of a run without any incident, which others are compared with."""
    return train(run_config(tmp_path_factory.mktemp("whole"), 2, **keys), Aging())


def assert_same(run: Any, other: Any) -> None:
    assert figures(run) == figures(other)
    assert same_weights(weights(run.model), weights(other.model))


def test_each_step_takes_a_window_pushes_weights_and_requests_the_next(ahead: Any, whole: Any) -> None:
    """Also over the ends of epochs; each step reads the samples that it reads without looking ahead."""
    backend, slow, together = whole.backend, Aging(slow=0.2), Aging()
    assert backend.told[:6] == [("push", 0), ("ask", 0), ("ask", 1), ("push", 1), ("ask", 2), ("push", 2)]
    assert [number for what, number in backend.told if what == "ask"] == list(range(7))
    assert [number for what, number in backend.told if what == "push"] == list(range(6))  # no request follows the last
    assert [line["rollout/staleness_steps"] for line in step_lines(whole)] == [0, 1, 1, 1, 1, 1, 1]
    assert_same(ahead("second", backend=slow), whole)
    assert slow.told == backend.told
    in_step = ahead("in_step", backend=together, rollout_matching__rollouts_ahead=0)
    assert together.calls == backend.calls and together.seeds == backend.seeds
    assert {line["rollout/staleness_steps"] for line in step_lines(in_step)} == {0}
    assert not same_weights(weights(in_step.model), weights(whole.model))


# As answers age, fewer of their objects match: its first steps take annotations as complete, its last ones do not.
COMPLETE = {
    "rollout_matching__target": {"answer": "rewritten", "complete_above": 0.8},
    "rollout_matching__maskiou_gate": 0.6,
}


@pytest.mark.parametrize(
    ("stage", "save_steps", "saved", "target"),
    [(2, 3, 3, {}), (2, 2, 4, COMPLETE), ("two_channel", 3, 3, COMPLETE)],
    ids=["between epochs", "within an epoch", "two channels"],
)  # fmt: skip
def test_resumed_run_equals_uninterrupted_run(
    stage: Any, save_steps: int, saved: int, target: dict[str, Any], ahead: Any, tmp_path: Path
) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": save_steps, **target}
    whole = ahead("whole", stage, **keys)
    taken = {line["rollout/taken_as_complete_rate"] for line in step_lines(whole) if "rollout/precision" in line}
    assert taken == ({0, 1} if target else {0})
    with pytest.raises(Killed):
        ahead("killed", stage, on_built=kill_at(5), **keys)
    asked_again = Aging()
    resumed = ahead("killed", stage, backend=asked_again, training__resume_from_checkpoint=True, **keys)
    waited = json.loads((tmp_path / "killed" / f"checkpoint-{saved}" / "waiting_answers_rank0.json").read_text())
    assert (waited["step"], waited["version"]) == (saved, saved - 1)
    assert ("ask", saved) not in asked_again.told
    assert_same(resumed, whole)


def test_two_channel_answers_are_generated_during_the_step_before(ahead: Any) -> None:
    """A, B, A, B: B's answers are requested in the A step before it, with the weights of that step."""
    backend = Aging()
    trainer = ahead(stage="two_channel", backend=backend, training__max_steps=4)
    assert backend.told == [("push", 0), ("ask", 1), ("push", 2), ("ask", 3)]
    lines = step_lines(trainer)
    assert [line.get("rollout/staleness_steps") for line in lines] == [None, 1, None, 1]
    assert not [name for line in lines[::2] for name in line if name.startswith("rollout/")]


def test_a_failure_ends_its_own_step_after_a_save(ahead: Any, tmp_path: Path) -> None:
    class Failing(Aging):
        def generate(self, requests: Any, seeds: Any = None, on_answer: Any = None) -> list[Rollout]:
            if seeds.global_step == 2:
                raise RolloutError("the engine is gone")
            return super().generate(requests, seeds)

    with pytest.raises(RolloutError, match="the engine is gone"):
        ahead(backend=Failing())
    # Requested in step 1, which was trained.
    assert not list((tmp_path / "run" / "checkpoint-2").glob("waiting_answers*"))
    resumed = ahead(training__resume_from_checkpoint=True)
    assert [line["rollout/staleness_steps"] for line in step_lines(resumed)] == [0, 1, 0, 1, 1, 1, 1]


def test_a_failed_step_keeps_its_answers(ahead: Any, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    to = RowTensors.to

    def fail_in_step_2(trainer: Any) -> None:
        def to_or_fail(row: RowTensors, device: Any) -> RowTensors:
            if trainer.state.global_step == 2:
                raise RolloutError("out of memory, say")
            return to(row, device)

        monkeypatch.setattr(RowTensors, "to", to_or_fail)

    with pytest.raises(RolloutError, match="out of memory"):
        ahead(on_built=fail_in_step_2)
    monkeypatch.undo()
    assert_same(ahead(training__resume_from_checkpoint=True), whole)


def test_unreadable_samples_fail_the_step_that_needs_them(ahead: Any, tmp_path: Path) -> None:
    def break_the_second_step(trainer: Any) -> None:
        dataset, read = trainer.batches.dataset, trainer.batches.dataset.encode
        seen: list[str] = []

        def encode(record: Any) -> Any:
            seen.append(record.sample_id)
            if len(seen) > 6:
                raise DataError("gone", path=record.image)
            return read(record)

        dataset.encode = encode

    with pytest.raises(DataError, match="gone"):
        ahead(on_built=break_the_second_step)
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_evaluation_waits_for_pending_answers(ahead: Any, whole: Any) -> None:
    evaluated = ahead(backend=Aging(slow=0.2), training__eval_strategy="steps", training__eval_steps=2)
    assert same_weights(weights(evaluated.model), weights(whole.model))


def test_a_failed_evaluation_does_not_change_the_step_before(ahead: Any, whole: Any) -> None:
    class FailsToEvaluate(Aging):
        @property
        def batch_size(self) -> int:
            raise RolloutError("no evaluation today")

    with pytest.raises(RolloutError, match="no evaluation today"):
        ahead(backend=FailsToEvaluate(), training__eval_strategy="steps", training__eval_steps=4)
    assert_same(ahead(training__resume_from_checkpoint=True), whole)


def test_a_run_without_prefetch_ignores_saved_answers(
    ahead: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead(training__max_steps=3, training__save_strategy="steps", training__save_steps=2)
    halfway = str(tmp_path / "run" / "checkpoint-2")
    keys = {"training__resume_from_checkpoint": halfway, "training__resume_with_changes": True}
    resumed = ahead(training__max_steps=4, rollout_matching__rollouts_ahead=0, **keys)
    assert "has answers for its next step" in caplog.text
    assert [line["rollout/staleness_steps"] for line in step_lines(resumed)] == [0, 1, 0, 0]


def test_saved_answers_to_other_samples_are_refused(ahead: Any, tmp_path: Path) -> None:
    ahead(training__max_steps=3, training__save_strategy="steps", training__save_steps=2)
    halfway = str(tmp_path / "run" / "checkpoint-2")
    keys = {"training__resume_from_checkpoint": halfway, "training__resume_with_changes": True}
    with pytest.raises(CheckpointError, match="same data, batch size and seed"):
        ahead(training__max_steps=4, training__seed=7, **keys)


def waiting(version: int = 3, **keys: Any) -> SavedAnswers:
    rollout = Rollout("x:1", (1, 2), (3,), "a", truncated=True, weight_version=3)
    return SavedAnswers(
        **{"step": 4, "version": version, "rounds": ((rollout,), ()), "rollout_s": 0.1, "report": {}, "counted": {}}
        | keys
    )


def test_answers_survive_a_round_trip(tmp_path: Path) -> None:
    save_answers(waiting(), tmp_path)
    assert load_answers(tmp_path) == waiting()
    assert load_answers(tmp_path / "elsewhere") is None


def test_answers_of_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="weight versions"):
        waiting(version=2)


@pytest.mark.parametrize("spoil", ["{", "[]", '{"rounds": [[{}]]}'], ids=["half a file", "a list", "no answer"])
def test_an_invalid_window_file_is_refused(spoil: str, tmp_path: Path) -> None:
    (tmp_path / "waiting_answers_rank0.json").write_text(spoil)
    with pytest.raises(CheckpointError, match=r"waiting_answers_rank0\.json.*older checkpoint"):
        load_answers(tmp_path)


@pytest.mark.parametrize("vllm", [None, {"mode": "colocate"}], ids=["hf", "colocate"])
def test_prefetched_rollouts_require_servers(vllm: Any, tmp_path: Path) -> None:
    engine = {"rollout_backend": "hf"} if vllm is None else {"rollout_backend": "vllm", "vllm": vllm}
    with pytest.raises(ConfigError, match=r"rollout_matching\.rollouts_ahead.*vllm\.mode: server.*write 0"):
        load_config(write_yaml(tmp_path, stage2(rollouts_ahead=1, **engine)))
