"""A terminal gets a bar, a log file lines."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from coordexp.data.progress_bar import reporting


@pytest.mark.parametrize(
    ("display", "shown"),
    [
        ({}, ""),  # a line is due after a while only
        ({"stays": True}, "checking: 3/3 images, eta 0 s\n"),
        ({"stays": True, "unit": "%"}, "checking: 3/3 %, eta 0 s\n"),
        ({"stays": True, "after_s": 1e9}, "checking: 3/3 images, eta 0 s\n"),
    ],
)
def test_a_log_file_gets_the_last_line(display: dict[str, Any], shown: str) -> None:
    file = io.StringIO()
    with reporting(Console(file=file), "checking", **display) as tell:
        for done in range(4):
            tell(done, 3)
    assert file.getvalue() == shown


@pytest.mark.parametrize(("after_s", "is_shown"), [(0.0, True), (1e9, False)])
def test_a_terminal_shows_a_bar_for_long_work(after_s: float, is_shown: bool) -> None:
    file = io.StringIO()
    with reporting(Console(file=file, force_terminal=True, width=200), "checking", after_s=after_s) as tell:
        tell(3, 3)
    assert ("checking" in file.getvalue()) is is_shown


def test_lines_are_printed_at_intervals_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("coordexp.data.progress_bar.time.monotonic", lambda: now[0])
    file = io.StringIO()
    with reporting(Console(file=file), "checking [red]") as tell:
        for now[0], done in ((110.0, 1), (131.0, 2), (140.0, 3)):
            tell(done, 4)
    assert file.getvalue() == "checking [red]: 2/4 images, eta 31 s\n"
