"""Changed pictures, annotations, configurations and datasets are read or refused in words; ``make fuzz`` does more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.campaign import spend
from fuzz.kinds import KINDS, Bench

SECONDS = 0.5  # a kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_changed_files_are_read_or_refused_in_words(kind: str, tmp_path: Path) -> None:
    tally = spend(kind, Bench(KINDS[kind], tmp_path / "sound"), SECONDS, tmp_path / "failed")
    assert tally.inputs and not tally.failures, tally.failures[0]
