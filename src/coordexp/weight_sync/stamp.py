"""Which weights answered: stamped on every push, carried by every answer, compared by the learner that asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightStamp:
    """``version`` counts one learner's optimizer steps, so it alone does not tell two learners apart: both have a step
    40. ``learner_id`` does; None for weights from disk, or of a client that gives none."""

    version: int = 0
    learner_id: str | None = None

    def payload(self) -> dict[str, Any]:
        """As it travels in answers and reports."""
        return {"weight_version": self.version, "learner_id": self.learner_id}

    def __str__(self) -> str:
        return f"version {self.version} of " + (f"learner {self.learner_id}" if self.learner_id else "no named learner")
