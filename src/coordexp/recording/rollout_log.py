"""What each round of rollouts did: a line of JSON per step and rank, enough to ask for the same answers again.

``rollout_log_rank{r}.jsonl`` in the run's folder holds servers, weight version, mode and fallbacks of the push, caps,
seeds of every call, and decoding. A resumed run appends; the last line of a step counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordexp.files import append_line

logger = logging.getLogger("coordexp")


class RolloutLog:
    """One rank's file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rollout_log_rank{rank}.jsonl"
        self._rank = rank

    def write(self, global_step: int, report: Mapping[str, Any]) -> None:
        """Append what the rollouts after ``global_step`` finished steps did; the first rank says it in the log too."""
        line = json.dumps({"global_step": global_step, "rank": self._rank, **report})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, line.encode() + b"\n")
        except OSError as error:
            logger.warning("%s was not written (%s); it should hold: %s", self.path, error, line)
            return
        if self._rank == 0:
            logger.info("rollouts: %s", line)
