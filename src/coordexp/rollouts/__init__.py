"""Rollouts: prompts in, token-exact answers out. The package itself imports without torch."""

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
    synced,
)
from coordexp.rollouts.build import build_backend, check_backend, decoding_options
from coordexp.rollouts.chunking import chunk_size, split_requests
from coordexp.rollouts.seeds import request_seed

__all__ = [
    "AdapterWeights",
    "IndexedRollout",
    "DatasetSeeds",
    "DecodingOptions",
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
