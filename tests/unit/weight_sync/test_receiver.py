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


def take_adapter(worker: WeightReceiver) -> None:
    worker.begin()
    worker.state.adapter_names = ["a"]


def test_full_weights_replace_the_base_of_adapters_and_adapters_do_not() -> None:
    worker = receiver()
    take_adapter(worker)
    after_adapter = worker.commit(None, False, nothing)
    assert (after_adapter["base_overwritten"], after_adapter["pushes"]) == (False, 1)
    worker.take(weights())
    assert worker.commit(7, False, nothing)["base_overwritten"] is True
    take_adapter(worker)
    assert worker.commit(8, False, nothing)["base_overwritten"] is True, "it stays so"


EMBED, NORM = "model.language.embed.weight", "model.language.layer.norm.weight"


@pytest.mark.parametrize(
    ("earlier", "comes_with_it", "refused"),
    [
        ([EMBED], [], "changed language.model.embed.weight of"),
        ([EMBED], [EMBED], None),
        ([EMBED, NORM], [EMBED], "changed language.model.layer.norm.weight of"),
        ([], [EMBED], None),
    ],
)
@pytest.mark.parametrize("was_committed", [True, False])
def test_an_adapter_is_refused_on_weights_that_an_earlier_push_changed(
    earlier: list[str], comes_with_it: list[str], refused: str | None, was_committed: bool
) -> None:
    worker, sent = receiver(), dict(weights())

    def push(names: list[str]) -> None:
        take_adapter(worker)
        if names:
            worker.take([(name, sent[name]) for name in names])

    push(earlier)
    if was_committed:
        worker.commit(3, False, nothing, "the trainer before")
    worker.close()
    push(comes_with_it)
    if refused is None:
        assert worker.commit(0, False, nothing, "this trainer")["weight_version"] == 0
        return
    with pytest.raises(RolloutError, match=refused):
        worker.commit(0, False, nothing, "this trainer")


def test_a_full_push_that_failed_half_way_leaves_no_base_for_adapters() -> None:
    worker = receiver()
    worker.take(weights()[:2])
    worker.close()
    take_adapter(worker)
    with pytest.raises(RolloutError, match="an earlier push changed"):
        worker.commit(0, False, nothing, "another trainer")


def test_a_push_with_an_error_is_not_committed_even_if_later_parts_arrive() -> None:
    class Failing(FusedModel):
        fails = True

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            if self.fails and any(name == EMBED for name, _ in weights):
                raise RuntimeError("no memory")
            super().load_weights(weights)

    model = Failing()
    worker, sent = receiver(model), dict(weights())
    worker.take([(EMBED, sent.pop(EMBED))])
    (first, *_), rest = sent.items(), dict(sent)
    rest.pop(first[0])
    worker.take([first])
    with pytest.raises(RolloutError, match=r"embed\.weight .*no memory"):
        worker.take([*rest.items()])  # swift rollout replies 200 all the same
    with pytest.raises(RolloutError, match="no memory"):
        worker.commit(1, False, nothing)
    worker.take([*rest.items()])
    with pytest.raises(RolloutError, match="2 of the engine's weights were not sent"):
        worker.commit(1, False, nothing)
    model.fails = False
    worker.take(weights())
    assert worker.commit(1, False, nothing)["failure"] is None


def test_weights_of_a_push_that_is_not_committed_are_not_sound() -> None:
    worker = receiver()
    assert worker.problem is None
    worker.begin()
    assert worker.problem is None, "an adapter alone, which ms-swift's trainers do not commit"
    worker.take(weights())
    assert worker.problem == "weights are being pushed"
    worker.commit(1, False, nothing)
    assert worker.problem is None
    worker.take(weights()[:1])
    worker.close()
    assert worker.problem == "the trainer disconnected during a push"


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
