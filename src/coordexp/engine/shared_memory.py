"""Shared memory of vLLM's tensor-parallel engines on CPUs: none of it is left behind, and none of it stops a start.

Workers of such an engine add their results in memory that all of them map, under a name in ``/dev/shm``. Where torchrun
starts the workers that name is the same for every run (``-tp:0-[0-1]-cpushm_0``), and vLLM refuses one that exists
(errno 17): what a killed run left there would end every later start.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
FOLDER = Path("/dev/shm")
_NAME = re.compile(r".*-[tp]p:\d+-\[[\d-]+\]-cpushm_\d+")
File = tuple[int, int]  # device and inode


def remove_leftovers(folder: Path = FOLDER) -> list[str]:
    """Remove this user's memory of engines that no living process holds. Returns: its names.

    Safe beside engines that start meanwhile: whoever makes such a file has it open until it has mapped it, and here is
    looked for the open file first. Processes that share ``/dev/shm`` but not this machine's list of processes
    (containers) are not seen; to an engine of theirs that runs already, the loss of the name does nothing.
    """
    found = {_identity(status): path for path, status in _files(folder)}  # before the processes are looked at
    if not found:
        return []
    held = _held(set(found))
    removed = [path.name for file, path in found.items() if file not in held and _removed(path, file)]
    if removed:
        logger.warning("%s: removed shared memory that a killed run left behind: %s", folder, ", ".join(removed))
    return removed


def forget_names(folder: Path = FOLDER) -> list[str]:
    """Remove the names of what this process has mapped; the memory stays until it ends, however it ends. Call it when
    every worker of the engine has found the others. Returns: the names."""
    own = _mapped(Path("/proc/self"))
    return [path.name for path, status in _files(folder) if _identity(status) in own and _removed(path, None)]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    if not folder.is_dir():  # no such place on this system
        return
    for path in sorted(folder.iterdir()):
        if _NAME.fullmatch(path.name):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            if status.st_uid == os.geteuid():
                yield path, status


def _identity(status: os.stat_result) -> File:
    return status.st_dev, status.st_ino


def _removed(path: Path, file: File | None) -> bool:
    """Whether it was there to be removed, and still the one that was looked at."""
    try:
        if file is not None and _identity(path.lstat()) != file:
            return False
        path.unlink()
    except FileNotFoundError:  # another rank was faster
        return False
    return True


def _held(files: set[File]) -> set[File]:
    """Those of ``files`` that a process has open or mapped."""
    held: set[File] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            held |= files & _opened(process)
            held |= files & _mapped(process)
    return held


def _opened(process: Path) -> set[File]:
    opened: set[File] = set()
    try:
        for handle in (process / "fd").iterdir():
            try:
                opened.add(_identity(handle.stat()))
            except OSError:  # closed meanwhile
                continue
    except OSError:  # ended meanwhile, or another user's, who cannot hold this user's memory
        return opened
    return opened


def _mapped(process: Path) -> set[File]:
    mapped: set[File] = set()
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:  # as above
        return mapped
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "cpushm_" in fields[5]:
            major, _, minor = fields[3].partition(":")
            mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[4])))
    return mapped
