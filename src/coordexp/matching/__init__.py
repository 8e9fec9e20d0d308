"""Predictions against ground truth: candidates, gate, Hungarian assignment. Torch-free."""

from coordexp.config.rollout import MatchingConfig
from coordexp.matching.assign import (
    MAX_OVERLAP_OF_OTHERS,
    assign_pairs,
    duplicate_indices,
    match_objects,
    top_k_candidates,
)

__all__ = [
    "MAX_OVERLAP_OF_OTHERS",
    "MatchingConfig",
    "assign_pairs",
    "duplicate_indices",
    "match_objects",
    "top_k_candidates",
]
