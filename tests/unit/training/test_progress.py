"""A bar on a terminal, lines at intervals in a file, nothing on other ranks."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from transformers.utils import logging

from coordexp.training.progress import RichProgress


def run(console: Console, steps: int = 3, first: int = 0, main: bool = True) -> RichProgress:
    progress = RichProgress(console, "stage 2")
    state: Any = SimpleNamespace(global_step=first, max_steps=first + steps, is_world_process_zero=main)
    nothing: Any = None
    progress.on_train_begin(nothing, state, nothing)
    for _ in range(steps):
        state.global_step += 1
        progress.on_log(nothing, state, nothing, logs={"loss": 1.23456, "rollout/match_rate": 0.5, "other": 9.0})
        progress.on_step_end(nothing, state, nothing)
    progress.on_train_end(nothing, state, nothing)
    return progress


def test_a_log_file_has_the_last_step_and_its_metrics() -> None:
    file = io.StringIO()
    run(Console(file=file, width=200))
    (line,) = file.getvalue().splitlines()
    assert line.startswith("stage 2: step 3/3, eta 0 s") and "loss 1.23" in line and "match 0.5" in line
    assert "9" not in line


def test_a_log_file_gets_a_line_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 16))
    monkeypatch.setattr("coordexp.data.progress_bar.time.monotonic", lambda: float(next(clock)))
    file = io.StringIO()
    run(Console(file=file, width=200), steps=6)
    steps = [line.split(",")[0].rpartition(" ")[2] for line in file.getvalue().splitlines()]
    assert 2 <= len(steps) < 6 and steps[-1] == "6/6"


def test_a_resumed_run_continues_its_step_count() -> None:
    file = io.StringIO()
    run(Console(file=file, width=200), steps=2, first=40)
    assert "step 42/42" in file.getvalue()


def test_a_terminal_shows_a_bar_and_is_restored() -> None:
    file = io.StringIO()
    progress = run(Console(file=file, force_terminal=True, width=200))
    assert "3/3" in file.getvalue() and "stage 2" in file.getvalue()
    assert progress._progress is None
    progress.stop()  # again, as after an error


def test_log_lines_are_not_wrapped() -> None:
    file = io.StringIO()
    run(Console(file=file, width=20))
    assert len(file.getvalue().splitlines()) == 1


def test_transformers_bars_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.enable_progress_bar()
    during = []
    monkeypatch.setattr(RichProgress, "on_log", lambda *_, **__: during.append(logging.is_progress_bar_enabled()))
    run(Console(file=io.StringIO(), force_terminal=True, width=200))
    assert during == [False] * 3 and logging.is_progress_bar_enabled()


def test_other_ranks_are_silent() -> None:
    file = io.StringIO()
    run(Console(file=file, width=200), main=False)
    assert file.getvalue() == ""
