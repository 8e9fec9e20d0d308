"""Calls in threads of their own: their errors reach who asked, and a process that ends does not abort under them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordexp.background import in_background, wait_for_all


def test_results_and_errors_reach_the_one_who_waits() -> None:
    assert in_background(lambda: 3, "three").result(20) == 3
    hung = in_background(lambda: time.sleep(2), "hung")
    with pytest.raises(ZeroDivisionError):
        wait_for_all([hung, in_background(lambda: 1 // 0, "failing")])
    assert not hung.done(), "the first error ends the waiting"


@pytest.mark.parametrize(("seconds", "ends"), [(1, True), (60, False)])
def test_the_end_of_a_process_waits_a_little_for_them(seconds: int, ends: bool, tmp_path: Path) -> None:
    """A daemon that comes back from C++ in a half-dismantled interpreter would abort it, exit code -6."""
    out = tmp_path / "ended"
    code = (
        "import time; from pathlib import Path; from coordexp import background\n"
        "background.AT_EXIT_S = 3.0\n"
        f"background.in_background(lambda: (time.sleep({seconds}), Path({str(out)!r}).touch()), 'late')\n"
        "raise SystemExit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=50, check=False).returncode == 3
    assert out.exists() is ends
