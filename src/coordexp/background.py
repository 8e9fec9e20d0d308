"""Calls in threads of their own: one that may hang in C++ until some deadline, or threads that work ahead.

They are daemons, and a daemon that returns from C++ while the interpreter is being taken down aborts the process (exit
code -6 instead of the error's own). So the end of the process waits for them, but not for long.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Generic, TypeVar
from weakref import WeakSet

Item = TypeVar("Item")
Result = TypeVar("Result")
AT_EXIT_S = 5.0
STOP_S = 10.0
_running: WeakSet[threading.Thread] = WeakSet()


def in_background(act: Callable[[], Result], name: str, *, exit_waits: bool = True) -> Future[Result]:
    """Run ``act`` in a daemon thread called ``name``. ``exit_waits``: needed by calls that hang in C++."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # the future's owner gets it
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name=name)
    if exit_waits:
        _running.add(thread)
    thread.start()
    return future


def wait_for_all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all; the first error ends the waiting."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


class Prefetcher(Generic[Item, Result]):
    """Calls ``prepare`` on each of ``items`` in ``threads`` threads, at most ``ahead`` more than were taken.

    The same threads for all of them: on a busy machine a new thread waits for its first turn. They end with the last
    item, with the first error, which :meth:`take` raises in its turn, and with :meth:`stop`. As a context: leaving it
    stops them.
    """

    def __init__(
        self,
        items: Sequence[Item],
        prepare: Callable[[Item], Result],
        *,
        ahead: int,
        deadline_s: float,
        timeout_error: Callable[[Item], Exception],
        name: str,
        threads: int = 1,
    ) -> None:
        """The first is begun at once. ``timeout_error``: of an item that is not ready after ``deadline_s`` seconds."""
        self._prepare = prepare
        self._deadline_s = deadline_s
        self._timeout_error = timeout_error
        self._room = threading.Semaphore(ahead)
        self._not_taken: deque[tuple[Item, Future[Result]]] = deque((item, Future()) for item in items)
        self._not_begun = self._not_taken.copy()
        self._work = [in_background(self._prepare_all, name) for _ in range(min(threads, len(items)))]

    def __len__(self) -> int:
        return len(self._not_taken)

    def take(self) -> tuple[Item, Result]:
        """The next item and its result; waits for it. Raises the timeout error, or that of preparing the item; no item
        can be taken afterwards."""
        assert self, "more was taken than there is, or after an error"
        item, outcome = self._not_taken.popleft()
        try:
            if not wait([outcome], self._deadline_s).done:
                raise self._timeout_error(item)
            result = outcome.result()
        except BaseException:
            self._not_taken.clear()
            self._begin_no_more()
            raise
        self._room.release()
        return item, result

    def stop(self) -> None:
        """Begin no further item, and wait up to :data:`STOP_S` for those under way. Safe to call twice."""
        self._begin_no_more()
        wait(self._work, STOP_S)

    def __enter__(self) -> Prefetcher[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin_no_more(self) -> None:
        self._not_begun.clear()
        self._room.release()

    def _prepare_all(self) -> None:
        while True:
            self._room.acquire()  # _begin_no_more makes room, so this always returns
            try:
                item, outcome = self._not_begun.popleft()
            except IndexError:
                self._room.release()  # for the next thread
                return
            try:
                outcome.set_result(self._prepare(item))
            except BaseException as error:  # raised by take()
                outcome.set_exception(error)
                self._begin_no_more()
            del item, outcome  # which may hold megabytes


@atexit.register
def _wait_at_exit() -> None:
    deadline = time.monotonic() + AT_EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
