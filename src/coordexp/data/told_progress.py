"""Progress of long work on data, told on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AFTER_S = 2.0  # what is over sooner is not told of
_EVERY_S = 15.0


@contextmanager
def told(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with share and ETA where stderr is a terminal, a line now and then elsewhere; gives the callback (done, of
    how many) that drives it. Work of a moment is not told of."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TextColumn("eta"))
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(description, total=None)
    started = time.monotonic()
    last = started + _AFTER_S - _EVERY_S

    def tell(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        bar.update(task, completed=done, total=total)
        if console.is_terminal:
            if now - started >= _AFTER_S and not bar.live.is_started:
                bar.start()
        elif now - last >= _EVERY_S and done < total:
            last = now
            left = (now - started) / max(1, done) * (total - done)
            console.print(f"{description}: {100 * done // max(1, total)} %, eta {left:.0f} s", soft_wrap=True)

    try:
        yield tell
    finally:
        bar.stop()
