"""Rollouts: the interface of backends, seeds, request plans, the repeat guard, and the backend that generates with
transformers.

The backends over vLLM are in :mod:`coordexp.engine`, above this layer. This package imports without torch, transformers
and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
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
    from coordexp.rollouts.learner import LearnerParts

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


def build_backend(config: RolloutMatchingConfig, learner: LearnerParts, names: Sequence[str] = ()) -> RolloutBackend:
    """:func:`coordexp.engine.build_backend`, which is above this layer."""
    return import_module("coordexp.engine").build_backend(config, learner, names)
