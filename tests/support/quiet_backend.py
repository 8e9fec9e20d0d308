"""What a scripted rollout backend has nothing to say to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import IndexedRollout, RolloutRound, in_turn


class QuietBackend:
    """A backend without weights, memory or metrics; subclasses answer in :meth:`generate`."""

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any, on_answer: Any = None) -> list[Rollout]:
        raise NotImplementedError

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        return in_turn(self.generate, rounds)

    def sync_weights(self, version: int) -> None: ...

    def release(self) -> None: ...

    @property
    def batch_size(self) -> int:
        return 3

    def last_report(self) -> dict[str, Any]:
        return {}

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...
