"""The bar's ETA: there from the first count on, and of this run alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Task

from coordexp.progress_bar import EtaColumn, make_progress, seconds_left


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


def a_task(clock: list[float], total: int | None, completed: int = 0, **fields: Any) -> Task:
    bar = make_progress(Console(file=io.StringIO()))
    bar.get_time = lambda: clock[0]  # the bar's own hook for another clock
    number = bar.add_task("evaluating", total=total, completed=completed, note="", **fields)
    task = bar.tasks[number]
    task._get_time = bar.get_time
    return task


def test_the_first_batch_gives_an_eta(clock: list[float]) -> None:
    task = a_task(clock, 40)
    assert EtaColumn().render(task).plain == "-:--:--"
    clock[0], task.completed = 30.0, 10
    assert seconds_left(task) == 90.0 and EtaColumn().render(task).plain == "0:01:30"


def test_a_resumed_run_is_not_as_fast_as_it_seems(clock: list[float]) -> None:
    task = a_task(clock, 100, completed=80, first=80)
    clock[0], task.completed = 10.0, 82
    assert seconds_left(task) == 90.0


def test_without_a_total_nothing_is_known(clock: list[float]) -> None:
    task = a_task(clock, None)
    clock[0], task.completed = 10.0, 5
    assert seconds_left(task) is None
