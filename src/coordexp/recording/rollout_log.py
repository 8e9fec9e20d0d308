"""What each round of rollouts did: a line of JSON per step and rank, enough to ask for the same answers again.

``rollout_log_rank{r}.jsonl`` in the run's folder holds servers, weight version, mode and fallbacks of the push, caps,
seeds of every call, and decoding. A step has one line: those that a resumed run does again go to
``rollout_log_rank{r}.superseded.jsonl`` as it comes to them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordexp.files import append_line

logger = logging.getLogger("coordexp")


class RolloutLog:
    """One rank's file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rollout_log_rank{rank}.jsonl"
        self.superseded = folder / f"rollout_log_rank{rank}.superseded.jsonl"
        self._rank = rank
        self._written = False

    def write(self, global_step: int, report: Mapping[str, Any]) -> None:
        """Append what the rollouts after ``global_step`` finished steps did; the first rank says it in the log too."""
        line = json.dumps({"global_step": global_step, "rank": self._rank, **report})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._written:
                self._set_aside(global_step)
            self._written = True
            append_line(self.path, line.encode() + b"\n")
        except OSError as error:
            logger.warning("%s was not written (%s); it should hold: %s", self.path, error, line)
            return
        if self._rank == 0:
            logger.info("rollouts: %s", line)

    def _set_aside(self, first_step: int) -> None:
        """What processes before this one wrote of the steps that it does again."""
        if not self.path.exists():
            return
        kept = 0
        with self.path.open("rb") as file:
            for line in file:
                if (step := _step_of(line)) is not None and step >= first_step:
                    break
                kept += len(line)
            file.seek(kept)
            again = file.read()
        if again:
            append_line(self.superseded, again.rstrip(b"\n") + b"\n")
            os.truncate(self.path, kept)


def _step_of(line: bytes) -> int | None:
    """None of a line that a kill left unfinished."""
    try:
        return int(json.loads(line)["global_step"])
    except (ValueError, TypeError, KeyError):
        return None
