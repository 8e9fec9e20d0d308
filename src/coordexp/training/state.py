"""The state of a run: everything that training changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from coordexp import distributed
from coordexp.metrics import MetricSums
from coordexp.modeling.load import LoadedModel
from coordexp.packing import CarryBuffer
from coordexp.training.step_answers import RolloutQueue


@dataclass(slots=True)
class RunState:
    """The state that a checkpoint needs so that a resumed run equals an uninterrupted one.

    ``model``, ``optimizer``: as accelerate prepared them; ``loaded.model`` is the bare model. ``progress``: steps,
    log history and best metric. ``sums``: this rank's metrics of the log line under way. ``buffer``: segments that
    wait for a packed row. ``queue``: answers one step ahead.
    """

    loaded: LoadedModel
    model: Any
    optimizer: Any
    scheduler: Any
    accelerator: Any
    progress: TrainerState
    sums: MetricSums = field(default_factory=MetricSums)
    buffer: CarryBuffer | None = None
    queue: RolloutQueue | None = None

    @property
    def shards(self) -> bool:
        """Whether FSDP or DeepSpeed shards the model: all ranks then save and load together."""
        return self.is_fsdp or self.is_deepspeed

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards the model."""
        return getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    @property
    def saves_shards(self) -> bool:
        """Whether a checkpoint's weights are the shards that are saved with the optimizer's, and nothing else."""
        return self.is_fsdp and "SHARDED_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type)

    @property
    def is_deepspeed(self) -> bool:
        """Whether the model is a DeepSpeed engine."""
        return getattr(self.accelerator.state, "deepspeed_plugin", None) is not None

    def together(self, where: str) -> AbstractContextManager[Callable[[], None]]:
        """As :func:`coordexp.distributed.raise_on_all_ranks`, for a forward or a save. Those of a sharded model are
        collective calls: a rank that fails inside has lost contact, and could not report its error."""
        return nullcontext(lambda: None) if self.shards else distributed.raise_on_all_ranks(where)

    def snapshot(self) -> Callable[[], None]:
        """Copy everything that a step changes before its weight update.

        Returns: a function that undoes a failed step, its gradients included; a resumed run then repeats the same step.
        """
        buffer = None if self.buffer is None else self.buffer.state_dict()
        answers = None if self.queue is None else self.queue.content
        sums, generators = self.sums.state_dict(), random_states()

        def restore() -> None:
            if self.buffer is not None and buffer is not None:
                self.buffer.load_state_dict(buffer)
            if self.queue is not None:
                self.queue.content = answers
            self.sums.load_state_dict(sums)
            set_random_states(generators)
            self.loaded.model.zero_grad(set_to_none=True)

        return restore


def random_states() -> dict[str, Any]:
    """The random states of Python, NumPy, torch and this device, in types that ``torch.load(weights_only=True)``
    reads."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore states from :func:`random_states`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def callback_states(callbacks: Iterable[object]) -> Any:
    """States that callbacks want in a checkpoint, by class and in their order: of early stopping, how often no
    evaluation was better."""
    states: dict[str, list[Any]] = {}
    for one in callbacks:
        if isinstance(one, ExportableState):
            states.setdefault(type(one).__name__, []).append(one.state())
    return states


def restore_callbacks(callbacks: Iterable[object], states: Any) -> None:
    """Give callbacks their attributes of :func:`callback_states`; an older checkpoint has none. Arguments stay."""
    saved = {name: list(of_class) for name, of_class in (states or {}).items()}
    for one in callbacks:
        if isinstance(one, ExportableState) and (of_class := saved.get(type(one).__name__)):
            vars(one).update(of_class.pop(0)["attributes"])


def act_together(control: TrainerControl) -> None:
    """Set each flag that a callback set on any rank on all ranks: their clocks may differ. A collective call."""
    names = [one.name for one in fields(control)]
    asked = distributed.all_reduce([getattr(control, name) for name in names], "max")
    for name, value in zip(names, asked, strict=True):
        setattr(control, name, bool(value))
