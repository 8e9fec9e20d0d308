"""How busy this machine is with other work."""

from __future__ import annotations

import os


def busyness() -> float:
    """By how much a time limit grows: runnable processes for each core in the last minute, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
