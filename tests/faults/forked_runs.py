"""Runs of ``coordexp train`` that kill themselves where they are told to, in processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forked import forked

DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Death:
    """``times``-th call of ``aim``, ``when`` before or behind it; no ``aim``: the run lives. ``error``: it raises this
    there instead, as a library would."""

    aim: str = ""
    times: int = 0
    when: str = "before"
    error: str = ""

    def __str__(self) -> str:
        return f"{self.when} call {self.times} of {self.aim}" if self.aim else "none"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a run."""

    log: Path
    death: Death = Death()
    environment: Mapping[str, str] = field(default_factory=dict)


def run_all(yaml: Path, processes: Sequence[Process]) -> list[int]:
    """Statuses of a run's processes, negative for a signal, once all have ended; the first that is killed takes the
    others along, as when their machine goes down."""
    started = [forked(_train, str(yaml), one.death, log=one.log, environment=one.environment) for one in processes]
    deadline = time.monotonic() + DEADLINE_S
    while any(one.exitcode is None for one in started):
        if time.monotonic() > deadline or any((one.exitcode or 0) < 0 for one in started):
            for one in started:
                one.kill()
        time.sleep(0.02)
    return [int(one.exitcode or 0) for one in started]


def _train(yaml: str, death: Death) -> None:
    from coordexp.cli import main

    status = 1
    try:
        die(death.aim, death.times, death.when, death.error)
        main(["train", yaml])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def die(aim: str, times: int, when: str, error: str) -> None:
    """Have this process kill itself there."""
    if not aim:
        return
    from accelerate import Accelerator

    from coordexp.objective import RowTensors
    from coordexp.training import loop, saving, seal
    from coordexp.training.loop import CoordExpTrainer
    from coordexp.training.step import TrainStep

    def end() -> None:
        if error:
            raise RuntimeError(error)
        os.kill(os.getpid(), signal.SIGKILL)

    owners = (TrainStep, RowTensors, CoordExpTrainer, saving, loop, seal, Accelerator)
    owner: Any = next(one for one in owners if hasattr(one, aim))
    act, left = getattr(owner, aim), times

    def act_or_die(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and when == "before":
            end()
        result = act(*arguments, **options)
        if left == 0:
            end()
        return result

    setattr(owner, aim, act_or_die)


def train_slowly(yaml: str, pause_s: float) -> None:
    """``coordexp train`` that says each forward's step, and pauses before it."""
    from coordexp.cli import main

    slow_forwards(pause_s)
    main(["train", yaml])


def slow_forwards(pause_s: float) -> None:
    """Have this process print each forward's step, and pause before it."""
    from coordexp.objective import RowTensors
    from coordexp.training.step import TrainStep

    accumulate, to, under_way = TrainStep.accumulate, RowTensors.to, [0]

    def accumulate_noted(self: TrainStep, batches: Any, step: int) -> None:
        under_way[0] = step + 1
        accumulate(self, batches, step)

    def to_slowly(self: RowTensors, device: Any) -> RowTensors:
        print("forward of step", under_way[0], flush=True)
        time.sleep(pause_s)
        return to(self, device)

    TrainStep.accumulate, RowTensors.to = accumulate_noted, to_slowly
