"""Folders of temporary files that a later process removes if SIGKILL ended the one that made them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_YOUNG_S = 60.0  # a folder that was just made may not be locked yet


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder among temporary files, removed at the end; and so are those of this prefix whose processes are gone.
    A living process holds its folder's lock. ``prefix``: one that nobody else uses."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or another process removes it
            _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # of a file system without locks, where nobody can remove it by its lock either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_if_left(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        state = os.fstat(descriptor)
        if state.st_uid == os.getuid() and time.time() - state.st_mtime > _YOUNG_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)
