"""Engines that start side by side, with real processes in the place of vLLM's."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordexp.errors import RolloutError
from coordexp.serving.serve.starting import CORE, VISIBLE, EngineThreads

DEADLINE_S = 60.0


def core(answer: Any, meeting: str, expected: int) -> None:
    """As a vLLM core: it dies with the thread that spawned it, and is up once ``expected`` of them have met."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    Path(meeting, str(os.getpid())).touch()
    deadline = time.monotonic() + DEADLINE_S
    while len(list(Path(meeting).iterdir())) < expected and time.monotonic() < deadline:
        time.sleep(0.02)
    answer.send(os.environ.get(VISIBLE))
    time.sleep(DEADLINE_S * 2)


@dataclass
class Engine:
    """What ``start_one`` gives: a process, and the devices that it has found."""

    process: Any
    devices: str | None

    def shutdown(self, timeout: float) -> None:
        self.process.kill()
        self.process.join(timeout)


@pytest.fixture
def threads() -> Iterator[EngineThreads]:
    threads = EngineThreads()
    yield threads
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    threads.close()


def started(meeting: Path, expected: int) -> Engine:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=core, args=(there, str(meeting), expected), name=CORE)
    process.start()
    there.close()
    return Engine(process, here.recv())


def test_all_are_under_way_at_once_each_with_its_own_devices(
    threads: EngineThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is up before all of them run, so one after the other would never end."""
    monkeypatch.setenv(VISIBLE, "4,5,6")
    engines = threads.start(lambda: started(tmp_path, 3), ["4", "5", "6"], DEADLINE_S)
    assert [engine.devices for engine in engines] == ["4", "5", "6"]
    assert os.environ[VISIBLE] == "4,5,6"
    time.sleep(0.2)
    assert all(engine.process.is_alive() for engine in engines), "the threads that spawned them live on"


def test_without_devices_the_environment_is_left_alone(
    threads: EngineThreads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    (engine,) = threads.start(lambda: started(tmp_path, 1), [None], DEADLINE_S)
    assert engine.devices is None and VISIBLE not in os.environ


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_that_fails_ends_the_others(threads: EngineThreads, tmp_path: Path, failing: int) -> None:
    """Whether they are up already or still on their way."""
    count = iter(range(3))
    waits_for = {0: 1, 1: 4, 2: 4}  # the first is up at once; the others wait for one that never comes

    def start_one() -> Engine:
        number = next(count)
        if number == failing:
            raise ValueError("no room")
        return started(tmp_path, waits_for[number])

    with pytest.raises(ValueError, match="no room"):
        threads.start(start_one, ["0", "1", "2"], DEADLINE_S)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_engines_that_load_for_ever_are_ended_at_the_deadline(threads: EngineThreads, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"2 of 2 engines were not ready within 0\.5 s \(launch\.wait_s\)"):
        threads.start(lambda: started(tmp_path, 3), ["0", "1"], 0.5)
    assert not any(child.is_alive() for child in multiprocessing.active_children())
