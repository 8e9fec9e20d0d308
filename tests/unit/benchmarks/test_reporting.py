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
