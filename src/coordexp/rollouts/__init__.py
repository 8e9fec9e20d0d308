"""Rollouts: prompts in, token-exact answers out. The package itself imports without torch."""

from coordexp.rollouts.backend import DecodingOptions, RolloutBackend, SeedContext
from coordexp.rollouts.build import build_backend, check_backend, decoding_options
from coordexp.rollouts.chunking import chunk_size, split_requests
from coordexp.rollouts.seeds import request_seed

__all__ = [
    "DecodingOptions",
    "RolloutBackend",
    "SeedContext",
    "build_backend",
    "check_backend",
    "chunk_size",
    "decoding_options",
    "request_seed",
    "split_requests",
]
