"""Patches of vLLM on CPUs: a process that waits leaves the core to others, and shared memory of killed runs goes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is what is patched")

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from coordexp.engine import cpu_patches
from coordexp.engine.cpu_patches import SHARED_MEMORY, forget_names, remove_leftovers

if not current_platform.is_cpu():
    pytest.skip("beside a GPU vLLM stays as it is", allow_module_level=True)

LEFT = "-tp:0-[0-1]-cpushm_0"  # what vLLM 0.32 calls it under torchrun, on every machine, in every run
HOLD = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
if sys.argv[2] == "mapped":
    kept = mmap.mmap(file, 4096)
    os.close(file)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of the same file system as /dev/shm, and nobody else's."""
    folder = SHARED_MEMORY / f"coordexp-test-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def left(folder: Path, name: str = LEFT) -> Path:
    path = folder / name
    path.write_bytes(bytes(4096))
    return path


@contextmanager
def held(path: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", HOLD, str(path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_what_a_killed_run_left_goes_and_what_a_living_one_holds_stays(folder: Path, how: str) -> None:
    path = left(folder)
    with held(path, how) as process:
        assert remove_leftovers(folder) == [] and path.exists()
        process.kill()
        process.wait()
        assert remove_leftovers(folder) == [LEFT] and not path.exists()
    assert remove_leftovers(folder) == []


def test_one_that_is_held_does_not_save_the_others(folder: Path) -> None:
    kept, gone = left(folder), left(folder, "51234-pp:1-[0-1-2]-cpushm_2")
    with held(kept, "mapped"):
        assert remove_leftovers(folder) == [gone.name]
    assert kept.exists()


@pytest.mark.parametrize("name", ["sem.mp-0o4p0w1s", "psm_21467c3a", "-tp:0-cpushm", "x-tp:0-[0-1]-cpushm_0.bak"])
def test_nothing_of_another_name_is_touched(folder: Path, name: str) -> None:
    path = left(folder, name)
    assert remove_leftovers(folder) == [] == forget_names(folder) and path.exists()


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path / "none") == [] == forget_names(tmp_path / "none")


def test_names_of_this_process_go_and_its_memory_stays(folder: Path) -> None:
    own, other = left(folder), left(folder, "-tp:0-[0-1]-cpushm_1")
    with own.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        assert forget_names(folder) == [LEFT]
        mapped[:3] = b"sum"
        assert mapped[:3] == b"sum"
    assert other.exists()


@pytest.fixture
def queue_pair() -> tuple[Any, Any]:
    """vLLM's queue, once written and read: from then on it expects the next message at once."""
    writer: Any = shm_broadcast.MessageQueue(1, 1)
    reader: Any = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join(20)
    writer.enqueue("first")
    assert reader.dequeue(timeout=20) == "first"
    return writer, reader


def test_waiting_looks_seldom_and_the_message_comes(
    queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = queue_pair
    looks, wait = [], reader._spin_condition.wait
    monkeypatch.setattr(reader._spin_condition, "wait", lambda *args, **kw: looks.append(1) or wait(*args, **kw))
    threading.Timer(0.5, lambda: writer.enqueue({"bucket": 2})).start()
    assert reader.dequeue(timeout=60) == {"bucket": 2}
    assert 1 <= len(looks) < 50_000, "vLLM would look as often as it can: about a million times"


def test_a_lost_note_costs_little(queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's note gets lost: what it wrote is found all the same, not only after vLLM's own five seconds."""
    writer, reader = queue_pair
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    threading.Timer(0.2, lambda: writer.enqueue(3)).start()
    assert reader.dequeue(timeout=3) == 3


def test_an_idle_queue_is_woken_by_its_writers_note(
    queue_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_patches, "BACKOFF_S", 0.1)
    monkeypatch.setattr(cpu_patches, "IDLE_MS", 40_000)
    writer, reader = queue_pair
    threading.Timer(1.0, lambda: writer.enqueue(4)).start()
    assert reader.dequeue(timeout=20) == 4
