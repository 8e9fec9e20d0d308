"""Calls in threads, and work prepared in a thread ahead of its use: results, errors and order; no thread is left."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.background import Prefetcher, in_background, wait_for_all
from coordexp.errors import DataError, RolloutError

WAIT_S = 30.0


def test_results_and_errors_reach_the_waiting_thread() -> None:
    assert in_background(lambda: 3, "three").result(20) == 3
    hung = in_background(lambda: time.sleep(2), "hung")
    with pytest.raises(ZeroDivisionError):
        wait_for_all([hung, in_background(lambda: 1 // 0, "failing")])
    assert not hung.done(), "the first error ends the waiting"


@pytest.mark.parametrize(("seconds", "ends"), [(1, True), (60, False)])
def test_process_exit_waits_briefly_for_running_calls(seconds: int, ends: bool, tmp_path: Path) -> None:
    """A daemon thread that returns from C++ in a half-dismantled interpreter would abort it, exit code -6."""
    out = tmp_path / "ended"
    code = (
        "import time; from pathlib import Path; from coordexp import background\n"
        "background.AT_EXIT_S = 3.0\n"
        f"background.in_background(lambda: (time.sleep({seconds}), Path({str(out)!r}).touch()), 'late')\n"
        "raise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 3
    assert out.exists() is ends


def ahead(count: int, prepare: Callable[[int], Any] = str, **keys: Any) -> Prefetcher[int, Any]:
    given = {
        "ahead": 16,
        "deadline_s": WAIT_S,
        "timeout_error": lambda one: RolloutError(f"sample {one} is late"),
        **keys,
    }
    return Prefetcher(range(count), prepare, name="prompts", **given)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prompts"]


@settings(max_examples=40)
@given(count=st.integers(0, 40), room=st.integers(1, 5), number=st.integers(1, 4))
def test_prefetched_items_are_in_order(count: int, room: int, number: int) -> None:
    with ahead(count, ahead=room, threads=number) as waiting:
        assert [waiting.take() for _ in range(len(waiting))] == [(one, str(one)) for one in range(count)]
        assert not waiting
    assert not threads()


def test_threads_prepare_several_items_at_the_same_time() -> None:
    together = threading.Barrier(3)
    with ahead(9, lambda one: together.wait(WAIT_S), threads=3) as waiting:
        assert sorted(waiting.take()[1] for _ in range(9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_prefetcher_prepares_at_most_its_limit_in_another_thread() -> None:
    began: list[tuple[int, str]] = []
    there = threading.Semaphore(0)

    def prepare(one: int) -> int:
        began.append((one, threading.current_thread().name))
        there.release()
        return one

    with ahead(10, prepare, ahead=3) as waiting:
        for _ in range(3):
            assert there.acquire(timeout=WAIT_S)
        assert not there.acquire(timeout=0.2), "a fourth was started"
        waiting.take()
        assert there.acquire(timeout=WAIT_S)
        assert began == [(one, "prompts") for one in range(4)]
    assert len(began) == 4 and not threads(), "and none is started after the end"


@pytest.mark.parametrize("number", [1, 3])
def test_a_prefetch_error_is_raised_in_order_and_ends_the_work(number: int) -> None:
    prepared: list[int] = []

    def prepare(one: int) -> int:
        if one == 2:
            raise DataError("no such image")
        prepared.append(one)
        return one

    with pytest.raises(DataError, match="no such image"), ahead(9, prepare, ahead=3, threads=number) as waiting:
        assert [waiting.take()[0], waiting.take()[0]] == [0, 1]
        waiting.take()
    assert {0, 1} <= set(prepared) <= {0, 1, 3, 4} and not threads()
