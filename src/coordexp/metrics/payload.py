"""The neutral metrics payload: one per optimizer step or evaluation, already aggregated over micro-steps and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MetricsPayload:
    """``metrics`` is flat: family/name → number. Values are global; see :mod:`coordexp.metrics.reduce`."""

    mode: Literal["train", "eval"]
    global_step: int
    metrics: Mapping[str, float]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        # Types too: True == 1 == 1.0, and a logger behind JSON would see the difference.
        if type(self.schema_version) is not int or self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"metrics payload of schema {self.schema_version!r}; this version speaks {SCHEMA_VERSION}")
        if self.mode not in ("train", "eval"):
            raise ValueError(f"metrics payload of mode {self.mode!r}; expected 'train' or 'eval'")
        if type(self.global_step) is not int or self.global_step < 0:
            raise ValueError(f"metrics payload of step {self.global_step!r}; expected an integer from 0 up")
        for name, value in self.metrics.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"metric names are non-empty strings, not {name!r}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"metric {name} is {value!r}; metrics are numbers")
