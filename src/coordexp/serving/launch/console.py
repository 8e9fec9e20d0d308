"""What ``coordexp launch`` shows: lines with the time since the start, and on a terminal one that changes in place."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

_CLEAR_LINE = "\r\x1b[2K"


class LaunchView:
    """Writes to ``out``; where that is no terminal, only what is worth keeping in a file."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._started = time.monotonic()
        self._pending = False  # the cursor stands behind a line that the next one replaces

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(f"[{time.monotonic() - self._started:6.1f} s] {text}\n")

    def waiting(self, name: str, doing: str) -> None:
        """What is being waited for, and the newest line of its log."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"[{time.monotonic() - self._started:6.1f} s] {name}: starting · {doing.strip()}"[:width])
            self._pending = True

    def pass_on(self, text: str) -> None:
        """The learner's own output, as it is."""
        if text:
            self._write(text)

    def _write(self, text: str) -> None:
        if self._pending:
            self._out.write(_CLEAR_LINE)
            self._pending = False
        self._out.write(text)
        self._out.flush()
