"""What a step changes before it changes the weights: put back where it fails, so that it can be done again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from coordexp.metrics import MetricSums
from coordexp.packing import CarryBuffer
from coordexp.training.ahead import AskedWindow, RolloutsAhead
from coordexp.training.answers_file import WaitingAnswers


@dataclass(frozen=True, slots=True)
class StepStart:
    """Segments and answers that wait, the log line under way, and random states, as a step found them."""

    buffer: dict[str, Any] | None
    sums: dict[str, Any]
    loss: torch.Tensor | None
    python_state: Any
    numpy_state: Any
    torch_state: torch.Tensor
    device_state: torch.Tensor | None
    window: AskedWindow | WaitingAnswers | None = None

    @staticmethod
    def of(
        buffer: CarryBuffer | None, sums: MetricSums, loss: torch.Tensor | None, ahead: RolloutsAhead | None
    ) -> StepStart:
        """What a step changes before it is finished, as it is now: copies, not views."""
        return StepStart(
            None if buffer is None else buffer.state_dict(),
            sums.state_dict(),
            None if loss is None else loss.detach().clone(),
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            None if ahead is None else ahead.window,
        )

    def restore(
        self, buffer: CarryBuffer | None, sums: MetricSums, loss: torch.Tensor | None, ahead: RolloutsAhead | None
    ) -> None:
        """Put everything back; ``loss`` is written to in place."""
        if buffer is not None and self.buffer is not None:
            buffer.load_state_dict(self.buffer)
        if ahead is not None:
            ahead.window = self.window
        sums.load_state_dict(self.sums)
        if loss is not None and self.loss is not None:
            loss.detach().copy_(self.loss)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(self.torch_state)
        if self.device_state is not None:
            torch.cuda.set_rng_state(self.device_state)
