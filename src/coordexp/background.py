"""Calls in threads of their own: one that may hang in C++ until some deadline, or one thread that works ahead.

They are daemons, and a daemon that returns from C++ while the interpreter is being taken down aborts the process (exit
code -6 instead of the error's own). So the end of the process waits for them, but not for long.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import Empty, SimpleQueue
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
    """Calls ``prepare`` on each of ``items`` in one thread, at most ``ahead`` more than were taken.

    One thread for all of them: on a busy machine a new thread waits for its first turn. It ends with the last item,
    with the first error, which :meth:`take` raises, and with :meth:`stop`. As a context: leaving it stops the thread.
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
    ) -> None:
        """The first is begun at once. ``timeout_error``: of an item that is not ready after ``deadline_s`` seconds."""
        self._items = items
        self._prepare = prepare
        self._deadline_s = deadline_s
        self._timeout_error = timeout_error
        self._room = threading.Semaphore(ahead)
        self._stopped = threading.Event()
        self._ready: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()
        self._begun = self._taken = 0
        self._work = in_background(self._prepare_all, name)

    def __len__(self) -> int:
        return len(self._items) - self._taken

    @property
    def has_unconsumed(self) -> bool:
        return self._begun > self._taken

    def take(self) -> tuple[Item, Result]:
        """The next item and its result; waits for it. Raises the timeout error, or that of preparing the item; no item
        can be taken afterwards."""
        assert self and not self._stopped.is_set(), "more was taken than there is, or after the end"
        item = self._items[self._taken]
        try:
            result, error = self._ready.get(timeout=self._deadline_s)
        except Empty:
            self._begin_no_more()
            raise self._timeout_error(item) from None
        if error is not None:
            self._begin_no_more()
            raise error
        self._taken += 1
        self._room.release()
        return item, result  # pyright: ignore[reportReturnType]  # without an error it is a result

    def stop(self) -> None:
        """Begin no further item, and wait up to :data:`STOP_S` for the one under way. Safe to call twice."""
        self._begin_no_more()
        wait([self._work], STOP_S)

    def __enter__(self) -> Prefetcher[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin_no_more(self) -> None:
        self._stopped.set()
        self._room.release()

    def _prepare_all(self) -> None:
        for item in self._items:
            self._room.acquire()  # _begin_no_more makes room, so this always returns
            if self._stopped.is_set():
                return
            self._begun += 1
            try:
                self._ready.put((self._prepare(item), None))
            except BaseException as error:  # raised by take()
                self._ready.put((None, error))
                return


@atexit.register
def _wait_at_exit() -> None:
    deadline = time.monotonic() + AT_EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
