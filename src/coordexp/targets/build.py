"""``Y_train``: the model's own prefix, then every object it missed, then the end of the turn.

    Y_train = prefix of the rollout + append(objects not found) + EOS

Text of the prefix is never supervised here, though a matched object's own is told apart from the rest. Coordinates of
matched objects in the prefix are pulled to the ground truth they matched; everything behind the prefix is taught as
ordinary text and coordinates (see :class:`TokenRole`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coordexp.coords import CoordVocab, FieldOrder, append_fragment
from coordexp.errors import AlignmentError
from coordexp.geometry.transport import barycentric_targets
from coordexp.records import (
    NUM_BINS,
    GTObject,
    Match,
    MatchResult,
    ParsedRollout,
    PredictedObject,
    SupervisionContext,
    TokenRole,
    TrainingTarget,
)
from coordexp.targets.supervision import Tail, encode_tail


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How a matched pair with a polygon is aligned (keys ``rollout_matching.ot_*``)."""

    cost: Literal["l1", "l2"] = "l2"
    epsilon: float = 10.0
    iters: int = 30


def build_gt_target(
    ground_truth: Sequence[GTObject], vocab: CoordVocab, *, sample_id: str, field_order: FieldOrder = "desc_first"
) -> TrainingTarget:
    """The whole answer from ground truth: stage 1, and the control of every comparison."""
    fragment = append_fragment(ground_truth, "{", 1, field_order)
    whole = type(fragment)("{" + fragment.text, tuple((start + 1, end + 1) for start, end in fragment.desc_spans))
    tail = encode_tail(whole, ground_truth, vocab)
    return _join(sample_id, (), [], tail, vocab, "gt", (), tuple(range(len(ground_truth))), 1)


def build_target(
    parsed: ParsedRollout,
    match: MatchResult,
    ground_truth: Sequence[GTObject],
    vocab: CoordVocab,
    *,
    sample_id: str,
    field_order: FieldOrder = "desc_first",
    transport: TransportConfig | None = None,
) -> TrainingTarget:
    """Correct what the rollout found, append what it missed.

    Args:
        parsed: the rollout; ``match`` its assignment to ``ground_truth`` (objects in the order in which missed ones
            are appended).

    Raises:
        AlignmentError: a position that should hold a coordinate token of the stated object does not.
    """
    transport = transport or TransportConfig()
    missed = [ground_truth[j] for j in match.fn_gt_idx]
    first_index = (parsed.max_object_index or 0) + 1
    fragment = append_fragment(missed, parsed.prefix_text, first_index, field_order)
    tail = encode_tail(fragment, missed, vocab)
    matched = []
    for pair in match.pairs:
        predicted = parsed.objects[pair.pred_idx]
        _check_coord_tokens(predicted, parsed, vocab, sample_id)
        matched.append((predicted, coordinate_targets(predicted, ground_truth[pair.gt_idx], transport)))
    prefix = parsed.prefix_token_ids
    return _join(sample_id, prefix, matched, tail, vocab, "rollout", match.pairs, match.fn_gt_idx, first_index)


def coordinate_targets(predicted: PredictedObject, truth: GTObject, transport: TransportConfig) -> np.ndarray:
    """Where each coordinate of ``predicted`` should have been: (len(predicted.bins),) float bins.

    Two boxes: the true box. Otherwise both shapes are point sets (a box is its four corners) and each predicted point
    goes to the barycentre of its transport plan; a predicted box takes the bounds of its transported corners.
    """
    if predicted.kind == "bbox_2d" and truth.kind == "bbox_2d":
        return np.array(truth.bins, dtype=np.float64)
    moved_N2 = barycentric_targets(
        _points(predicted), _points(truth), cost=transport.cost, epsilon=transport.epsilon, iters=transport.iters
    )
    moved_N2 = np.clip(moved_N2, 0, NUM_BINS - 1)
    if predicted.kind == "bbox_2d":
        return np.concatenate([moved_N2.min(axis=0), moved_N2.max(axis=0)])
    return moved_N2.reshape(-1)


def _points(shape: PredictedObject | GTObject) -> np.ndarray:
    if shape.kind == "poly":
        return np.array(shape.bins, dtype=np.float64).reshape(-1, 2)
    x1, y1, x2, y2 = shape.bins
    return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.float64)


def _check_coord_tokens(predicted: PredictedObject, parsed: ParsedRollout, vocab: CoordVocab, sample_id: str) -> None:
    prefix, bins, positions = parsed.prefix_token_ids, vocab.bins, predicted.coord_token_idx
    inside = min(positions) >= 0 and max(positions) < len(prefix)
    written = tuple([bins.get(prefix[position]) for position in positions]) if inside else None
    if written != predicted.bins:
        raise AlignmentError(
            f"{sample_id}: object_{predicted.index} says {predicted.bins} but its tokens write {written}; "
            "the parse does not belong to this rollout"
        )


def _join(
    sample_id: str,
    prefix_ids: tuple[int, ...],
    matched: Sequence[tuple[PredictedObject, np.ndarray]],
    tail: Tail,
    vocab: CoordVocab,
    context: SupervisionContext,
    pairs: Sequence[Match],
    appended_gt_idx: tuple[int, ...],
    first_index: int,
) -> TrainingTarget:
    prefix_len = len(prefix_ids)
    prefix_roles = np.full(prefix_len, TokenRole.PREFIX_MASKED, dtype=np.uint8)
    positions = [np.array(predicted.coord_token_idx, dtype=np.int64) for predicted, _ in matched]
    bins = [target for _, target in matched]
    for (predicted, _), position in zip(matched, positions, strict=True):
        prefix_roles[slice(*predicted.own_token_span)] = TokenRole.PREFIX_STRUCT
        prefix_roles[slice(*predicted.desc_token_span)] = TokenRole.PREFIX_DESC
        prefix_roles[position] = TokenRole.PREFIX_COORD
    boxes = [(position, target) for position, (predicted, target) in zip(positions, matched, strict=True)
             if predicted.kind == "bbox_2d"]  # fmt: skip
    coord_pos_K = np.concatenate([*positions, tail.coord_pos_K + prefix_len])
    coord_bin_K = np.concatenate([*bins, tail.coord_bin_K])
    order = np.argsort(coord_pos_K, kind="stable")
    return TrainingTarget(
        sample_id=sample_id,
        token_ids=(*prefix_ids, *tail.token_ids, vocab.eos_id),
        roles_T=np.concatenate([prefix_roles, tail.roles_T, [np.uint8(TokenRole.EOS)]]),
        coord_pos_K=coord_pos_K[order],
        coord_bin_K=coord_bin_K[order],
        box_pos_M4=np.concatenate([np.array([p for p, _ in boxes], dtype=np.int64).reshape(-1, 4),
                                   tail.box_pos_M4 + prefix_len]),
        box_bin_M4=np.concatenate([np.array([b for _, b in boxes], dtype=np.float64).reshape(-1, 4), tail.box_bin_M4]),
        context=context,
        prefix_len=prefix_len,
        matched_pred_idx=tuple(pair.pred_idx for pair in pairs),
        matched_gt_idx=tuple(pair.gt_idx for pair in pairs),
        appended_gt_idx=tuple(appended_gt_idx),
        appended_object_index=tuple(range(first_index, first_index + len(appended_gt_idx))),
    )  # fmt: skip
