"""Changed pictures, annotations, configurations and datasets are read or refused in words; ``make fuzz`` does more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fuzz.campaign import main, spend
from fuzz.kinds import KINDS, Bench

SECONDS = 0.3  # a kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_changed_files_are_read_or_refused_in_words(kind: str, tmp_path: Path) -> None:
    tally = spend(kind, Bench(KINDS[kind], tmp_path / "sound"), SECONDS, tmp_path / "failed")
    assert tally.inputs and not tally.failures, tally.failures[0]


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_minutes_in_which_nothing_would_be_tried_or_that_never_end_are_refused(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["campaign", f"--minutes={minutes}"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "not a finite number above 0 (MINUTES= of `make fuzz`)" in capsys.readouterr().err
