"""Patches of vLLM on CPUs. Importing this module applies them to the process; with a GPU it changes nothing.

Two kinds of process import it: workers, through the worker extension, and engine cores, through the executor classes
below, which an engine's ``distributed_executor_backend`` names. vLLM must be importable.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.layers import utils as linear_layers
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

logger = logging.getLogger(__name__)


# vLLM packs each linear weight into a private layout and empties the parameter. New weights could then not be loaded,
# and a tied language head would keep its old packed copy. So linear layers compute from their plain weights. The patch
# must be applied before the engine loads its model; vLLM resolves the worker extension earlier than that.


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]


# vLLM's processes spin on their shared-memory queues for a second after each message. With a GPU that is cheap; on a
# CPU it takes a core from the trainer that pushes weights to them. So a reader spins for the length of a decoding step,
# then sleeps for ever longer, and after a second waits for the writer's notification. Notifications alone would not do
# while messages are frequent: ZeroMQ may drop them.

SPIN_S = 0.02  # a decoding step of a small model is shorter
BACKOFF_S = 1.0
IDLE_MS = 100  # a lost notification of an idle queue costs at most this


def backoff_seconds(waited_s: float) -> float:
    """A message is noticed late by at most an eighth of the time it was waited for."""
    return min(waited_s / 8, 5e-3)


class _SleepingCondition(shm_broadcast.SpinCondition):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.busy_loop_s = 0
        self._waiting_since: float | None = None

    def record_read(self) -> None:
        super().record_read()
        self._waiting_since = None

    def wait(self, timeout_ms: int | None = None) -> None:
        """Return when there may be something to read, or earlier; the caller looks and waits again."""
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        waited_s = now - self._waiting_since
        if waited_s < SPIN_S:
            os.sched_yield()
        elif waited_s < BACKOFF_S:
            time.sleep(backoff_seconds(waited_s))
        else:
            super().wait(IDLE_MS if timeout_ms is None else min(IDLE_MS, timeout_ms))


# On CPUs vLLM starts a process for the worker even of an engine with one worker, to bind its threads to cores. We do
# not bind them. The process would cost another import of vLLM per start and two passes through a queue per decoding
# step, so the worker runs in the engine's core process, as it does with a GPU.


class CoreExecutor(UniProcExecutor): ...


class WorkersExecutor(MultiprocExecutor):
    """vLLM's own; importing it from this module patches the core process."""


# Workers of a tensor-parallel CPU engine add their results in memory that all of them map, under a name in /dev/shm.
# Under torchrun that name is the same for every run (-tp:0-[0-1]-cpushm_0), and vLLM refuses one that exists
# (errno 17): a killed run would stop every later start.

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r".*-[tp]p:\d+-\[[\d-]+\]-cpushm_\d+")
_File = tuple[int, int]  # device and inode


@contextmanager
def unnamed_shared_memory() -> Iterator[None]:
    """Around the start of an engine in this process: remove what killed runs left behind, and afterwards the names of
    this engine's own memory, so that nothing is left behind however this process ends."""
    remove_leftovers()
    yield
    forget_names()  # every worker has found the others by now


def remove_leftovers(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's memory of engines that no living process holds; returns its names.

    Safe while other engines start: they keep the file open until they have mapped it, and files are listed
    before processes are searched. Processes of other containers that share ``/dev/shm`` are not seen; a running engine
    of theirs does not need the name.
    """
    found = _files(folder)
    if not found:
        return []
    in_use = set[_File]().union(*(_in_use(process) for process in Path("/proc").iterdir() if process.name.isdigit()))
    removed = [path.name for file, path in found.items() if file not in in_use and _removed(path, file)]
    if removed:
        logger.warning("%s: removed shared memory that a killed run left behind: %s", folder, ", ".join(removed))
    return removed


def forget_names(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove the names of what this process has mapped; the memory stays until it ends."""
    own = _in_use(Path("/proc/self"))
    return [path.name for file, path in _files(folder).items() if file in own and _removed(path, file)]


def _files(folder: Path) -> dict[_File, Path]:
    """This user's shared memory of engines."""
    files = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(FileNotFoundError):
            status = path.lstat()
            if _NAME.fullmatch(path.name) and status.st_uid == os.geteuid():
                files[(status.st_dev, status.st_ino)] = path
    return files


def _removed(path: Path, file: _File) -> bool:
    try:
        status = path.lstat()
        if (status.st_dev, status.st_ino) != file:
            return False
        path.unlink()
    except FileNotFoundError:  # another rank was faster
        return False
    return True


def _in_use(process: Path) -> set[_File]:
    """Files that a process has open, and shared memory of engines that it has mapped. (psutil knows them by their names
    only, which is not enough: a name may belong to a newer file by now.)"""
    files: set[_File] = set()
    with suppress(OSError):  # it ended meanwhile, or is another user's, who cannot hold this user's memory
        for handle in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                status = handle.stat()
                files.add((status.st_dev, status.st_ino))
        for line in (process / "maps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "cpushm_" in fields[5]:
                major, _, minor = fields[3].partition(":")
                files.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return files


if current_platform.is_cpu():
    linear_layers.dispatch_cpu_unquantized_gemm = _plain_linear
    shm_broadcast.SpinCondition = _SleepingCondition
