"""Which decoding the doctor recommends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordexp.doctor import Settings
from coordexp.doctor.engine import advice_to_skip, which_is_faster


@pytest.mark.parametrize(
    ("times", "advice"),
    [
        ({1: 2.5, 8: 1.2}, "write true: 2.50 times as fast at 1, 1.20 times as fast at 8"),
        ({1: 0.9, 8: 0.5}, "write false: 0.90 times as fast at 1, 0.50 times as fast at 8"),
        ({64: 0.5, 1: 2.0, 8: 1.5}, "write true for decode_batch_size up to 8, false above"),
    ],
)
def test_the_faster_one_is_named(times: dict[int, float], advice: str) -> None:
    assert advice_to_skip(times).startswith(advice)


def test_rates_of_both_engines_are_compared(tmp_path: Path) -> None:
    (tmp_path / "decoding.json").write_text(json.dumps({"1": 100.0, "8": 500.0}))
    assert which_is_faster(Settings(tmp_path)).result == "skipped"
    (tmp_path / "skipping.json").write_text(json.dumps({"1": 200.0}))
    row = which_is_faster(Settings(tmp_path))
    assert (row.result, dict(row.numbers)) == ("ok", {"at_1": 2.0})
