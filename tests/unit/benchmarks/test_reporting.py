"""What the benchmarks' scripts share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
reporting: Any = importlib.import_module("reporting")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("taken", "{folder}/taken is a file; name a FILE.json, or a folder"),
        ("taken/out.json", "{folder}/taken is a file; name a FILE.json, or a folder"),
        ("old.json", "{folder}/old.json is a folder; name a FILE.json in it"),
        ("/proc/none/out.json", "/proc/none/out.json cannot be written: No such file or directory"),
    ],
)
def test_a_place_for_the_figures_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "old.json").mkdir()
    with pytest.raises(SystemExit):
        reporting.parser("Measures.").parse_args(["--json", str(tmp_path / words)])
    assert "argument --json: " + message.format(folder=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("words", ["new/out.json", "new/folder"])
def test_the_folder_of_the_figures_is_made(tmp_path: Path, words: str) -> None:
    assert reporting.parser("Measures.").parse_args(["--json", str(tmp_path / words)]).json == tmp_path / words
    assert list((tmp_path / "new").rglob("*.*")) == []


@pytest.mark.parametrize(("threads", "set_to"), [(None, {"HOME": "/"}), (2, {"HOME": "/", "OMP_NUM_THREADS": "2"})])
def test_threads_reach_the_processes_that_are_measured(threads: int | None, set_to: dict[str, str]) -> None:
    assert reporting.with_threads({"HOME": "/"}, threads) == set_to


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA B200", 2250e12), ("NVIDIA L4", None), (None, None)],
)
def test_mfu_is_of_the_gpu_that_was_measured(gpu: str | None, peak: float | None) -> None:
    assert reporting.peak_flops(gpu) == peak
