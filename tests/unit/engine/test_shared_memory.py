"""What a killed engine left in /dev/shm goes; what a living process holds stays."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordexp.engine.shared_memory import FOLDER, forget_names, remove_leftovers

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no /dev/shm on this system")
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
    folder = FOLDER / f"coordexp-test-{os.getpid()}"
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
