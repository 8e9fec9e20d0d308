"""Process trees on Linux: adopt orphans, find every descendant, end them all.

A launched program starts programs of its own, some in new sessions, some renamed, some orphaned when their parent is
killed. A *subreaper* becomes the parent of all of those orphans, so nothing that it started leaves its tree. psutil
reads the tree; the two requests to the kernel have no library.

:func:`run_plan` hands a launch's plan to a supervisor, forwards signals to it, and outlives it only to tidy up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

from coordexp.serving.launch.plan import LaunchPlan

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its own. Nothing outside Linux."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to end this process with its parent. For ``preexec_fn``: between fork and exec."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Every living process below ``pid``, each behind its parent."""
    return _living_below(pid, recursive=True)


def end_descendants(grace_s: float) -> list[int]:
    """End everything below this process: children, and orphans as they are adopted, are asked once each; what is left
    after ``grace_s`` is killed.

    Returns: what had to be killed.
    """
    own = os.getpid()
    asked: set[int] = set()
    deadline = time.monotonic() + grace_s
    while descendants(own) and time.monotonic() < deadline:
        children = set(_living_below(own, recursive=False))
        _signal(children - asked, signal.SIGTERM)
        asked |= children
        reap()
        time.sleep(_POLL_S)
    killed: list[int] = []
    while left := descendants(own):  # again and again: a process may have started another meanwhile
        killed += [pid for pid in left if pid not in killed]
        _signal(left, signal.SIGKILL)
        reap()
        time.sleep(_POLL_S)
    reap()
    return killed


def reap() -> None:
    """Take the exit codes of adopted orphans, which would stay as zombies. Not for children of ``subprocess``, whose
    codes it would take too: call it when those are done with."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def exit_code(returncode: int) -> int:
    """``subprocess``'s return code as a shell writes it: 128 + number for a signal."""
    return 128 - returncode if returncode < 0 else returncode


def _living_below(pid: int, *, recursive: bool) -> list[int]:
    living = []
    with suppress(psutil.NoSuchProcess):  # it has just ended, and what was below it is somebody else's
        for process in psutil.Process(pid).children(recursive):
            with suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    living.append(process.pid)
    return living


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def run_plan(plan: LaunchPlan) -> int:
    """Run ``plan`` to its end; returns the learner's exit code.

    Whatever happens, nothing that was started is left: the supervisor ends everything when this process is gone, and
    this process, which adopts what a killed supervisor leaves, ends the rest.
    """
    adopt_orphans()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "coordexp.serving.launch.supervisor"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
    )
    assert supervisor.stdin is not None
    handlers = {
        number: signal.signal(number, lambda received, _: supervisor.send_signal(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    try:
        supervisor.stdin.write(plan.to_json().encode() + b"\n")
        supervisor.stdin.flush()
        return exit_code(supervisor.wait())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
        supervisor.stdin.close()
        end_descendants(grace_s=0.0)
