"""Shared by both ends of a weight push: versions, buckets, checksums, the weight group and its rendezvous, the layout
of a vLLM model; and the receiving end. This module is torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """``version`` counts one trainer's optimizer steps, so two trainers may both have a step 40; ``trainer_id``
    distinguishes them. It is None for weights from disk, or from a client that gives none."""

    version: int = 0
    trainer_id: str | None = None

    def payload(self) -> dict[str, Any]:
        """As JSON in answers and reports."""
        return {"weight_version": self.version, "trainer_id": self.trainer_id}

    def __str__(self) -> str:
        return f"version {self.version} of " + (f"trainer {self.trainer_id}" if self.trainer_id else "no named trainer")
