"""Runs of ``coordexp train`` that kill themselves where they are told to.

Every run is a process of its own, forked from one that has imported everything and done nothing else: a run of a tiny
model takes a second or two instead of the twenty of a fresh interpreter, and SIGKILL ends it as it would any other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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

    log: str
    death: Death = Death()
    environment: Mapping[str, str] = field(default_factory=dict)


class Forked:
    """The other end of :func:`serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, yaml: Path, processes: Sequence[Process]) -> list[int]:
        """Statuses of a run's processes, negative for a signal; the first that is killed takes the others along, as
        when their machine goes down."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"yaml": str(yaml), "processes": [asdict(one) for one in processes]}))
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def forking() -> Iterator[Forked]:
    """A process that forks runs, for as long as the context is open."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "faults.forked_runs"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    try:
        yield Forked(process)
    finally:
        process.kill()
        process.wait()


def serve() -> None:
    """Fork a run for each line of the input."""
    import accelerate  # noqa: F401
    import transformers.models.qwen3_vl.modeling_qwen3_vl
    import transformers.models.qwen3_vl.processing_qwen3_vl  # noqa: F401
    from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer  # noqa: F401

    import coordexp.cli
    import coordexp.training.build
    import coordexp.training.trainer  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        wanted = json.loads(line)
        started = [_fork(wanted["yaml"], one) for one in wanted["processes"]]
        answers.write(json.dumps(_statuses(started)) + "\n")
        answers.flush()


def _fork(yaml: str, one: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(one["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(one["environment"])
        die(**one["death"])
        from coordexp.cli import main

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


def _statuses(pids: Sequence[int]) -> list[int]:
    """Of all, once all have ended."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < len(pids):
        for pid in pids:
            if pid in ended:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status)
                if ended[pid] < 0:
                    deadline = 0.0
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [ended[pid] for pid in pids]


def die(aim: str, times: int, when: str, error: str) -> None:
    """Have this process kill itself there."""
    if not aim:
        return
    from accelerate import Accelerator

    from coordexp.training import saving, seal
    from coordexp.training.trainer import CoordExpTrainer

    def end() -> None:
        if error:
            raise RuntimeError(error)
        os.kill(os.getpid(), signal.SIGKILL)

    owner: Any = next(one for one in (CoordExpTrainer, saving, seal, Accelerator) if hasattr(one, aim))
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


if __name__ == "__main__":
    serve()
