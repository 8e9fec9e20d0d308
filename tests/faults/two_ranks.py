"""Two ranks of one run, without torchrun, which would end one with the other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordexp.distributed import RENDEZVOUS

# Each rank says where it is, so that the test knows when to strike.
_RANK = """
import sys
from coordexp.training.trainer import CoordExpTrainer
forward = CoordExpTrainer.compute_loss
def told(self, *arguments, **options):
    print("forward of step", self.state.global_step + 1, flush=True)
    return forward(self, *arguments, **options)
CoordExpTrainer.compute_loss = told
from coordexp.cli import main
main(["train", sys.argv[1]])
"""


@contextmanager
def two_ranks(yaml: Path, step: int) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of ``yaml``'s run, both at the forward of ``step``; what they print goes to ``err0`` and ``err1``
    beside it."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(yaml)],
            stdout=subprocess.PIPE, stderr=(yaml.parent / f"err{rank}").open("w"), text=True,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                              RENDEZVOUS: str(yaml.parent / "store"), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(started):
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(f"forward of step {step}"):
                    break
            else:
                raise AssertionError((yaml.parent / f"err{rank}").read_text())
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def ended(ranks: Sequence[subprocess.Popen[str]], seconds: float) -> list[int]:
    """Their exit codes. Raises subprocess.TimeoutExpired where one goes on for longer."""
    for process in ranks:
        process.communicate(timeout=seconds)
    return [process.returncode for process in ranks]
