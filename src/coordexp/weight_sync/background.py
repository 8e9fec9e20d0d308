"""Calls in threads of their own, which may hang in C++ until some deadline without holding anybody up.

They are daemons, and a daemon that comes back from C++ while the interpreter is being taken down aborts the process
(exit code -6 in place of the error's own). So the end of the process waits for them, a little.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar
from weakref import WeakSet

Result = TypeVar("Result")
AT_EXIT_S = 5.0
_running: WeakSet[threading.Thread] = WeakSet()


def in_background(act: Callable[[], Result], name: str = "weight-push") -> Future[Result]:
    """Run ``act`` in a daemon thread."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # the future's owner gets it
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name=name)
    _running.add(thread)
    thread.start()
    return future


def wait_for_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all; the first error ends the waiting."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


@atexit.register
def _wait_at_exit() -> None:
    deadline = time.monotonic() + AT_EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
