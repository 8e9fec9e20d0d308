"""Loader processes are forked from the trainer, and keep none of its files open."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from as_shipped.starting import START_S, RowRun
from as_shipped.table import TORCHRUN, row

ONE_RANK = TORCHRUN.replace("=2", "=1")


def open_files(process: psutil.Process) -> dict[str, str]:
    """The target of each descriptor above stderr's: a path, or e.g. ``socket:[1234]``."""
    folder = Path(f"/proc/{process.pid}/fd")
    return {name: os.readlink(folder / name) for name in os.listdir(folder) if int(name) > 2}


def test_a_loader_process_holds_no_socket_lock_listener_or_log_of_the_trainer(tmp_path: Path) -> None:
    """Under torchrun, so that the trainer has connections and a listener too; of one process, to be quick."""
    run = RowRun(replace(row("stage1/sft"), command=ONE_RANK), tmp_path)
    one = run.start()
    try:
        one.until(lambda: run.steps_saved() >= 1, START_S, "a checkpoint of step 1")
        (trainer,) = [each for each in one.processes() if len(each.children()) == 4]
        theirs = open_files(trainer)
        loaders = [open_files(each) for each in trainer.children()]
        sockets = {what for what in theirs.values() if what.startswith("socket:")}
        written = {what for what in theirs.values() if what.startswith(str(run.run))}
        assert len(sockets) >= 3, "the stop signals' two ends, and torch's connections"
        assert str(run.run / "run.lock") in written
        for held in loaders:
            assert set(held.values()) & (sockets | written) == set()
        assert one.end(START_S, "the end of the run") == 0, one.output[-6000:]
        one.nothing_is_left()
    finally:
        one.kill()
