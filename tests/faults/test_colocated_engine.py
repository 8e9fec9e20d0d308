"""A real colocated vLLM engine with steps and pushes that fail or return wrong results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from coordexp.engine.trainer.colocated import ColocatedBackend
from coordexp.errors import RolloutError
from coordexp.rollouts import SeedContext
from support.rollout_servers import colocated, load_served, requests_of

SEEDS = SeedContext(1, 0, 0, 0)


class Colocated(NamedTuple):
    """A backend, its requests, and its answers without a fault."""

    backend: ColocatedBackend
    requests: list[Any]
    well: list[tuple[int, ...]]

    def ask(self) -> list[tuple[int, ...]]:
        return [one.response_token_ids for one in self.backend.generate(self.requests, SEEDS)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Colocated]:
    trainer = load_served()
    backend = colocated(trainer, tmp_path_factory.mktemp("colocated"))
    backend.sync_weights(1)
    requests = requests_of(trainer, 3)
    well = [one.response_token_ids for one in backend.generate(requests, SEEDS)]
    backend.release()
    yield Colocated(backend, requests, well)
    backend.close()


@pytest.fixture(autouse=True)
def awake(engine: Colocated) -> Iterator[None]:
    """After each fault the next step's push and rollouts work."""
    engine.backend.sync_weights(2)
    yield
    engine.backend.release()
    engine.backend.sync_weights(3)
    assert engine.ask() == engine.well
    engine.backend.release()


def changed(name: str, value: Any) -> Callable[[list[Any]], list[Any]]:
    """Finished answers with another value of one of their completion's fields."""

    def lie(outputs: list[Any]) -> list[Any]:
        for output in outputs:
            for completion in output.outputs if output.finished else ():
                setattr(completion, name, value(getattr(completion, name)) if callable(value) else value)
        return outputs

    return lie


def raising(error: BaseException) -> Callable[[list[Any]], list[Any]]:
    def fail(_: list[Any]) -> list[Any]:
        raise error

    return fail


def engine_dead(_: list[Any]) -> list[Any]:
    from vllm.v1.engine.exceptions import EngineDeadError

    raise EngineDeadError


LIES: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "drops answers": (lambda outputs: [one for one in outputs if not one.finished], "were never answered"),
    "answers twice": (
        lambda outputs: [*outputs, *(copy.copy(one) for one in outputs if one.finished)], "not an open request",
    ),
    "more tokens than allowed": (changed("token_ids", lambda ids: [*ids, *[9] * 100]), "max_new_tokens is 12"),
    "tokens beyond the vocabulary": (changed("token_ids", lambda ids: [*ids[:2], 10**9]), "1000000000"),
    "negative tokens": (changed("token_ids", lambda ids: [*ids[:2], -1]), "-1"),
    "no finish reason": (changed("finish_reason", None), "None"),
    "finished by abort": (changed("finish_reason", "abort"), "abort"),
    "finish reason unknown": (changed("finish_reason", "tired"), "tired"),
    "no memory": (raising(torch.OutOfMemoryError("no memory is left")), "decoding failed: OutOfMemoryError"),
    "a broken kernel": (raising(RuntimeError("illegal access")), "decoding failed: RuntimeError: illegal access"),
    "a full disk": (raising(OSError(28, "No space left on device")), "No space left on device"),
    "an engine that is dead": (engine_dead, "decoding failed: EngineDeadError"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_failing_or_wrong_engine_ends_the_step_with_a_clear_error(
    lie: str, engine: Colocated, monkeypatch: pytest.MonkeyPatch, seen: Callable[[object], None]
) -> None:
    below = engine.backend.engine.vllm
    step, (distort, says) = below.step, LIES[lie]
    monkeypatch.setattr(below, "step", lambda: distort(step()))
    with pytest.raises(RolloutError, match=says) as refused:
        engine.ask()
    assert "colocated vLLM engine" in str(refused.value)
    seen(refused.value)


PUSHES = {
    "a weight that does not arrive": "not sent",
    "a weight that does not fit": "the push of weights failed: OutOfMemoryError: no memory is left",
    "a cache that stays": "could not be emptied",
}


@pytest.mark.parametrize("fault", PUSHES)
def test_a_failed_push_ends_the_step_and_frees_the_trainers_memory(
    fault: str, engine: Colocated, monkeypatch: pytest.MonkeyPatch, seen: Callable[[object], None]
) -> None:
    inside = engine.backend.engine
    receiver = inside.ask_worker(lambda worker: worker.receiver)
    take = receiver.take

    def lose(bucket: Any) -> None:
        take([one for one in bucket if "layers.0.mlp.down_proj" not in one[0]])

    def fail(bucket: Any) -> None:
        take(bucket[: len(bucket) // 2])
        raise torch.OutOfMemoryError("no memory is left")

    if fault == "a cache that stays":
        monkeypatch.setattr(inside.vllm, "reset_prefix_cache", lambda: False)
    else:
        monkeypatch.setattr(receiver, "take", lose if fault == "a weight that does not arrive" else fail)
    engine.backend.release()
    with pytest.raises(RolloutError, match=PUSHES[fault]) as refused:
        engine.backend.sync_weights(7)
    seen(refused.value)
    monkeypatch.undo()
    engine.backend.sync_weights(8)
