"""How far long work is: a bar with ETA on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

_LINE_EVERY_S = 30.0


def literal_console(*, stderr: bool, quiet: bool = False) -> Console:
    """A console that prints text as it is: a class may be called ``[red] car``, a file ``p [a0] :smile:.jpg``."""
    return Console(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)


@contextmanager
def reporting(
    console: Console, description: str, unit: str = "images", *, after_s: float = 0.0, stays: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Gives the callback (done, of how many) that drives the display.

    ``after_s``: work that is over sooner shows nothing. ``stays``: the full bar, or a last line, is left to be read.
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
    """Lines now and then, where nobody watches a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = self._last = time.monotonic()

    def tell(self, text: str, done: int, total: int, note: str = "", *, always: bool = False) -> None:
        """Print ``text``, the time left and ``note`` if a line is due, or ``always``. ``done`` counts from the start of
        this work, ``total`` too."""
        now = time.monotonic()
        if always or now - self._last >= _LINE_EVERY_S:
            self._last = now
            left = (now - self._started) / max(1, done) * (total - done)
            line = f"{text}, eta {left:.0f} s  {note}".rstrip()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_progress(console: Console, *, transient: bool = False) -> Progress:
    """A bar with count, elapsed time and ETA. A task has a field ``note``, shown behind them, and may have ``first``:
    the count with which it began. ``transient``: it is gone when it ends."""
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        EtaColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=transient,
    )


class EtaColumn(ProgressColumn):
    """Time left. rich's own column says nothing until a second count came in, which for large batches takes half of the
    time: until then the first count and the time since the start say it."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """``h:mm:ss``, or dashes before anything was done."""
        left = seconds_left(task)
        if left is None:
            return Text("-:--:--", style="progress.remaining")
        minutes, seconds = divmod(math.ceil(left), 60)
        hours, minutes = divmod(minutes, 60)
        return Text(f"{hours}:{minutes:02}:{seconds:02}", style="progress.remaining")


def seconds_left(task: Task) -> float | None:
    """Seconds until ``task`` is done, at its pace so far; None before anything was done."""
    if task.time_remaining is not None:
        return task.time_remaining
    done = task.completed - task.fields.get("first", 0)
    if task.remaining is None or not task.elapsed or done <= 0:
        return None
    return task.elapsed / done * task.remaining
