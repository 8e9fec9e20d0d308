"""Everything that training changes, and what of it one step changes before it changes the weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import TrainerState

from coordexp.metrics import MetricSums
from coordexp.modeling.load import LoadedModel
from coordexp.packing import CarryBuffer
from coordexp.training.answers import PendingAnswers, RolloutQueue, SavedAnswers


@dataclass(slots=True)
class RunState:
    """The state that a checkpoint must hold so that a resumed run equals one that never stopped.

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
        """FSDP or DeepSpeed: all ranks hold parts, and save and load together."""
        return self.is_fsdp or self.is_deepspeed

    @property
    def is_fsdp(self) -> bool:
        """The model is sharded by FSDP2."""
        return getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    @property
    def is_deepspeed(self) -> bool:
        """The model is a DeepSpeed engine."""
        return getattr(self.accelerator.state, "deepspeed_plugin", None) is not None

    def snapshot(self) -> StepStart:
        """The state before a step, to :meth:`restore` if the step fails: copies, not views."""
        return StepStart(
            None if self.buffer is None else self.buffer.state_dict(),
            self.sums.state_dict(),
            random_states(),
            None if self.queue is None else self.queue.content,
        )

    def restore(self, start: StepStart) -> None:
        """Undo what a failed step changed, its gradients included; a resumed run then repeats the same step."""
        if self.buffer is not None and start.buffer is not None:
            self.buffer.load_state_dict(start.buffer)
        if self.queue is not None:
            self.queue.content = start.answers
        self.sums.load_state_dict(start.sums)
        set_random_states(start.random)
        self.loaded.model.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class StepStart:
    """The state that a step changes before it changes the weights."""

    buffer: dict[str, Any] | None
    sums: dict[str, Any]
    random: dict[str, Any]
    answers: PendingAnswers | SavedAnswers | None


def random_states() -> dict[str, Any]:
    """Python's, NumPy's, torch's and this device's, in types that ``torch.load(weights_only=True)`` reads."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Continue with what :func:`random_states` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
