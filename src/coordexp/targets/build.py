"""``Y_train``: the model's own prefix, then every object it missed, then the end of the turn.

    Y_train = prefix of the rollout + append(objects not found) + EOS

Text of the prefix is never supervised here, though a matched object's own is told apart from the rest. Coordinates of
matched objects in the prefix are pulled to the ground truth they matched; everything behind the prefix is taught as
ordinary text and coordinates (see :class:`TokenRole`). That is the contract's target, ``answer: as_written``;
:mod:`coordexp.targets.rewrite` builds the other one. Soft objects (:class:`GTObject`) are taught their text, by weight,
and no coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordexp.config.rollout import FIELD_ORDER, TargetPolicy, TransportConfig
from coordexp.coords import CoordVocab, FieldOrder, append_fragment
from coordexp.errors import AlignmentError
from coordexp.records import (
    GTObject,
    Match,
    MatchResult,
    ParsedRollout,
    PredictedObject,
    SupervisionContext,
    TokenRole,
    TrainingTarget,
)
from coordexp.targets.rewrite import build_rewritten
from coordexp.targets.supervision import Tail, coordinate_targets, encode_tail
from coordexp.targets.weights import SupervisionWeights, weigh_tokens

# Of a call outside of a run: what the keys have by default.
_TRANSPORT, _POLICY, _WEIGHTS = TransportConfig(), TargetPolicy(), SupervisionWeights()


def build_gt_target(
    ground_truth: Sequence[GTObject],
    vocab: CoordVocab,
    *,
    sample_id: str,
    field_order: FieldOrder,
    weights: SupervisionWeights = _WEIGHTS,
) -> TrainingTarget:
    """The whole answer from ground truth: stage 1, Channel-A, and the baseline of every comparison."""
    tail = encode_tail(append_fragment(ground_truth, "{", 1, field_order).after("{"), ground_truth, vocab)
    return _join(sample_id, (), [], [], tail, vocab, "gt", (), tuple(range(len(ground_truth))), 1, weights)


def build_target(
    parsed: ParsedRollout,
    match: MatchResult,
    ground_truth: Sequence[GTObject],
    vocab: CoordVocab,
    *,
    sample_id: str,
    field_order: FieldOrder = FIELD_ORDER,
    transport: TransportConfig = _TRANSPORT,
    policy: TargetPolicy = _POLICY,
    weights: SupervisionWeights = _WEIGHTS,
) -> TrainingTarget:
    """Correct what the rollout found, append what it missed.

    Args:
        parsed: the rollout; ``match`` its assignment to ``ground_truth`` (objects in the order in which missed ones
            are appended).
        policy: what becomes of the model's own text. It, ``field_order`` and ``transport`` are what their keys have by
            default unless they are given.
        weights: of the tokens in each loss term. The default trains text that the target writes, except descriptions
            appended to a rollout.

    Raises:
        AlignmentError: a position that should hold a coordinate token of the stated object does not.
    """
    if policy.answer == "rewritten":
        return build_rewritten(
            parsed,
            match,
            ground_truth,
            vocab,
            sample_id=sample_id,
            field_order=field_order,
            transport=transport,
            policy=policy,
            weights=weights,
        )
    missed = [ground_truth[j] for j in match.fn_gt_idx]
    first_index = (parsed.max_object_index or 0) + 1
    fragment = append_fragment(missed, parsed.prefix_text, first_index, field_order)
    tail = encode_tail(fragment, missed, vocab)
    matched = [(parsed.objects[pair.pred_idx], ground_truth[pair.gt_idx]) for pair in match.pairs]
    _check_coord_tokens([predicted for predicted, _ in matched], parsed, vocab, sample_id)
    moved = coordinate_targets(matched, transport)
    prefix = parsed.prefix_token_ids
    return _join(
        sample_id, prefix, matched, moved, tail, vocab, "rollout", match.pairs, match.fn_gt_idx, first_index, weights
    )


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
        weights={},
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


def mark_matched(roles_T: np.ndarray, matched: Sequence[tuple[PredictedObject, GTObject]]) -> None:
    """Give the tokens of matched objects, as the model wrote them, their roles in ``roles_T``."""
    for predicted, _ in matched:
        roles_T[slice(*predicted.own_token_span)] = TokenRole.PREFIX_STRUCT
        roles_T[slice(*predicted.desc_token_span)] = TokenRole.PREFIX_DESC
    # One assignment for all objects' coordinates: one for each object's four would cost more than all the rest.
    roles_T[_coord_positions(matched)] = TokenRole.PREFIX_COORD
    softly = [pair for pair in matched if pair[1].soft is not None]
    if softly:
        roles_T[_coord_positions(softly)] = TokenRole.SOFT_COORD


def _coord_positions(matched: Sequence[tuple[PredictedObject, GTObject]]) -> list[int]:
    return [position for predicted, _ in matched for position in predicted.coord_token_idx]


def _join(
    sample_id: str,
    prefix_ids: tuple[int, ...],
    matched: Sequence[tuple[PredictedObject, GTObject]],
    moved: Sequence[Sequence[float]],
    tail: Tail,
    vocab: CoordVocab,
    context: SupervisionContext,
    pairs: Sequence[Match],
    appended_gt_idx: tuple[int, ...],
    first_index: int,
    weights: SupervisionWeights,
) -> TrainingTarget:
    """``matched``: matched objects, and ``moved`` their target bins."""
    prefix_len = len(prefix_ids)
    prefix_roles = np.full(prefix_len, TokenRole.PREFIX_MASKED, dtype=np.uint8)
    mark_matched(prefix_roles, matched)
    taught = [(pred, target) for (pred, truth), target in zip(matched, moved, strict=True) if truth.soft is None]
    positions = [position for predicted, _ in taught for position in predicted.coord_token_idx]
    bins = [target for _, targets in taught for target in targets]
    boxes = [(predicted.coord_token_idx, target) for predicted, target in taught if predicted.kind == "bbox_2d"]
    coord_pos_K = np.concatenate([np.array(positions, dtype=np.int64), tail.coord_pos_K + prefix_len])
    coord_bin_K = np.concatenate([np.array(bins, dtype=np.float64), tail.coord_bin_K])
    order = np.argsort(coord_pos_K, kind="stable")
    roles_T = np.concatenate([prefix_roles, tail.roles_T, [np.uint8(TokenRole.EOS)]])
    box_pos = np.array([positions for positions, _ in boxes], dtype=np.int64).reshape(-1, 4)
    box_bin = np.array([target for _, target in boxes], dtype=np.float64).reshape(-1, 4)
    box_pos_M4 = np.concatenate([box_pos, tail.box_pos_M4 + prefix_len])
    return TrainingTarget(
        sample_id=sample_id,
        token_ids=(*prefix_ids, *tail.token_ids, vocab.eos_id),
        roles_T=roles_T,
        coord_pos_K=coord_pos_K[order],
        coord_bin_K=coord_bin_K[order],
        box_pos_M4=box_pos_M4,
        box_bin_M4=np.concatenate([box_bin, tail.box_bin_M4]),
        weights=weigh_tokens(roles_T, box_pos_M4, context, weights, _softness(prefix_len, matched, tail)),
        context=context,
        prefix_len=prefix_len,
        matched_pred_idx=tuple(pair.pred_idx for pair in pairs),
        matched_gt_idx=tuple(pair.gt_idx for pair in pairs),
        appended_gt_idx=tuple(appended_gt_idx),
        appended_object_index=tuple(range(first_index, first_index + len(appended_gt_idx))),
    )


def _softness(prefix_len: int, matched: Sequence[tuple[PredictedObject, GTObject]], tail: Tail) -> np.ndarray | None:
    """Of prefix, tail and EOS; None if no object is soft."""
    if tail.softness_T is None and all(truth.soft is None for _, truth in matched):
        return None
    softness_T = np.ones(prefix_len + len(tail.token_ids) + 1)
    for predicted, truth in matched:
        if truth.soft is not None:
            softness_T[slice(*predicted.own_token_span)] = truth.soft
    if tail.softness_T is not None:
        softness_T[prefix_len:-1] = tail.softness_T
    return softness_T
