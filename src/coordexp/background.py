"""Calls in threads of their own: one that may hang in C++ until some deadline, or one thread that works ahead.

They are daemons, and a daemon that comes back from C++ while the interpreter is being taken down aborts the process
(exit code -6 in place of the error's own). So the end of the process waits for them, a little.
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

Asked = TypeVar("Asked")
Result = TypeVar("Result")
AT_EXIT_S = 5.0
STOP_S = 10.0
_running: WeakSet[threading.Thread] = WeakSet()


def in_background(act: Callable[[], Result], name: str) -> Future[Result]:
    """Run ``act`` in a daemon thread. ``name``: the thread's."""
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


class PreparedAhead(Generic[Asked, Result]):
    """``prepare`` of each of ``asked``, one after the other in one thread, at most ``ahead`` more than were taken.

    One thread for all of them: on a busy machine a new thread waits for its first turn. It ends with the last one, with
    the first error, which is raised where its result is taken, and with :meth:`stop`. As a context: its end stops it.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        prepare: Callable[[Asked], Result],
        *,
        ahead: int,
        deadline_s: float,
        late: Callable[[Asked], Exception],
        name: str,
    ) -> None:
        """The first is begun at once. ``late``: the error for one that is not there after ``deadline_s`` seconds."""
        self._asked = asked
        self._prepare = prepare
        self._deadline_s = deadline_s
        self._late = late
        self._room = threading.Semaphore(ahead)
        self._stopped = threading.Event()
        self._ready: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()
        self._begun = self._taken = 0
        self._work = in_background(self._prepare_all, name)

    def __len__(self) -> int:
        """How many are still to be taken."""
        return len(self._asked) - self._taken

    @property
    def left_over(self) -> bool:
        """Whether something was begun that nobody took."""
        return self._begun > self._taken

    def take(self) -> tuple[Asked, Result]:
        """The next one and what was made of it, for which this waits where it must.

        Raises:
            The error of ``late``, or whatever preparing it raised; none can be taken afterwards.
        """
        assert self and not self._stopped.is_set(), "more was taken than was asked for, or behind the end"
        one = self._asked[self._taken]
        try:
            result, error = self._ready.get(timeout=self._deadline_s)
        except Empty:
            self._begin_no_more()
            raise self._late(one) from None
        if error is not None:
            self._begin_no_more()
            raise error
        self._taken += 1
        self._room.release()
        return one, result  # pyright: ignore[reportReturnType]  # there is one where there is no error

    def stop(self) -> None:
        """Begin none any more, and wait, not for long, for the one under way. Safe to call twice."""
        self._begin_no_more()
        wait([self._work], STOP_S)

    def __enter__(self) -> PreparedAhead[Asked, Result]:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin_no_more(self) -> None:
        self._stopped.set()
        self._room.release()

    def _prepare_all(self) -> None:
        for one in self._asked:
            self._room.acquire()  # ends with the context, which makes room
            if self._stopped.is_set():
                return
            self._begun += 1
            try:
                self._ready.put((self._prepare(one), None))
            except BaseException as error:  # whoever takes it gets it
                self._ready.put((None, error))
                return


@atexit.register
def _wait_at_exit() -> None:
    deadline = time.monotonic() + AT_EXIT_S
    for thread in list(_running):
        thread.join(max(0.0, deadline - time.monotonic()))
