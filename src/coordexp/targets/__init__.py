"""Parse + match + ground truth → the one teacher-forced sequence and its per-token supervision. Torch-free."""

from coordexp.config.rollout import TargetPolicy, TransportConfig
from coordexp.targets.build import build_gt_target, build_target, empty_target, is_closed, mark_matched
from coordexp.targets.supervision import encode_tail

__all__ = [
    "TargetPolicy",
    "TransportConfig",
    "build_gt_target",
    "build_target",
    "empty_target",
    "encode_tail",
    "is_closed",
    "mark_matched",
]
