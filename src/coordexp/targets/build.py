"""``Y_train``: the model's own prefix, then every object it missed, then the end of the turn.

    Y_train = prefix of the rollout + append(objects not found) + EOS

Coordinates of matched objects in the prefix are pulled to the ground truth that they matched. After the prefix, text
and coordinates are trained as in SFT. Roles label the tokens (:class:`TokenRole`), and :mod:`coordexp.targets.weights`
decides which of them each loss term is trained on. This is the contract's target, ``answer: as_written``;
:mod:`coordexp.targets.rewrite` builds the other one. Soft objects (:class:`GTObject`) have no coordinate targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.config.rollout import FIELD_ORDER, TargetPolicy, TransportConfig
from coordexp.coords import CoordVocab, FieldOrder, append_fragment
from coordexp.errors import AlignmentError
from coordexp.records import GTObject, MatchResult, ParsedRollout, PredictedObject, Rollout, TokenRole, TrainingTarget
from coordexp.targets.rewrite import build_rewritten
from coordexp.targets.supervision import Shape, Tail, assemble, coordinate_targets, encode_tail
from coordexp.targets.weights import SupervisionWeights

# Defaults of the keys, for calls outside of a run.
_TRANSPORT, _POLICY, _WEIGHTS = TransportConfig(), TargetPolicy(), SupervisionWeights()


@dataclass(frozen=True, slots=True)
class SampleOutcome:
    """One sample's way from its answer to its target. ``policy`` built the target; ``taken_as_complete``: it is the
    policy for complete annotations (``TargetPolicy.complete_above``). ``num_mixed_kind``: matched pairs of a box and a
    polygon."""

    rollout: Rollout
    parsed: ParsedRollout
    match: MatchResult
    target: TrainingTarget
    policy: TargetPolicy
    taken_as_complete: bool = False
    num_mixed_kind: int = 0


def build_gt_target(
    ground_truth: Sequence[GTObject],
    vocab: CoordVocab,
    *,
    sample_id: str,
    field_order: FieldOrder,
    weights: SupervisionWeights = _WEIGHTS,
) -> TrainingTarget:
    """The whole answer from ground truth: stage 1, Channel-A, and the baseline of every comparison."""
    tail = encode_tail(append_fragment(ground_truth, "{", 1, field_order, opening="{"), ground_truth, vocab)
    return assemble(
        sample_id,
        tail.token_ids,
        tail.roles_T,
        tail.softness_T,
        _shapes_of(tail, ground_truth, 0),
        weights,
        context="gt",
        appended_gt_idx=range(len(ground_truth)),
        appended_object_index=range(1, 1 + len(ground_truth)),
    )


def build_target(
    parsed: ParsedRollout,
    match: MatchResult,
    ground_truth: Sequence[GTObject],
    vocab: CoordVocab,
    *,
    sample_id: str = "sample",
    field_order: FieldOrder = FIELD_ORDER,
    transport: TransportConfig = _TRANSPORT,
    policy: TargetPolicy = _POLICY,
    weights: SupervisionWeights = _WEIGHTS,
) -> TrainingTarget:
    """Correct what the rollout found, append what it missed.

    Args:
        parsed: the rollout; ``match`` its assignment to ``ground_truth`` (objects in the order in which missed ones
            are appended).
        sample_id: names the sample in the target and in errors.
        policy: what to do with the model's own text.
        weights: of the tokens in each loss term. The default trains text that the target writes, except descriptions
            appended to a rollout.

    Raises:
        AlignmentError: a position that should hold a coordinate token of the stated object does not.
    """
    if policy.answer == "rewritten":
        return build_rewritten(parsed, match, ground_truth, vocab, sample_id, field_order, transport, policy, weights)
    missed = [ground_truth[j] for j in match.fn_gt_idx]
    first_index = (parsed.max_object_index or 0) + 1
    tail = encode_tail(append_fragment(missed, parsed.prefix_text, first_index, field_order), missed, vocab)
    matched = [(parsed.objects[pair.pred_idx], ground_truth[pair.gt_idx]) for pair in match.pairs]
    _check_coord_tokens([predicted for predicted, _ in matched], parsed, vocab, sample_id)
    prefix_len = len(parsed.prefix_token_ids)
    roles_T = np.concatenate([np.full(prefix_len, TokenRole.MASKED, dtype=np.uint8), tail.roles_T])
    mark_matched(roles_T, matched)
    softness_T = np.concatenate([np.ones(prefix_len), tail.softness_T])
    for predicted, truth in matched:
        if truth.soft is not None:
            softness_T[slice(*predicted.own_token_span)] = truth.soft
    # A box matched to a polygon is trained by coord_reg alone, as a polygon is: no loss on decoded boxes.
    corrected: list[Shape] = [
        (predicted.kind if predicted.kind == truth.kind else "poly", predicted.coord_token_idx, bins)
        for (predicted, truth), bins in zip(matched, coordinate_targets(matched, transport), strict=True)
        if truth.soft is None
    ]
    return assemble(
        sample_id,
        (*parsed.prefix_token_ids, *tail.token_ids),
        roles_T,
        softness_T,
        [*corrected, *_shapes_of(tail, missed, prefix_len)],
        weights,
        context="rollout",
        prefix_len=prefix_len,
        pairs=match.pairs,
        appended_gt_idx=match.fn_gt_idx,
        appended_object_index=range(first_index, first_index + len(missed)),
    )


def empty_target(sample_id: str) -> TrainingTarget:
    """No token and no supervision: for a prompt that is read but not answered, and an answer that cannot be closed."""
    return assemble(sample_id, (), np.zeros(0, dtype=np.uint8), np.zeros(0), (), _WEIGHTS, context="rollout")


def is_closed(target: TrainingTarget) -> bool:
    """Whether the answer ends in the root's closing brace and the end of the turn."""
    return target.roles_T[-2:].tolist() == [TokenRole.CLOSE, TokenRole.EOS]


def _shapes_of(tail: Tail, objects: Sequence[GTObject], prefix_len: int) -> list[Shape]:
    """Annotated objects of a tail after ``prefix_len`` tokens; soft ones have no coordinate targets."""
    return [
        (obj.kind, [prefix_len + position for position in positions], obj.bins)
        for obj, positions in zip(objects, tail.coords_of, strict=True)
        if obj.soft is None
    ]


def _check_coord_tokens(
    matched: Sequence[PredictedObject], parsed: ParsedRollout, vocab: CoordVocab, sample_id: str
) -> None:
    """Raises AlignmentError if a coordinate of a matched object is not written by its own coordinate token."""
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


def count_mixed_kind(parsed: ParsedRollout, match: MatchResult, ground_truth: Sequence[GTObject]) -> int:
    """Matched pairs of a box and a polygon."""
    return sum(parsed.objects[pair.pred_idx].kind != ground_truth[pair.gt_idx].kind for pair in match.pairs)


def mark_matched(roles_T: np.ndarray, matched: Sequence[tuple[PredictedObject, GTObject]]) -> None:
    """Give the tokens of matched objects, as the model wrote them, their roles in ``roles_T``."""
    for predicted, _ in matched:
        roles_T[slice(*predicted.own_token_span)] = TokenRole.MATCHED_STRUCT
        roles_T[slice(*predicted.desc_token_span)] = TokenRole.MATCHED_DESC
    # One assignment for all objects' coordinates: one for each object's four would cost more than all the rest.
    roles_T[_coord_positions(matched)] = TokenRole.MATCHED_COORD
    softly = [pair for pair in matched if pair[1].soft is not None]
    if softly:
        roles_T[_coord_positions(softly)] = TokenRole.SOFT_COORD


def _coord_positions(matched: Sequence[tuple[PredictedObject, GTObject]]) -> list[int]:
    return [position for predicted, _ in matched for position in predicted.coord_token_idx]
