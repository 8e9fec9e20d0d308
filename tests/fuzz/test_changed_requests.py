"""Changed requests to ``coordexp serve`` are answered or refused, without a traceback in its log."""

from __future__ import annotations

from pathlib import Path

from fuzz.campaign import spend
from fuzz.served import served_requests

SECONDS = 4.0


def test_changed_requests_are_answered_or_refused(tmp_path: Path) -> None:
    with served_requests() as requests:
        tally = spend("HTTP", requests, SECONDS, tmp_path / "failed")
    assert tally.inputs > 10 and not tally.failures, tally.failures[0]
