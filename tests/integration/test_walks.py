"""docs/architecture.md counts the files that values pass by running a step with a server; this runs it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "docs" / "walks" / "run.py"


def test_the_traced_walks_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, str(RUN), "--check"], capture_output=True, text=True, timeout=1800)
    with capsys.disabled():
        print(f"\n{done.stdout}", end="")
    assert done.returncode == 0, done.stderr
