"""The colocated engine without vLLM's own: order of a round, CUDA streams, caches and failures of a push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.engine.trainer import colocated
from coordexp.engine.trainer.colocated import ColocatedBackend, InProcessEngine, Prompt
from coordexp.engine.wire.engine_process import settings_kept
from coordexp.errors import RolloutError
from coordexp.rollouts import SeedContext, rollout_session
from coordexp.rollouts.backend import AdapterWeights, TrainerParts
from coordexp.weight_sync.buckets import combined, tensor_hashes
from support.installed import needs
from support.settings import decoding

SEEDS = SeedContext(1, 2, 3, 0)


class Weights:
    """One tensor, or an adapter."""

    collective = False

    def full(self) -> Any:
        return nullcontext(iter([("a", torch.zeros(2))]))

    def adapter(self) -> AdapterWeights:
        return AdapterWeights({"r": 4}, (("a", torch.zeros(2)),), Path("model"))


class Trainer:
    """On its device or offloaded; ``seen``: (event, on the device or not)."""

    def __init__(self) -> None:
        self.is_away = False
        self.seen: list[tuple[str, bool]] = []

    @contextmanager
    def offload(self) -> Iterator[None]:
        assert not self.is_away
        self.is_away = True
        try:
            yield
        finally:
            self.is_away = False

    def note(self, what: str) -> None:
        self.seen.append((what, self.is_away))


class FakeEngine:
    """Answers nothing, is its own worker, and optionally refuses adapters."""

    def __init__(self, trainer: Trainer, takes_adapters: bool = True) -> None:
        self._trainer = trainer
        self._takes_adapters = takes_adapters
        self.compared: list[bool] = []
        self.receiver = SimpleNamespace(take=self.take, close=lambda: None)
        self.model_runner = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))

    def ask_worker(self, question: Any) -> Any:
        return question(self)

    def take(self, bucket: Any) -> None:
        assert [name for name, _ in bucket] == ["a"]
        self._trainer.note("push")

    def take_adapter(self, peft_config: Any, tensors: Any) -> None:
        assert peft_config == {"r": 4} and [name for name, _ in tensors] == ["a"]
        self._trainer.note("adapter")
        if not self._takes_adapters:
            raise RolloutError("cannot adapt it")

    def commit(self, version: int, *, wants_checksum: bool) -> dict[str, Any]:
        self.compared.append(wants_checksum)
        return {"checksum": combined(tensor_hashes([("a", torch.zeros(2))]))}

    def run(self, *_: Any) -> Iterator[Any]:
        self._trainer.note("answer")
        return iter(())

    def wake_up(self, parts: Any) -> None:
        self._trainer.note(f"wake {parts[0]}")

    def sleep(self, level: int) -> None:
        self._trainer.note("sleep")

    def close(self) -> None:
        self._trainer.note("close")


def backend_of(
    monkeypatch: pytest.MonkeyPatch, trainer: Trainer, engine: FakeEngine | Exception, **vllm: Any
) -> ColocatedBackend:
    def start(*_: Any) -> FakeEngine:
        trainer.note("start")
        if isinstance(engine, Exception):
            raise engine
        return engine

    monkeypatch.setattr(ColocatedBackend, "start_engine", start)
    keys = {"dtype": "float32", "max_model_len": 640, "tensor_parallel_size": 1, **vllm}
    section = {"rollout_backend": "vllm", "decode_batch_size": 1, "vllm": keys}
    unused: Any = None
    parts = TrainerParts(unused, unused, 0, Weights(), Path("model"), unused, trainer.offload)
    return ColocatedBackend(RolloutMatchingConfig.model_validate(section), parts, decoding())


@needs("vllm")
@pytest.mark.scenario("Offload context does not break the training step")
@pytest.mark.parametrize("mode", ["full", "adapter"])
def test_the_trainer_is_offloaded_until_the_engine_sleeps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the engine's device use is inside: its start, weights, adapter, cache and answers."""
    trainer = Trainer()
    engine = FakeEngine(trainer)
    backend = backend_of(monkeypatch, trainer, engine, enable_lora=True, sync={"mode": mode})
    for version in range(2):
        with rollout_session(backend, version):
            assert backend.generate([], SEEDS) == []
        assert not trainer.is_away, "training runs on the device"
    acts = [what for what, _ in trainer.seen]
    push = "push" if mode == "full" else "adapter"
    assert acts == [
        "start", push, "wake kv_cache", "answer", "sleep",
        "wake weights", push, "wake kv_cache", "answer", "sleep",
    ]  # fmt: skip
    assert all(was_away for _, was_away in trainer.seen)


def test_if_the_engine_does_not_start_the_trainer_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    backend = backend_of(monkeypatch, trainer, RolloutError("no room"))
    for _ in range(2):  # twice the same: all borrowed memory was returned
        with pytest.raises(RolloutError, match="no room"):
            backend.sync_weights(1)
        assert not trainer.is_away
    assert trainer.seen == [("start", True)] * 2


@needs("vllm")
@pytest.mark.parametrize("failing", ["push", "wake kv_cache", None])
def test_no_answers_after_a_push_that_failed_or_in_an_engine_that_sleeps(
    failing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    backend = backend_of(monkeypatch, trainer, FakeEngine(trainer))
    with rollout_session(backend, 0):
        assert backend.generate([], SEEDS) == []

    def note(what: str) -> None:
        if what == failing:
            raise RolloutError(f"no {what}")

    monkeypatch.setattr(trainer, "note", note)
    if failing is not None:
        with pytest.raises(RolloutError, match=f"no {failing}"):
            backend.sync_weights(1)
    with pytest.raises(RolloutError, match="call sync_weights before"):
        backend.generate([], SEEDS)


@needs("vllm")
@pytest.mark.parametrize(
    ("every", "compared"),
    [(0, [True, False, False, False, False]), (1, [True] * 5), (2, [True, False, True, False, True])],
    ids=["the first push only", "every push", "every second push"],
)
def test_pushes_are_read_back_at_the_configured_interval(
    every: int, compared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    engine = FakeEngine(trainer)
    backend = backend_of(monkeypatch, trainer, engine, sync={"checksum_every": every})
    for version in range(5):
        with rollout_session(backend, version):
            pass
    assert engine.compared == compared


@needs("vllm")
def test_a_failed_adapter_push_is_logged_once_and_pushes_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    engine = FakeEngine(trainer, takes_adapters=False)
    backend = backend_of(monkeypatch, trainer, engine, enable_lora=True, sync={"mode": "adapter"})
    for version in (5, 6):
        with rollout_session(backend, version):
            report = backend.last_report()
        assert report["fallbacks"] == ["version 5: RolloutError: cannot adapt it"] and report["sync_mode"] == "full"
    assert [what for what, _ in trainer.seen if what in ("adapter", "push")] == ["adapter", "push", "push"]
    assert engine.compared == [True, False], "the first full push is read back, also after a fallback"
    assert backend.take_metrics()["rollout/sync_fallbacks_total"] == 1


# -- inside the process: CUDA streams, caches --------------------------------------------------------------------------


class FakeStream:
    """A CUDA stream that notes which other ones it waited for."""

    def __init__(self) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeCudaWithoutAGPU:
    """The part of ``torch.cuda`` that ``settings_kept`` uses: one device, and a current stream."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.is_available, self.current_device, self.set_device = lambda: True, lambda: 0, lambda _: None

    def current_stream(self) -> FakeStream:
        return self.stream

    def set_stream(self, stream: FakeStream) -> None:
        self.stream = stream


def test_the_trainers_cuda_stream_is_restored_after_engine_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor parallelism vLLM sets its own current stream and does not restore it."""
    cuda = FakeCudaWithoutAGPU()
    trainers, vllms = cuda.stream, FakeStream()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())  # it finds torch.cuda in other ways
    with settings_kept():
        cuda.set_stream(vllms)
    assert cuda.stream is trainers
    assert trainers.waited_for == [vllms], "the trainer's stream does not wait for the engine's startup work"


class Engine:
    """vLLM's side: one worker, three caches. ``free``: whether the prefix cache can be emptied."""

    def __init__(self, worker: Any, free: bool = True) -> None:
        self.worker, self.free = worker, free
        self.emptied: list[str] = []

    def collective_rpc(self, question: Any) -> list[Any]:
        return [question(self.worker)]

    def reset_prefix_cache(self) -> bool:
        self.emptied.append("prefix")
        return self.free

    def reset_encoder_cache(self) -> None:
        self.emptied.append("encoder")

    def reset_mm_cache(self) -> None:
        self.emptied.append("mm")


def worker() -> Any:
    return SimpleNamespace(
        process_weights_after_loading=lambda version, wants_checksum: (
            {"version": version} | ({"checksum": None} if wants_checksum else {})
        )
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm", reason="the engine's failures are recognised by vLLM's exceptions")

    def start(engine: Engine) -> InProcessEngine:
        monkeypatch.setattr(colocated, "_start", lambda arguments: engine)
        return InProcessEngine({}, 1)

    return start


def test_a_push_empties_every_cache_of_the_old_weights_or_fails(started: Any) -> None:
    """vLLM keeps the prefixes of running requests; only its return value shows that."""
    below = Engine(worker())
    assert started(below).commit(3, wants_checksum=False) == {"version": 3}
    assert below.emptied == ["prefix", "encoder", "mm"]
    with pytest.raises(RolloutError, match="prefix cache"):
        started(Engine(worker(), free=False)).commit(3, wants_checksum=False)


def test_decoding_leaves_the_trainers_random_numbers(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(Engine):
        def add_request(self, *_: Any, **__: Any) -> None: ...

        def step(self) -> list[Any]:
            torch.rand(7)
            return [SimpleNamespace(finished=True, request_id="0-0-0")]

    monkeypatch.setattr(InProcessEngine, "render", lambda *_, **__: None)
    prompt = Prompt("0-0-0", 1, "a", "a.png", None, [])
    engine: InProcessEngine = started(Drawing(worker()))
    before = torch.get_rng_state()
    assert [output.request_id for output in engine.run([prompt], lambda _: None, lambda _: None)] == ["0-0-0"]
    assert torch.equal(torch.get_rng_state(), before)
