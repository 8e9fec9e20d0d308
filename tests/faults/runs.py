"""Runs of ``coordexp train`` in their own processes, killed by themselves or by a test."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from coordexp.distributed import RENDEZVOUS
from support.forked import forked

DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True)
class Death:
    """Kill the process before or after (``when``) the ``times``-th call of ``aim``; without ``aim`` it lives. With
    ``error``, the call raises that instead."""

    aim: str = ""
    times: int = 0
    when: str = "before"
    error: str = ""

    def __str__(self) -> str:
        return f"{self.when} call {self.times} of {self.aim}" if self.aim else "none"


LIVES = Death()


def rank_environment(folder: Path, rank: int) -> dict[str, str]:
    """Environment of one of two ranks without torchrun, which would end one with the other."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            RENDEZVOUS: str(folder / "store"), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip


def run_all(folder: Path, ranks: int, death: Death = LIVES, dies: int = 0, odd: str = "run.yaml") -> list[int]:
    """Train ``folder/run.yaml``; rank ``dies`` dies. If one is killed, the others are killed too, as if their machine
    went down. ``odd``: the file of the last rank.

    Returns:
        The exit codes, negative for a signal.
    """
    (folder / "store").unlink(missing_ok=True)
    started = [
        forked(
            _train, str(folder / (odd if rank == ranks - 1 else "run.yaml")), death if rank == dies else LIVES,
            log=folder / f"log{rank}",
            environment=rank_environment(folder, rank) if ranks > 1 else {},
        )
        for rank in range(ranks)
    ]  # fmt: skip
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
    """Have this process kill itself, or raise, at that call."""
    if not aim:
        return
    from accelerate import Accelerator

    from coordexp.modeling.scores import TokenScorer
    from coordexp.objective import RowObjective, RowTensors
    from coordexp.recording.writer import RolloutRecorder
    from coordexp.rollouts.hf import HFBackend
    from coordexp.training import batches, checkpoint, loop, saving, step_answers
    from coordexp.training.loop import CoordExpTrainer
    from coordexp.training.progress import RichProgress
    from coordexp.training.step import TrainStep

    def end() -> None:
        if error:
            raise RuntimeError(error)
        os.kill(os.getpid(), signal.SIGKILL)

    owners = (
        *(TrainStep, RowTensors, CoordExpTrainer, saving, loop, checkpoint, Accelerator, HFBackend, TokenScorer),
        *(RowObjective, RolloutRecorder, RichProgress, step_answers, batches),
    )
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
    """``coordexp train`` that prints the step of each forward and pauses before it."""
    from coordexp.cli import main
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
    main(["train", yaml])


@contextmanager
def two_ranks(yaml: Path, step: int) -> Iterator[list[BaseProcess]]:
    """The ranks of ``yaml``'s run, both at the forward of ``step``; they print into ``out0``, ``err0``, ``out1``
    and ``err1`` next to it."""
    folder = yaml.parent
    started = [
        forked(
            train_slowly, str(yaml), 0.0, log=folder / f"out{rank}", err=folder / f"err{rank}",
            environment=rank_environment(folder, rank),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE_S
        for rank, process in enumerate(started):
            while f"forward of step {step}\n" not in (folder / f"out{rank}").read_text():
                assert process.is_alive() and time.monotonic() < deadline, (folder / f"err{rank}").read_text()
                time.sleep(0.02)
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def strike(rank: BaseProcess, number: signal.Signals) -> None:
    assert rank.pid is not None
    os.kill(rank.pid, number)


def ended(ranks: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    """Their exit codes, None if one still runs."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in ranks]
