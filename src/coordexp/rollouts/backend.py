"""What every rollout backend promises. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.seeds import request_seed


@dataclass(frozen=True, slots=True)
class SeedContext:
    """Where in the run a round of rollouts stands; with a request's index it determines that call's seed."""

    training_seed: int
    global_step: int
    micro_step_idx: int
    rank: int

    def seed_of(self, req_idx: int) -> int:
        """Seed of the call whose first request is ``req_idx`` of its micro-step."""
        return request_seed(self.training_seed, self.global_step, self.micro_step_idx, self.rank, req_idx)


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """How answers are decoded. ``temperature`` 0 is greedy; ``top_k`` −1 keeps every token; ``num_beams`` > 1 is beam
    search, of which the best beam alone is returned."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    num_beams: int = 1
    repetition_penalty: float = 1.0


class RolloutBackend(Protocol):
    """Answers prompts without gradient. Results stand in the order of the requests."""

    def generate(self, requests: Sequence[RolloutRequest], seeds: SeedContext) -> list[Rollout]:
        """One answer per request; an empty list for none.

        Raises:
            RolloutError: the engine failed or returned something that cannot be trained on.
        """
        ...

    def sync_weights(self, version: int) -> None:
        """Make the learner's current weights, from now on called ``version``, those of the next answers."""
        ...

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        ...
