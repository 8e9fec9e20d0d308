"""Checks of ``coordexp doctor`` that fail in every way; importable, because other processes run them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from coordexp import distributed
from coordexp.doctor.check import Row, Settings, attempted
from coordexp.errors import RolloutError


def fine(settings: Settings) -> Iterator[Row]:
    yield Row("first", "ok", f"{distributed.world_size()} ranks")
    yield Row("second", "ok")


def raises(settings: Settings) -> Iterator[Row]:
    yield Row("first", "ok")
    raise ValueError("a broken kernel")


def goes_on(settings: Settings) -> Iterator[Row]:
    def refused(check: str) -> Row:
        raise RolloutError("the engine refused")

    yield Row("first", "ok")
    yield attempted("second", "install another one", refused)
    yield Row("third", "ok")


def crashes(settings: Settings) -> Iterator[Row]:
    yield Row("first", "ok")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(settings: Settings) -> Iterator[Row]:
    (settings.folder / "pid").write_text(str(os.getpid()))
    yield Row("first", "ok")
    time.sleep(600)


def last_rank_raises(settings: Settings) -> Iterator[Row]:
    """While the first one waits for it."""
    yield Row("first", "ok")
    if distributed.rank() > 0:
        raise ValueError("the last rank's own error")
    time.sleep(600)
