"""Predictions against ground truth: candidates, gate, Hungarian assignment. Torch-free."""

from coordexp.matching.assign import MatchingConfig, assign_pairs, match_objects
from coordexp.matching.candidates import top_k_candidates

__all__ = ["MatchingConfig", "assign_pairs", "match_objects", "top_k_candidates"]
