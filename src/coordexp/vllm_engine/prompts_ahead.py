"""Requests that are made ready in a thread of their own while an engine decodes: in order, not too many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from coordexp.errors import RolloutError
from coordexp.weight_sync.background import in_background

Asked = TypeVar("Asked")
Ready = TypeVar("Ready")
AHEAD = 16  # requests that may wait with their processed images: megabytes each, in main memory
PREPARE_S = 600.0  # far beyond what any image needs: a file system that hangs
STOP_S = 10.0


class PreparedAhead(Generic[Asked, Ready]):
    """``prepare`` of each of ``asked``, one after the other, at most ``ahead`` more than were taken. As a context: its
    end is the thread's."""

    def __init__(
        self,
        asked: Sequence[Asked],
        prepare: Callable[[Asked], Ready],
        name_of: Callable[[Asked], str],
        *,
        ahead: int = AHEAD,
        deadline_s: float = PREPARE_S,
    ) -> None:
        """``name_of``: what an error calls one. The first is begun at once."""
        self._asked = asked
        self._prepare = prepare
        self._name_of = name_of
        self._deadline_s = deadline_s
        self._room = threading.Semaphore(ahead)
        self._stopped = threading.Event()
        self._ready: SimpleQueue[tuple[Ready | None, BaseException | None]] = SimpleQueue()
        self._begun = self._taken = 0
        self._work = in_background(self._prepare_all, name="prompts")

    def __len__(self) -> int:
        """How many are still to be taken."""
        return len(self._asked) - self._taken

    @property
    def left_over(self) -> bool:
        """Whether something was begun that nobody took."""
        return self._begun > self._taken

    def take(self) -> tuple[Asked, Ready]:
        """The next one, for which this waits where it must.

        Raises:
            RolloutError: it is not there in time. Whatever preparing it raised.
        """
        one = self._asked[self._taken]
        try:
            ready, error = self._ready.get(timeout=self._deadline_s)
        except Empty:
            raise RolloutError(
                f"{self._name_of(one)}: its prompt and image are not ready after {self._deadline_s:g} s; see whether "
                "the file system hangs, and start again with training.resume_from_checkpoint: true"
            ) from None
        if error is not None:
            raise error
        assert ready is not None
        self._taken += 1
        self._room.release()
        return one, ready

    def __enter__(self) -> PreparedAhead[Asked, Ready]:
        return self

    def __exit__(self, *_: object) -> None:
        """Begin none any more, and wait, not for long, for the one under way."""
        self._stopped.set()
        self._room.release()
        wait([self._work], STOP_S)

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
