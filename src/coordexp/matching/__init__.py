"""Predictions against ground truth: candidates, gate, Hungarian assignment. Torch-free."""

from coordexp.matching.assign import (
    MAX_OVERLAP_OF_OTHERS,
    assign_pairs,
    duplicate_indices,
    match_objects,
    num_duplicates,
    top_k_candidates,
)
from coordexp.settings import MatchingConfig

__all__ = [
    "MAX_OVERLAP_OF_OTHERS",
    "MatchingConfig",
    "assign_pairs",
    "duplicate_indices",
    "match_objects",
    "num_duplicates",
    "top_k_candidates",
]
