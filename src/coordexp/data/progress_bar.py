"""Progress of long work: a bar with ETA on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from coordexp.printable import printable

LINE_EVERY_S = 30.0


class _LiteralConsole(Console):
    def on_broken_pipe(self) -> NoReturn:
        # Rich would end the process; a run goes on without its progress, as on a full disk.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, lines=True), **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text, lines=True), segment.style)


def literal_console(*, stderr: bool, quiet: bool = False) -> Console:
    """A console that prints text literally, as :func:`~coordexp.printable.printable`: a class may be ``[red] car``, a
    file ``p [a0] :smile:.jpg``."""
    return _LiteralConsole(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


def say(console: Console, text: str) -> None:
    """Print a line literally and whole, on any console."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def reporting(
    console: Console, description: str, unit: str = "images", *, after_s: float = 0.0, stays: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Yield the callback (done, total) that drives the display.

    ``after_s``: shorter work shows nothing. ``stays``: the full bar, or a last line, remains.
    """
    bar = make_progress(console, transient=not stays)
    task = bar.add_task(description, total=None, note="")
    lines = Lines(console)
    started = time.monotonic()

    def tell(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not console.is_terminal:
            lines.tell(f"{description}: {done}/{total} {unit}", done, total, always=stays and done == total)
        elif not bar.live.is_started and time.monotonic() - started >= after_s:
            bar.start()

    if console.is_terminal and not after_s:
        bar.start()
    try:
        yield tell
    finally:
        if bar.live.is_started:
            bar.stop()


class Lines:
    """Prints a line every half minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._last = time.monotonic()

    def tell(self, text: str, done: int, total: int, note: str = "", *, always: bool = False) -> None:
        """Print ``text``, the time left and ``note`` if a line is due, or ``always``. ``done`` and ``total`` count this
        run's work."""
        now = time.monotonic()
        if always or now - self._last >= LINE_EVERY_S:
            self._last = now
            left = (now - self._started) / max(1, done) * (total - done)
            line = f"{text}, eta {left:.0f} s  {note}".rstrip()
            say(self._console, line)


def make_progress(console: Console, *, transient: bool = False) -> Progress:
    """A bar with count, elapsed time and ETA. A task has a field ``note``, shown after them. ``transient``: the bar is
    removed when it ends."""
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=transient,
    )
