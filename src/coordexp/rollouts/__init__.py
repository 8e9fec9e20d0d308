"""What a rollout is and how it is asked for: the backend's contract, seeds, plans, the repeat guard, and the backend
that generates with transformers.

Backends over vLLM live above (``vllm_engine``, ``servers``); ``build`` joins them all, and imports each one only when a
configuration names it. So this package itself imports without torch, transformers and vLLM.
"""

from coordexp.rollouts.backend import (
    AdapterWeights,
    DatasetSeeds,
    DecodingOptions,
    IndexedRollout,
    RolloutBackend,
    RolloutRound,
    SeedContext,
    Seeds,
    WeightSource,
    in_turn,
    request_seed,
    synced,
)
from coordexp.rollouts.build import build_backend, check_backend, decoding_options
from coordexp.rollouts.chunking import chunk_size, split_requests
from coordexp.rollouts.repeat_guard import RepeatGuard

__all__ = [
    "AdapterWeights",
    "DatasetSeeds",
    "DecodingOptions",
    "IndexedRollout",
    "RepeatGuard",
    "RolloutBackend",
    "RolloutRound",
    "SeedContext",
    "Seeds",
    "WeightSource",
    "build_backend",
    "check_backend",
    "chunk_size",
    "decoding_options",
    "in_turn",
    "request_seed",
    "split_requests",
    "synced",
]
