"""A step with DeepSpeed, by an engine that does the same: the package itself needs GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.utils
import pytest
import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from transformers import TrainerState

from coordexp.modeling.load import LoadedModel
from coordexp.recording.writer import RolloutLog
from coordexp.training.optimizer import LearningRates, parameter_groups
from coordexp.training.parallel import prepare
from coordexp.training.rows import RowBuilder
from coordexp.training.state import RunState
from coordexp.training.step import TrainStep
from support.tiny_run import load_tiny, task_of, tiny_samples


class Engine:
    """An accelerator whose ``backward`` divides by two micro-steps unless switched off, as DeepSpeed's engine."""

    device = torch.device("cpu")
    sync_gradients = True
    no_sync = staticmethod(lambda model: nullcontext())

    def __init__(self, *, deepspeed: bool) -> None:
        self.state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=object() if deepspeed else None)
        self.micro_steps = 2 if deepspeed else 1

    def backward(self, loss: torch.Tensor, **options: bool) -> None:
        (loss / self.micro_steps if options.get("scale_wrt_gas", True) else loss).backward()


def gradient_of_two_rows(folder: Path, *, deepspeed: bool) -> torch.Tensor:
    loaded = load_tiny()
    samples = tiny_samples(loaded, 4)
    step = TrainStep(
        RunState(loaded, loaded.model, None, None, Engine(deepspeed=deepspeed), TrainerState()),
        {None: task_of(loaded)},
        None,
        build_row=RowBuilder.from_model(loaded, torch.device("cpu")),
        max_grad_norm=0.0,
        rollout_log=RolloutLog(folder, 0),
    )
    batches: Any = SimpleNamespace(take=lambda: [samples[:2], samples[2:]])
    step.accumulate(batches, 0)
    return torch.cat([one.grad.flatten() for one in loaded.model.parameters() if one.grad is not None])


def test_deepspeed_does_not_divide_a_step_by_its_micro_steps(tmp_path: Path) -> None:
    gradient = gradient_of_two_rows(tmp_path, deepspeed=True)
    assert gradient.norm() > 0
    assert torch.equal(gradient, gradient_of_two_rows(tmp_path, deepspeed=False))


@pytest.fixture
def with_dummies(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (DummyOptim, DummyScheduler):
        monkeypatch.setattr(accelerate.utils, one.__name__, one, raising=False)


def prepared(model: Any, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """DeepSpeed's configuration, and the optimizer that accelerate gets, for ``max_grad_norm: 0.25``."""
    seen: list[Any] = []

    def keep(*parts: Any) -> tuple[Any, ...]:
        seen.extend(parts)
        return parts

    settings = SimpleNamespace(config=given, trainer_config_finalize=lambda *arguments: None)
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(hf_ds_config=settings)), prepare=keep
    )
    rates = LearningRates(base=1e-3, vit=1e-4)
    decaying = {name for name, weight in model.named_parameters() if weight.ndim > 1}
    groups = parameter_groups(model, rates, 0.1, decaying)
    args: Any = SimpleNamespace(max_grad_norm=0.25)
    prepare(accelerator, model, lambda: torch.optim.AdamW(groups), lambda optimizer: None, args, 10)
    return settings.config, seen[1]


@pytest.mark.usefixtures("with_dummies")
@pytest.mark.parametrize(("written", "used"), [({}, 0.25), ({"gradient_clipping": 0.5}, 0.5)])
def test_gradients_are_clipped_at_max_grad_norm_unless_the_file_names_another(
    loaded: LoadedModel, written: dict[str, Any], used: float
) -> None:
    settings, _ = prepared(loaded.model, dict(written))
    assert settings["gradient_clipping"] == used


@pytest.mark.usefixtures("with_dummies")
def test_an_optimizer_of_the_file_steps_our_groups(loaded: LoadedModel) -> None:
    _, optimizer = prepared(loaded.model, {"optimizer": {"type": "AdamW"}})
    assert isinstance(optimizer, DummyOptim)
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.params]
    assert settings == [(1e-3, 0.1), (1e-3, 0.0), (1e-3, 0.1), (1e-3, 0.0), (1e-4, 0.1), (1e-4, 0.0)]
    trained = sum(one.numel() for group in optimizer.params for one in group["params"])
    assert trained == sum(one.numel() for one in loaded.model.parameters())
