"""Training that waits for images says how many loader processes would be enough."""

from __future__ import annotations

import logging
import os

import pytest

from coordexp.training.watches import ReadingWatch, loader_advice


@pytest.mark.parametrize(
    ("workers", "waited_s", "needed"),
    [
        (0, 0.5, 1),  # half a second of reading during half a second of computing
        (0, 0.8, 4),
        (2, 0.5, 4),
        (4, 0.06, 5),
        (4, 0.05, None),
        (0, 0.0, None),
    ],
)
def test_enough_processes_read_while_a_step_computes(workers: int, waited_s: float, needed: int | None) -> None:
    advice = None if needed is None else f"set data.num_workers: {needed}"
    assert loader_advice(workers, waited_s, step_s=1.0, cores=100) == advice


def line(waited_s: float) -> dict[str, float]:
    return {
        "time/data_wait_s": waited_s, "time/window_prepare_s": 0.1, "time/learner_s": 0.8 - waited_s,
        "time/optimizer_s": 0.1, "time/row_wait_s": 0.5,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def warnings_of(caplog: pytest.LogCaptureFixture, workers: int, waited_s: float, busy_cores: int = 0) -> list[str]:
    watch = ReadingWatch(workers, busy_cores)
    with caplog.at_level(logging.WARNING, "coordexp"):
        for step in (10, 20, 30):
            watch.observe(line(waited_s), step)
    return [record.getMessage() for record in caplog.records]


def test_a_warning_names_the_number_to_set_once_and_not_for_the_start(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, workers=2, waited_s=0.5)
    assert warning.startswith("step 20: 50% of a step waits for images")
    assert warning.endswith("2 loader processes read; set data.num_workers: 4")


def test_no_more_processes_are_advised_than_there_are_cores(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, workers=4, waited_s=0.75)
    assert "set data.num_workers: 8 (16 would be needed" in warning
    assert "--max-pixels" in warning


@pytest.mark.parametrize(
    ("workers", "waited_s", "busy_cores"), [(2, 0.04, 0), (8, 0.5, 0), (0, 0.5, 8)],
    ids=["hardly waits", "all cores read", "the trainer computes on all cores"],
)  # fmt: skip
def test_without_a_gain_there_is_no_warning(
    caplog: pytest.LogCaptureFixture, workers: int, waited_s: float, busy_cores: int
) -> None:
    assert warnings_of(caplog, workers, waited_s, busy_cores) == []
