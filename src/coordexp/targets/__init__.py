"""Parse + match + ground truth → the one teacher-forced sequence and its per-token supervision. Torch-free."""

from coordexp.targets.build import TransportConfig, build_gt_target, build_target, empty_target, is_closed
from coordexp.targets.supervision import encode_tail

__all__ = ["TransportConfig", "build_gt_target", "build_target", "empty_target", "encode_tail", "is_closed"]
