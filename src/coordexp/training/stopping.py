"""Stop signals (Ctrl-C, SIGTERM, and the SIGUSR1 of batch systems): the run finishes its step, saves, and ends.

A second Ctrl-C or SIGTERM ends it at once, and so does a deadline for a step that hangs.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from coordexp import distributed

_ENDING = (signal.SIGINT, signal.SIGTERM)
_SIGNALS = (*_ENDING, signal.SIGUSR1)
_AT_ONCE_S = 5.0  # for cleaning up after a second signal


class StopSignals:
    """Records the first stop signal while the context is open; ``asked`` is its number.

    Signals are read by a thread: the main thread may be inside a library that does not return
    to Python, waiting for another process, and the deadline must still apply.
    """

    def __init__(self, within_s: float, last_saved: Callable[[], str]) -> None:
        """``within_s``: ``training.stop_within_s``; ``last_saved``: a sentence about what is on the disk."""
        self.asked: int | None = None
        self._within_s = within_s
        self._last_saved = last_saved
        self._handlers: dict[int, Any] = {}
        self._ends: list[socket.socket] = []
        self._wakeup = -1
        self._reader: threading.Thread | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> StopSignals:
        global _open
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's
        reads, writes = socket.socketpair()
        writes.setblocking(False)
        self._ends = [reads, writes]
        self._reader = threading.Thread(target=self._read, args=(reads,), name="stop signals", daemon=True)
        self._reader.start()
        self._handlers = {number: signal.signal(number, self._note) for number in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        _open = self
        return self

    def __exit__(self, *_: object) -> None:
        global _open
        if self._reader is None:
            return
        _open = None
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        reads, writes = self._ends
        # A close alone does not end the reading: a process forked in the meantime may still hold a copy of this end.
        writes.shutdown(socket.SHUT_WR)
        writes.close()
        self._reader.join()  # it may still read a signal and set the timer
        reads.close()
        if self._timer is not None:
            self._timer.cancel()
        self._ends = []

    def _note(self, number: int, _: FrameType | None) -> None:
        """The signal handler. Python runs it in the main thread."""
        if self.asked is None or self.asked not in _ENDING:
            self.asked = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number == signal.SIGTERM:
            raise SystemExit(128 + number)

    def _read(self, reads: socket.socket) -> None:
        asked: int | None = None
        while data := reads.recv(64):
            for number in data:
                if number not in _SIGNALS or (asked is not None and number not in _ENDING):
                    continue
                if asked not in _ENDING:  # none, or a batch system's SIGUSR1, whose time goes on
                    _say(
                        f"{_name(number)}: the step under way is finished and saved, then the run ends (at most "
                        f"{self._within_s:g} s, training.stop_within_s)"
                        + (". Once more ends it at once" if number in _ENDING else "")
                    )
                    if asked is None:
                        self._end_in(self._within_s, f"the step was not finished {self._within_s:g} s after", number)
                else:
                    _say(f"{_name(number)} again: ending at once. {self._last_saved()}")
                    self._end_in(_AT_ONCE_S, "ended after a second", number)
                asked = number

    def _end_in(self, seconds: float, why: str, number: int) -> None:
        def end() -> None:
            _say(f"{why} {_name(number)}. {self._last_saved()}")
            os._exit(128 + number)

        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, end)
        self._timer.daemon = True
        self._timer.start()


_open: StopSignals | None = None


def _leave_signals_to_the_parent() -> None:
    """In a forked child (one that loads data): Ctrl-C reaches it too, and must not end the current step."""
    if _open is not None:
        signal.set_wakeup_fd(-1)
        for end in _open._ends:
            end.close()  # the child's copies
        signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which a program started from here would inherit
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_signals_to_the_parent)


def _say(text: str) -> None:
    """Write to stderr without Python's buffers and locks, which the main thread may hold."""
    prefix = f"rank {distributed.rank()}: " if distributed.world_size() > 1 else ""
    os.write(2, f"\n{prefix}{text}\n".encode())


def _name(number: int) -> str:
    return signal.Signals(number).name
