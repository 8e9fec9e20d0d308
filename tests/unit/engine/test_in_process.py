"""The colocated engine without vLLM's own: CUDA streams, caches and failures of a push."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordexp.engine import colocated
from coordexp.engine.colocated import InProcessEngine
from coordexp.engine.engine_process import settings_kept
from coordexp.errors import RolloutError

pytest.importorskip("vllm", reason="the engine's failures are recognised by vLLM's exceptions")
CACHES = ["prefix", "encoder", "mm"]


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
        ),
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(engine: Engine) -> InProcessEngine:
        monkeypatch.setattr(colocated, "_start", lambda arguments: engine)
        return InProcessEngine({}, 1)

    return start


def test_a_push_empties_every_cache_of_the_old_weights(started: Any) -> None:
    below = Engine(worker())
    assert started(below).commit(3, wants_checksum=False) == {"version": 3}
    assert below.emptied == CACHES


def test_a_push_fails_if_a_cache_is_not_emptied(started: Any) -> None:
    """vLLM keeps the prefixes of running requests; only its return value shows that."""
    with pytest.raises(RolloutError, match="prefix cache"):
        started(Engine(worker(), free=False)).commit(3, wants_checksum=False)
