"""Rollouts: the interface of backends, seeds, request plans, the repeat guard, and the backend that generates with
transformers.

The backends over vLLM are in :mod:`coordexp.engine.trainer`, above this layer: modules of ``rollouts`` and ``engine``
import from each other's modules, all others may import from here. Imports without torch, transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordexp.rollouts.backend import (
    DatasetSeeds,
    RolloutBackend,
    RolloutRound,
    SeedContext,
    request_seed,
    rollout_session,
)
from coordexp.rollouts.chunking import chunk_size, split_requests
from coordexp.rollouts.repeat_guard import RepeatGuard

if TYPE_CHECKING:
    from coordexp.config.rollout import RolloutMatchingConfig
    from coordexp.rollouts.backend import TrainerParts

__all__ = [
    "DatasetSeeds",
    "RepeatGuard",
    "RolloutBackend",
    "RolloutRound",
    "SeedContext",
    "build_backend",
    "chunk_size",
    "request_seed",
    "rollout_session",
    "split_requests",
]


def build_backend(
    config: RolloutMatchingConfig, trainer: TrainerParts, class_names: Sequence[str] = ()
) -> RolloutBackend:
    """As :func:`coordexp.engine.trainer.backends.build_backend`, imported when it is called."""
    from coordexp.engine.trainer import backends

    return backends.build_backend(config, trainer, class_names)
