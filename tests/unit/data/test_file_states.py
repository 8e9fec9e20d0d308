"""Size and time of change of many files are what os.stat says of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import file_states as module
from coordexp.data.file_states import file_states

WAYS = {"statx": module._by_statx, "stat": module._by_stat, "either": file_states}


@pytest.fixture(params=WAYS)
def look(request: pytest.FixtureRequest) -> Callable[..., object]:
    if request.param == "statx" and module._statx() is None:
        pytest.skip("the C library has no statx")
    return WAYS[request.param]


def test_linux_has_statx() -> None:
    assert (module._statx() is not None) == (sys.platform == "linux")


@pytest.mark.parametrize("count", [0, 1, module._AT_ONCE, 2 * module._AT_ONCE + 1])
def test_many_files_are_told_apart_in_their_order(look: Callable[..., Any], tmp_path: Path, count: int) -> None:
    paths = [os.fsencode(tmp_path / f"ä {k}.png") for k in range(count)]
    for k, path in enumerate(paths):
        with open(path, "wb") as file:
            file.truncate(k * 1_000_003)  # beyond four bytes' worth; holes take no room
        os.utime(path, ns=(0, 10**18 + 123_456_789 * k))
    states_N2 = look(paths)
    assert states_N2.tolist() == [[k * 1_000_003, 10**18 + 123_456_789 * k] for k in range(count)]


@given(time_ns=st.integers(-(2**31) * 10**9, 2**33 * 10**9), size=st.integers(0, 2**40))
def test_any_time_and_size_are_as_os_stat_says(
    tmp_path_factory: pytest.TempPathFactory, time_ns: int, size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "one.png"
    with path.open("wb") as file:
        file.truncate(size)
    os.utime(path, ns=(0, time_ns))
    told = path.stat()
    for look in WAYS.values():
        states_N2 = look([os.fsencode(path)])
        assert states_N2 is not None and states_N2.tolist() == [[told.st_size, told.st_mtime_ns]]


def test_links_are_followed_and_folders_are_files(look: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file.png").write_bytes(b"12345")
    (tmp_path / "link.png").symlink_to(tmp_path / "file.png")
    names = ("file.png", "link.png", "")
    expected = [(tmp_path / name).stat() for name in names]
    states_N2 = look([os.fsencode(tmp_path / name) for name in names])
    assert states_N2.tolist() == [[one.st_size, one.st_mtime_ns] for one in expected]


@pytest.mark.parametrize("wrong", ["missing.png", "file.png/member.png", "broken.png", "file.png\0.png", "n" * 300])
def test_one_that_cannot_be_looked_at_leaves_all_unsaid(look: Callable[..., Any], tmp_path: Path, wrong: str) -> None:
    (tmp_path / "file.png").write_bytes(b"12345")
    (tmp_path / "broken.png").symlink_to(tmp_path / "nowhere.png")
    assert look([os.fsencode(tmp_path / "file.png"), os.fsencode(f"{tmp_path}/{wrong}")]) is None
