"""What is prepared in a thread ahead of its use: all of it, in order, not too much at once, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.background import Prefetcher
from coordexp.errors import DataError, RolloutError

WAIT_S = 30.0


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


@given(count=st.integers(0, 40), room=st.integers(1, 5))
def test_all_come_in_order(count: int, room: int) -> None:
    with ahead(count, ahead=room) as waiting:
        assert [waiting.take() for _ in range(len(waiting))] == [(one, str(one)) for one in range(count)]
        assert not waiting and not waiting.has_unconsumed
    assert not threads()


def test_it_is_done_in_another_thread_and_no_more_than_there_is_room_for() -> None:
    began: list[tuple[int, str]] = []
    there = threading.Semaphore(0)

    def prepare(one: int) -> int:
        began.append((one, threading.current_thread().name))
        there.release()
        return one

    with ahead(10, prepare, ahead=3) as waiting:
        for _ in range(3):
            assert there.acquire(timeout=WAIT_S)
        assert not there.acquire(timeout=0.2), "a fourth was begun"
        waiting.take()
        assert there.acquire(timeout=WAIT_S)
        assert began == [(one, "prompts") for one in range(4)]
    assert waiting.has_unconsumed and not threads(), "and none is begun behind the end"


def test_an_error_comes_in_its_turn_and_ends_the_work() -> None:
    prepared: list[int] = []

    def prepare(one: int) -> int:
        if one == 2:
            raise DataError("no such image")
        prepared.append(one)
        return one

    with pytest.raises(DataError, match="no such image"), ahead(9, prepare) as waiting:
        assert [waiting.take()[0], waiting.take()[0]] == [0, 1]
        waiting.take()
    assert prepared == [0, 1] and not threads()


def test_what_never_comes_is_an_error_with_its_name() -> None:
    goes_on = threading.Event()

    def prepare(one: int) -> int:
        assert goes_on.wait(WAIT_S)
        return one

    waiting = ahead(3, prepare, deadline_s=0.1)
    with pytest.raises(RolloutError, match=r"^sample 0 is late$"):
        waiting.take()
    goes_on.set()
    with waiting:
        pass
    assert not threads()
