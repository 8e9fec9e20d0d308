"""The receiving end of a push: refused contents, and a worker's report afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.receiver import WeightReceiver
from support.fused_model import SHAPES, FusedModel


def receiver(model: FusedModel | None = None) -> WeightReceiver:
    return WeightReceiver(FusedModel() if model is None else model, torch.device("cpu"), sharded=False)


def weights() -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, 0.5)) for name, shape in SHAPES.items()]


def nothing() -> None:
    pass


def test_a_tensor_that_is_sent_twice_is_refused() -> None:
    worker = receiver()
    worker.take(weights())
    with pytest.raises(RolloutError, match=r"sent 'visual\.qkv\.bias' twice"):
        worker.take(weights()[-1:])
    assert "twice" in worker.report()["failure"]


def test_full_weights_replace_the_base_of_adapters_and_adapters_do_not() -> None:
    worker = receiver()
    worker.begin()
    worker.state.adapter_names = ["a"]
    after_adapter = worker.commit(None, False, nothing)
    assert (after_adapter["base_overwritten"], after_adapter["pushes"]) == (False, 1)
    worker.take(weights())
    assert worker.commit(7, False, nothing)["base_overwritten"] is True
    worker.begin()
    worker.state.adapter_names = ["a"]
    assert worker.commit(8, False, nothing)["base_overwritten"] is True, "it stays so"


def test_a_trainer_that_leaves_during_a_push_is_named_by_the_next_call() -> None:
    worker = receiver()
    worker.close()
    assert worker.report()["failure"] is None, "no push was open"
    worker.take(weights())
    worker.close()
    with pytest.raises(RolloutError, match="the trainer disconnected during a push"):
        worker.commit(1, False, nothing)


def test_an_engine_that_keeps_the_received_memory_is_refused() -> None:
    class Keeping(FusedModel):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                if name == "visual.qkv.bias":
                    self.get_parameter(name).data = tensor
                else:
                    super().load_weights([(name, tensor)])

    worker = receiver(Keeping())
    worker.take([(name, tensor.bfloat16()) for name, tensor in weights()])  # no plain copy into float32
    with pytest.raises(RolloutError, match=r"made visual\.qkv\.bias a parameter without copying"):
        worker.commit(1, False, nothing)
