"""One process of a distributed run with a fault built in: a checkpoint that is cut short, or a step that fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import train_worker

from coordexp.distributed import rank
from coordexp.packing import CarryBuffer
from coordexp.training import saving


def kill_rank_1_behind_rank_0s_last_file(step: int) -> None:
    """All files are written, and the checkpoint is not sealed yet."""
    seal = saving.seal_checkpoint

    def seal_or_die(folder: Path, *arguments: Any, **options: Any) -> None:
        if rank() == 1 and folder.name == f"checkpoint-{step}":
            deadline = time.monotonic() + 60
            while not (folder / "trainer_state.json").is_file():
                assert time.monotonic() < deadline, "rank 0 wrote no trainer_state.json"
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        seal(folder, *arguments, **options)

    saving.seal_checkpoint = seal_or_die


def overflow_on_rank_1(insertion: int) -> None:
    """The buffer of one rank is too small for its ``insertion``-th segments, behind others of the same step."""
    insert, inserted = CarryBuffer.insert, 0

    def insert_or_overflow(self: CarryBuffer, *segments: Any) -> None:
        nonlocal inserted
        inserted += 1
        if rank() == 1 and inserted == insertion:
            self.max_segments, limit = 1, self.max_segments
            try:
                insert(self, *segments)
            finally:
                self.max_segments = limit
        insert(self, *segments)

    CarryBuffer.insert = insert_or_overflow  # type: ignore[method-assign]


if __name__ == "__main__":
    {"kill": kill_rank_1_behind_rank_0s_last_file, "overflow": overflow_on_rank_1}[sys.argv[2]](int(sys.argv[3]))
    train_worker.main(sys.argv[1])
