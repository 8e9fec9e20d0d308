"""Process trees on Linux: adopt orphans, list every descendant, end them all.

A launched program starts others, some in new sessions, some renamed, some orphaned when their parent is killed. A
*subreaper* becomes the parent of those orphans, so nothing that it started leaves its tree. psutil reads the tree; the
two requests to the kernel have no library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own. No effect outside Linux."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel end this process with its parent. For ``preexec_fn``, between fork and exec."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Every living process below ``pid``, each after its parent."""
    return _living_below(pid, recursive=True)


def end_descendants(grace_s: float) -> list[int]:
    """End everything below this process: SIGTERM once to each child, and to each orphan as it is adopted; SIGKILL to
    the rest after ``grace_s``. Returns the pids that were killed."""
    own = os.getpid()
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    while descendants(own) and time.monotonic() < deadline:
        children = set(_living_below(own, recursive=False))
        _signal(children - asked, signal.SIGTERM)
        asked |= children
        _reap()
        time.sleep(_POLL_S)
    killed: list[int] = []
    while left := descendants(own):  # repeatedly: a process may have started another meanwhile
        killed += [pid for pid in left if pid not in killed]
        _signal(left, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)
    _reap()
    return killed


def exit_code(returncode: int) -> int:
    """``subprocess``'s return code as shells report it: 128 + number for a signal."""
    return 128 - returncode if returncode < 0 else returncode


def _reap() -> None:
    """Collect adopted orphans, which would stay as zombies. Takes the exit codes of ``subprocess``'s children too, so
    call it only when those are done with."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _living_below(pid: int, *, recursive: bool) -> list[int]:
    living = []
    with suppress(psutil.NoSuchProcess):  # it has just ended, and its children have another parent
        for process in psutil.Process(pid).children(recursive):
            with suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    living.append(process.pid)
    return living


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
