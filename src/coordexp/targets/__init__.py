"""Parse + match + ground truth → the one teacher-forced sequence, with token weights of every loss term. No torch."""

from coordexp.config.rollout import TargetPolicy, TransportConfig
from coordexp.targets.build import (
    SampleOutcome,
    build_gt_target,
    build_target,
    count_mixed_kind,
    empty_target,
    is_closed,
    mark_matched,
)
from coordexp.targets.supervision import encode_tail
from coordexp.targets.weights import TERMS, SupervisionWeights, count_terms

__all__ = [
    "TERMS",
    "SampleOutcome",
    "SupervisionWeights",
    "TargetPolicy",
    "TransportConfig",
    "build_gt_target",
    "build_target",
    "count_mixed_kind",
    "count_terms",
    "empty_target",
    "encode_tail",
    "is_closed",
    "mark_matched",
]
