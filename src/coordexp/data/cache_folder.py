"""Where validated datasets are kept between starts, and the lock under which one process does a piece of work that
several want: the others take over what came of it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.data.files import write_atomically
from coordexp.errors import DataError

logger = logging.getLogger("coordexp")

VARIABLE = "COORDEXP_CACHE"
"""The environment variable that names the folder. Everything in it can be made again: delete it as you like."""


def cache_folder() -> Path:
    """The first of these that can be written to: :data:`VARIABLE`, ``coordexp`` in the user's cache folder
    (``XDG_CACHE_HOME``, else ``~/.cache``), a folder of the user's own among temporary files. The log names those
    that are passed over.

    Raises:
        DataError: none can be written to.
    """
    refused: list[str] = []
    for folder in _places():
        try:
            _try_to_write(folder)
        except OSError as error:
            refused.append(f"{folder} ({error.strerror or error})")
            continue
        if refused and distributed.is_main():
            logger.warning(
                "validated datasets are kept in %s, as nothing can be written to %s; name a folder with %s",
                *(folder, ", ".join(refused), VARIABLE),
            )
        return folder
    raise DataError(f"validated datasets can be kept nowhere: {', '.join(refused)}; name a folder with {VARIABLE}")


def _places() -> Iterator[Path]:
    if named := os.environ.get(VARIABLE):
        yield Path(named).expanduser().absolute()
    users = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # a user without a home
        yield (Path(users) if os.path.isabs(users) else Path.home() / ".cache") / "coordexp"
    yield Path(tempfile.gettempdir()) / f"coordexp-{os.getuid()}"


def _try_to_write(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent == Path(tempfile.gettempdir()) and folder.stat().st_uid != os.getuid():
        raise PermissionError(None, "another user's", str(folder))  # who could lay files there for us to train on
    with tempfile.TemporaryFile(dir=folder):
        pass


_POLL_S = 0.1


class SharedWork:
    """Work on a folder that one process at a time does.

    Whoever came while it was being done takes over its outcome instead of doing it again; who comes later does it
    again, since the world may have changed. The kernel lets go of the lock however a process ends, and one that ended
    without an outcome leaves the work to the next.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = folder / "lock"
        self._attempt = folder / "attempt.json"
        self._outcome = folder / "outcome.json"

    @contextmanager
    def turn(self, wait_s: float) -> Iterator[dict[str, Any] | None]:
        """This process's turn. Gives the outcome that was left for it, or None where it must do the work itself and
        then :meth:`leave` an outcome.

        Raises:
            DataError: another process had it for longer than ``wait_s``, or the folder's file system knows no locks.
        """
        # A lock of the process, not of the open file: processes that are forked for the work do not inherit it.
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            seen = self._wait(descriptor, wait_s)
            left = _read(self._outcome)
            if left is not None and left["attempt"] in seen:
                yield left["outcome"]
                return
            self._outcome.unlink(missing_ok=True)
            me = {"attempt": uuid.uuid4().hex, "pid": os.getpid(), "host": socket.gethostname()}
            write_atomically(self._attempt, json.dumps(me))
            yield None
        finally:
            os.close(descriptor)

    def leave(self, outcome: dict[str, Any]) -> None:
        """What came of the work, for those who wait; JSON can hold it. Within :meth:`turn`."""
        attempt = _read(self._attempt)
        assert attempt is not None, "left by whoever does the work"
        write_atomically(self._outcome, json.dumps({"attempt": attempt["attempt"], "outcome": outcome}))

    def _wait(self, descriptor: int, wait_s: float) -> set[str]:
        """Take the lock. Returns the attempts that were going on meanwhile."""
        deadline = time.monotonic() + wait_s
        seen: set[str] = set()
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return seen
            except (BlockingIOError, PermissionError):  # held; which of the two is the system's choice
                attempt = _read(self._attempt)
            except OSError as error:
                raise DataError(
                    f"cannot be locked ({error.strerror}); name a folder of a file system with locks by COORDEXP_CACHE",
                    path=self._lock,
                ) from error
            if attempt is not None:
                seen.add(attempt["attempt"])
            if time.monotonic() > deadline:
                holder = "another process" if attempt is None else f"process {attempt['pid']} on {attempt['host']}"
                raise DataError(
                    f"waited {wait_s:.0f} s for {holder}, which validates this dataset; if it is alive, wait longer "
                    "with training.ddp_timeout, else end it",
                    path=self._lock.parent,
                )
            time.sleep(_POLL_S)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
