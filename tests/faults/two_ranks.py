"""Two ranks of one run, without torchrun, which would end one with the other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from coordexp.distributed import RENDEZVOUS
from support.forked import forked

START_S = 300.0


@contextmanager
def two_ranks(yaml: Path, step: int) -> Iterator[list[BaseProcess]]:
    """The ranks of ``yaml``'s run, both at the forward of ``step``; they print into ``out0``, ``err0``, ``out1``
    and ``err1`` beside it."""
    folder = yaml.parent
    started = [
        forked(
            _train, str(yaml), log=folder / f"out{rank}", err=folder / f"err{rank}",
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                         RENDEZVOUS: str(folder / "store"), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
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
    """Send it a signal."""
    assert rank.pid is not None
    os.kill(rank.pid, number)


def ended(ranks: Sequence[BaseProcess], seconds: float) -> list[int | None]:
    """Their exit codes; None of one that goes on for longer."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in ranks]


def _train(yaml: str) -> None:
    """Each rank says where it is, so that the test knows when to strike."""
    from coordexp.cli import main
    from faults.forked_runs import slow_forwards

    slow_forwards(0.0)
    main(["train", yaml])
