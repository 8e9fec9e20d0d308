"""The base of scripted rollout backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts import IndexedRollout, RolloutRound


class QuietBackend:
    """A backend without weights, memory or metrics; subclasses answer in :meth:`generate`."""

    batch_size = 3

    def generate(self, requests: Sequence[RolloutRequest], seeds: Any, on_answer: Any = None) -> list[Rollout]:
        raise NotImplementedError

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        for round_idx, one in enumerate(rounds):
            for index, rollout in enumerate(self.generate(one.requests, one.seeds)):
                yield IndexedRollout(round_idx, index, rollout)

    def sync_weights(self, version: int) -> None: ...

    def release(self) -> None: ...

    def last_report(self) -> Mapping[str, Any]:
        return {}

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None: ...
