"""The trainer is offloaded during colocated rollouts and restored bit for bit, also after errors."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from coordexp.config.rollout import OffloadConfig, RolloutMatchingConfig
from coordexp.modeling.trainer_weights import TrainerWeights
from coordexp.training.offload import TrainerOffload, build_offload
from support.tiny_run import InMemoryBackend, finder, load_tiny, run_config, same_weights, step_lines, train, weights
from support.tuned_models import lora, pushed, tuned

BOTH = OffloadConfig(enabled=True, offload_model=True, offload_optimizer=True)


def nothing_stays(tensor: torch.Tensor) -> bool:
    """Treat main memory as a device, so that the same moves happen where there is none."""
    return False


def owning(model: torch.nn.Module) -> torch.nn.Module:
    """Parameters read from a file may be views of it; their memory cannot be freed."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@dataclass
class Trainer:
    """A small model with a tied table and two parameters in one buffer, and an optimizer after a step."""

    model: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def build(cls) -> Trainer:
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.embedding, model.head = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11, bias=False)
        model.head.weight = model.embedding.weight
        flat = torch.randn(20)
        model.one, model.two = torch.nn.Parameter(flat[:8].view(2, 4)), torch.nn.Parameter(flat[8:].view(4, 3).t())
        trainer = cls(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        trainer.step()
        return trainer

    def step(self) -> None:
        loss = self.model.head(self.model.embedding(torch.arange(11))).logsumexp(-1).sum()
        (loss + self.model.one.square().sum() + self.model.two.exp().sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        state = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.parameters(), *state]

    def offload(self, config: OffloadConfig = BOTH) -> TrainerOffload:
        offload = TrainerOffload(self.model, config, nothing_stays)
        offload.optimizer = lambda: self.optimizer
        return offload


def places(tensors: list[torch.Tensor]) -> list[tuple]:
    return [(id(t), t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.device) for t in tensors]


def test_everything_is_restored_to_its_own_storage_bit_for_bit() -> None:
    trainer = Trainer.build()
    tensors = trainer.tensors()
    values, before = [t.clone() for t in tensors], places(tensors)
    offload = trainer.offload()
    with offload.away():
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors), "device memory is released"
        copies = [offload.current(tensor) for tensor in tensors]
        assert all(torch.equal(t, value) for t, value in zip(copies, values, strict=True)), "and can still be read"
        one, two = offload.current(trainer.model.one), offload.current(trainer.model.two)
        assert one.untyped_storage()._cdata == two.untyped_storage()._cdata
    assert places(tensors) == before
    assert all(torch.equal(offload.current(t), value) for t, value in zip(tensors, values, strict=True))


def test_gradient_accumulators_survive_so_ddp_keeps_exchanging_gradients() -> None:
    """DDP has its hooks on the accumulators, and torch replaces them when ``.data`` is set across devices."""
    trainer = Trainer.build()
    accumulators = [get_gradient_edge(p).node for p in trainer.model.parameters()]
    homes = [p.untyped_storage()._cdata for p in trainer.model.parameters()]
    hooked: list[str] = []
    accumulators[0].register_prehook(lambda grads: hooked.append("as DDP does"))
    with (
        trainer.offload().away()
    ):  # between main memory and itself, `.data` would keep the accumulator: see the storage
        assert [p.untyped_storage()._cdata for p in trainer.model.parameters()] == homes
    assert [get_gradient_edge(p).node for p in trainer.model.parameters()] == accumulators
    trainer.step()
    assert hooked == ["as DDP does"]


def test_everything_is_restored_when_the_rollouts_fail() -> None:
    trainer = Trainer.build()
    values, before = [t.clone() for t in trainer.tensors()], places(trainer.tensors())
    offload = trainer.offload()
    with pytest.raises(ConnectionError), offload.away():
        raise ConnectionError
    assert places(trainer.tensors()) == before
    assert all(torch.equal(t, value) for t, value in zip(trainer.tensors(), values, strict=True))
    with offload.away():  # and it can be used again
        pass


def test_a_failure_during_offload_restores_moved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer.build()
    before, calls, real = places(trainer.tensors()), iter([True, True]), torch.empty

    def no_memory_left(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is torch.uint8 and not next(calls, False):
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_memory_left)
    with pytest.raises(MemoryError), trainer.offload().away():
        pytest.fail("the context must not be entered")
    assert places(trainer.tensors()) == before


@pytest.mark.parametrize(("of_model", "of_optimizer"), [(True, False), (False, True)])
def test_only_the_configured_parts_are_moved(of_model: bool, of_optimizer: bool) -> None:
    trainer = Trainer.build()
    config = OffloadConfig(enabled=True, offload_model=of_model, offload_optimizer=of_optimizer)
    parameters = [p.untyped_storage() for p in trainer.model.parameters()]
    state = [entry["exp_avg"].untyped_storage() for entry in trainer.optimizer.state.values()]
    with trainer.offload(config).away():
        assert {storage.nbytes() == 0 for storage in parameters} == {of_model}
        assert {storage.nbytes() == 0 for storage in state} == {of_optimizer}


def test_a_model_in_main_memory_is_not_moved() -> None:
    trainer = Trainer.build()
    offload = TrainerOffload(trainer.model, BOTH)
    offload.optimizer = lambda: trainer.optimizer
    before, pointers = places(trainer.tensors()), [t.data_ptr() for t in trainer.tensors()]
    with offload.away():
        assert places(trainer.tensors()) == before
        assert [t.data_ptr() for t in trainer.tensors()] == pointers


def test_pending_gradients_are_an_error() -> None:
    trainer = Trainer.build()
    trainer.model.one.square().sum().backward()
    with pytest.raises(AssertionError, match="in the middle of an optimizer step"), trainer.offload().away():
        pass


def test_merged_weights_can_be_pushed_while_offloaded() -> None:
    """A push happens inside the context: it must not need the trainer's weights on the device."""
    loaded = tuned(lora(use_dora=True))
    owning(loaded.model)
    offload = TrainerOffload(loaded.model, BOTH, nothing_stays)
    source = TrainerWeights(loaded.model, offload.current)
    expected = pushed(loaded.model)
    adapter = source.adapter()
    assert adapter is not None
    expected_adapter = {name: tensor.clone() for name, tensor in adapter.tensors}
    with offload.away(), source.full() as tensors:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors)
        adapter = source.adapter()
        assert adapter is not None
        assert all(torch.equal(tensor, expected_adapter[name]) for name, tensor in adapter.tensors)


def rollouts(backend: str, mode: str = "colocate", **offload: bool) -> RolloutMatchingConfig:
    keys: dict[str, Any] = {"rollout_backend": backend, "offload": OffloadConfig(**offload)}
    vllm: dict[str, Any] = {"mode": mode, "tensor_parallel_size": 1}
    if mode == "server":
        vllm["server"] = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}]}
    return RolloutMatchingConfig.model_validate(keys | {"vllm": vllm})


NO_OP = [
    (rollouts("hf", enabled=True, offload_model=True), "HF rollouts need the trainer's model where it is"),
    (rollouts("vllm", "server", enabled=True, offload_model=True), "a server has devices of its own"),
    (rollouts("vllm", offload_model=True), "not enabled"),
]


@pytest.mark.parametrize(("config", "reason"), NO_OP, ids=[reason for _, reason in NO_OP])
def test_offload_is_a_no_op_without_a_colocated_engine(config: RolloutMatchingConfig, reason: str) -> None:
    assert build_offload(Trainer.build().model, config) is None, reason


class FakeColocatedBackend(InMemoryBackend):
    """No engine: answers from a table, but borrows the device like a colocated engine and records the state."""

    def __init__(self, vocab: Any, answers: Any) -> None:
        super().__init__(vocab, answers)
        self._borrowed = ExitStack()
        self.device_was_free: list[bool] = []

    def borrow_from(self, trainer: Any) -> None:
        model = owning(trainer.model)
        self._offload = TrainerOffload(model, BOTH, nothing_stays)
        self._offload.optimizer = lambda: trainer.run.optimizer
        self._homes = [p.untyped_storage() for p in model.parameters()]

    def sync_weights(self, version: int) -> None:
        self._borrowed.enter_context(self._offload.away())
        super().sync_weights(version)

    def generate(self, requests: Any, seeds: Any = None, on_answer: Any = None) -> Any:
        self.device_was_free.append(all(home.nbytes() == 0 for home in self._homes))
        return super().generate(requests, seeds)

    def release(self) -> None:
        self._borrowed.close()


@pytest.mark.scenario("Offload context does not break the training step")
def test_offload_does_not_change_training_steps(tmp_path: Path) -> None:
    answers = finder()
    colocated = FakeColocatedBackend(answers._vocab, answers._answers)
    moved = train(run_config(tmp_path, 2, "moved", training__max_steps=3), colocated, on_built=colocated.borrow_from)
    stayed = train(run_config(tmp_path, 2, "stayed", training__max_steps=3), answers)
    assert colocated.versions == [0, 1, 2] and colocated.device_was_free == [True] * 3
    assert [line["loss"] for line in step_lines(moved)] == [line["loss"] for line in step_lines(stayed)]
    assert same_weights(weights(moved.model), weights(stayed.model))
    assert not same_weights(weights(moved.model), weights(load_tiny().model))
