"""The architecture page names files and functions that exist, and its picture shows every room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_step_of_the_five_paths_exists_and_the_page_is_current() -> None:
    script = ROOT / "docs" / "draw_architecture.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_picture_shows_every_room() -> None:
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "coordexp").glob("*/__init__.py")}
    assert {name for name in packages if f">{name}<" not in picture} == set()
