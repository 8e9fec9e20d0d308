"""The home folder in paths of configurations and command lines."""

from __future__ import annotations

import os


def below_home(path: str) -> str:
    """``path`` with ``~`` at its start as a shell replaces it; a shell leaves it after ``=`` and in quotes."""
    return os.path.expanduser(path) if path == "~" or path.startswith("~/") else path
