"""The bar that every long piece of work shows on a terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


def make_progress(console: Console) -> Progress:
    """A bar with count, elapsed time and ETA. A task has a field ``note``, shown behind them, and may have ``first``:
    the count with which it began."""
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        EtaColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
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
