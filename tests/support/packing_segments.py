"""Small hand-made segments for tests of packing and of what consumes packed rows."""

from __future__ import annotations

import numpy as np

from coordexp.records import Segment, TokenRole, TrainingTarget
from coordexp.targets import SupervisionWeights
from coordexp.targets.weights import weigh_tokens


def make_segment(sample_id: str, length: int, prompt_len: int = 1) -> Segment:
    """A segment of ``length`` tokens with plain structure as its target; token ids are positions."""
    target_len = length - prompt_len
    return Segment(sample_id, tuple(range(prompt_len)), make_target(sample_id, [TokenRole.TAIL_STRUCT] * target_len))


def make_target(
    sample_id: str,
    roles: list[TokenRole],
    coords: dict[int, float] | None = None,
    boxes: list[tuple[list[int], list[float]]] | None = None,
    first_token: int = 1000,
) -> TrainingTarget:
    """A target with one role per token, ``{target position: bin}`` coordinates, ``(positions, bins)`` boxes."""
    coords, boxes = coords or {}, boxes or []
    roles_T = np.array(roles, dtype=np.uint8)
    box_pos_M4 = np.array([positions for positions, _ in boxes], dtype=np.int64).reshape(-1, 4)
    return TrainingTarget(
        sample_id=sample_id,
        token_ids=tuple(range(first_token, first_token + len(roles))),
        roles_T=roles_T,
        coord_pos_K=np.array(sorted(coords), dtype=np.int64),
        coord_bin_K=np.array([coords[position] for position in sorted(coords)], dtype=np.float64),
        box_pos_M4=box_pos_M4,
        box_bin_M4=np.array([bins for _, bins in boxes], dtype=np.float64).reshape(-1, 4),
        weights=weigh_tokens(roles_T, box_pos_M4, "rollout", SupervisionWeights()),
        context="rollout",
        prefix_len=0,
        matched_pred_idx=(),
        matched_gt_idx=(),
        appended_gt_idx=(),
        appended_object_index=(),
    )
