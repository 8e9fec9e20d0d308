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
from coordexp.geometry.transport import barycentric_targets_of
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
    found = [(parsed.objects[pair.pred_idx], ground_truth[pair.gt_idx]) for pair in match.pairs]
    _check_coord_tokens([predicted for predicted, _ in found], parsed, vocab, sample_id)
    moved = coordinate_targets(found, transport)
    matched = [(predicted, bins) for (predicted, _), bins in zip(found, moved, strict=True)]
    prefix = parsed.prefix_token_ids
    return _join(sample_id, prefix, matched, tail, vocab, "rollout", match.pairs, match.fn_gt_idx, first_index)


def empty_target(sample_id: str) -> TrainingTarget:
    """No token and no supervision: for a prompt that is read but not answered, and an answer that cannot be closed."""
    none = np.zeros(0, dtype=np.int64)
    return TrainingTarget(
        sample_id=sample_id,
        token_ids=(),
        roles_T=none.astype(np.uint8),
        coord_pos_K=none,
        coord_bin_K=none.astype(np.float64),
        box_pos_M4=none.reshape(0, 4),
        box_bin_M4=none.reshape(0, 4).astype(np.float64),
        context="rollout",
        prefix_len=0,
        matched_pred_idx=(),
        matched_gt_idx=(),
        appended_gt_idx=(),
        appended_object_index=(),
    )


def is_closed(target: TrainingTarget) -> bool:
    """Whether the answer ends in the root's closing brace and the end of the turn, each taught."""
    return target.roles_T[-2:].tolist() == [TokenRole.CLOSE, TokenRole.EOS]


def coordinate_targets(
    pairs: Sequence[tuple[PredictedObject, GTObject]], transport: TransportConfig
) -> list[Sequence[float]]:
    """Where each coordinate of each prediction should have been, given its object: as many float bins as it has.

    Two boxes: the true box. Otherwise both shapes are point sets (a box is its four corners) and each predicted point
    goes to the barycentre of its transport plan; a predicted box takes the bounds of its transported corners.
    """
    targets: list[Sequence[float]] = [truth.bins for _, truth in pairs]
    transported = [k for k, (pred, truth) in enumerate(pairs) if pred.kind == "poly" or truth.kind == "poly"]
    if not transported:
        return targets
    moved = barycentric_targets_of(
        [(_points(pairs[k][0]), _points(pairs[k][1])) for k in transported],
        cost=transport.cost,
        epsilon=transport.epsilon,
        iters=transport.iters,
    )
    for k, moved_N2 in zip(transported, moved, strict=True):
        points = np.minimum(np.maximum(moved_N2, 0), NUM_BINS - 1)
        if pairs[k][0].kind == "bbox_2d":
            targets[k] = [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
        else:
            targets[k] = points.reshape(-1).tolist()
    return targets


def _points(shape: PredictedObject | GTObject) -> np.ndarray:
    if shape.kind == "poly":
        return np.array(shape.bins, dtype=np.float64).reshape(-1, 2)
    x1, y1, x2, y2 = shape.bins
    return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.float64)


def _check_coord_tokens(
    matched: Sequence[PredictedObject], parsed: ParsedRollout, vocab: CoordVocab, sample_id: str
) -> None:
    """Every coordinate of every matched object is written by the token that stands for it.

    Raises:
        AlignmentError: one is not.
    """
    prefix, bins = parsed.prefix_token_ids, vocab.bins
    for predicted in matched:
        positions = predicted.coord_token_idx
        if min(positions) >= 0 and max(positions) < len(prefix):
            written = tuple([bins.get(prefix[position]) for position in positions])
            if written == predicted.bins:
                continue
        else:
            written = None
        raise AlignmentError(
            f"{sample_id}: object_{predicted.index} says {predicted.bins} but its tokens write {written}; "
            "the parse does not belong to this rollout"
        )


def _join(
    sample_id: str,
    prefix_ids: tuple[int, ...],
    matched: Sequence[tuple[PredictedObject, Sequence[float]]],
    tail: Tail,
    vocab: CoordVocab,
    context: SupervisionContext,
    pairs: Sequence[Match],
    appended_gt_idx: tuple[int, ...],
    first_index: int,
) -> TrainingTarget:
    prefix_len = len(prefix_ids)
    # One array from all objects' numbers: an array of each object's four would cost more than all the rest.
    prefix_roles = np.full(prefix_len, TokenRole.PREFIX_MASKED, dtype=np.uint8)
    positions = [position for predicted, _ in matched for position in predicted.coord_token_idx]
    bins = [target for _, targets in matched for target in targets]
    for predicted, _ in matched:
        prefix_roles[slice(*predicted.own_token_span)] = TokenRole.PREFIX_STRUCT
        prefix_roles[slice(*predicted.desc_token_span)] = TokenRole.PREFIX_DESC
    prefix_roles[positions] = TokenRole.PREFIX_COORD
    boxes = [(predicted.coord_token_idx, target) for predicted, target in matched if predicted.kind == "bbox_2d"]
    coord_pos_K = np.concatenate([np.array(positions, dtype=np.int64), tail.coord_pos_K + prefix_len])
    coord_bin_K = np.concatenate([np.array(bins, dtype=np.float64), tail.coord_bin_K])
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
