"""The model's answer, rewritten by what the match says: ``rollout_matching.target.answer: rewritten``.

Entries are in the model's own order, numbered from 1, and the whole text is tokenised again. Unless
``duplicates: keep``, one of several attempts at an object is written, at the place of the first:

* a *matched* object, same kind of geometry: the annotation's description and the model's own coordinate tokens, which
  are pulled to the annotation in place; its key, structure, description and the separator before it are trained;
* a matched object of the *other kind*: the annotation's entry, trained whole;
* an *unmatched* object: as the model wrote it, masked with the separator before it (or left out, as is one whose
  description cannot be written again: it holds a control token, a coordinate, or text that the tokenizer changes);
* an object that was *missed*: the annotation's entry, trained whole;
* then the closing brace and the end of the turn.

A token that touches a masked entry is masked, also where it is fused with a neighbour; the closing brace never is.
"""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from coordexp.config.rollout import TargetPolicy, TransportConfig
from coordexp.coords import CoordVocab, FieldOrder, append_fragment
from coordexp.matching import SAME_TRY_IOU, alike_pairs
from coordexp.records import GTObject, MatchResult, ParsedRollout, PredictedObject, TokenRole, TrainingTarget
from coordexp.targets.supervision import Shape, assemble, coordinate_targets, encode_tail
from coordexp.targets.weights import SupervisionWeights

_AS_MATCHED = {
    TokenRole.GT_STRUCT: TokenRole.REWRITTEN_STRUCT,
    TokenRole.GT_DESC: TokenRole.REWRITTEN_DESC,
    TokenRole.GT_COORD: TokenRole.MATCHED_COORD,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry to write. ``bins``: its coordinates' targets, None if the entry is masked."""

    obj: GTObject
    bins: Sequence[float] | None
    gt_idx: int = -1  # of the annotation that the entry writes; -1 if there is none
    pred_idx: int | None = None  # the entry is the model's own, at its own coordinates


def build_rewritten(
    parsed: ParsedRollout,
    match: MatchResult,
    ground_truth: Sequence[GTObject],
    vocab: CoordVocab,
    sample_id: str,
    field_order: FieldOrder,
    transport: TransportConfig,
    policy: TargetPolicy,
    weights: SupervisionWeights,
) -> TrainingTarget:
    """``Y_train`` as the module says. No token of it is the rollout's own (``prefix_len`` 0), and nothing that can be
    parsed is refused: an answer that breaks off is rewritten with the objects that were read. Raises AlignmentError for
    a description that cannot be written, as :func:`coordexp.targets.encode_tail`."""
    # The parts to write, in order.
    gt_of = {pair.pred_idx: pair.gt_idx for pair in match.pairs}
    in_place = [i for i, j in gt_of.items() if parsed.objects[i].kind == ground_truth[j].kind]
    pulled_to = coordinate_targets([(parsed.objects[i], ground_truth[gt_of[i]]) for i in in_place], transport)
    bins_of = dict(zip(in_place, pulled_to, strict=True))
    order, copies = _written_once(parsed.objects, gt_of, ground_truth, policy)
    missed = [_Entry(ground_truth[j], ground_truth[j].bins, j) for j in match.fn_gt_idx]
    entries: list[_Entry] = []
    for i in order:
        predicted = parsed.objects[i]
        if i in bins_of:
            obj = replace(ground_truth[gt_of[i]], bins=predicted.bins)
            entries.append(_Entry(obj, bins_of[i], gt_of[i], i))
        elif i in gt_of:
            entries.append(_Entry(ground_truth[gt_of[i]], ground_truth[gt_of[i]].bins, gt_of[i]))
        elif i in copies:
            if policy.duplicates == "replace" and missed:
                entries.append(missed.pop(0))
        elif policy.unmatched != "drop" and _is_writable(predicted.desc, vocab):
            entries.append(_Entry(GTObject(predicted.desc, predicted.kind, predicted.bins), None, pred_idx=i))
    for entry in missed:
        place = len(entries)
        if policy.missed == "in_order":  # before the first entry that the annotations name later
            place = next((k for k, one in enumerate(entries) if one.gt_idx > entry.gt_idx), place)
        entries.insert(place, entry)

    # Its tokens, and their roles: those of the model's own entries, then masked ones.
    written = [entry.obj for entry in entries]
    tail = encode_tail(append_fragment(written, "{", 1, field_order, opening="{"), written, vocab)
    roles_T = tail.roles_T.copy()
    for entry, span in zip(entries, tail.entry_tokens, strict=True):
        if entry.pred_idx is not None and entry.bins is not None:
            own_T = roles_T[slice(*span)]
            for role, as_matched in _AS_MATCHED.items():
                own_T[own_T == role] = as_matched
    for entry, span in zip(entries, tail.entry_tokens, strict=True):
        if entry.bins is None:
            roles_T[slice(*span)] = TokenRole.MASKED
    roles_T[-2] = TokenRole.CLOSE  # before the end of the turn
    shapes: list[Shape] = [
        (entry.obj.kind, positions, entry.bins)
        for entry, positions in zip(entries, tail.coords_of, strict=True)
        if entry.bins is not None and entry.obj.soft is None
    ]
    own = {entry.pred_idx for entry in entries}
    number_of = {entry.gt_idx: number for number, entry in enumerate(entries, start=1)}
    return assemble(
        sample_id,
        tail.token_ids,
        roles_T,
        tail.softness_T,
        shapes,
        weights,
        context="rollout",
        pairs=match.pairs,
        appended_gt_idx=match.fn_gt_idx,
        appended_object_index=[number_of[j] for j in match.fn_gt_idx],
        left_out_pred_idx=[i for i in match.fp_pred_idx if i not in own],
    )


def _written_once(
    objects: Sequence[PredictedObject],
    matched: Container[int],
    ground_truth: Sequence[GTObject],
    policy: TargetPolicy,
) -> tuple[list[int], set[int]]:
    """The order in which predictions are written, and those that are copies.

    Of an object that the model tried to write more than once, the matched attempt stays and takes the place of the
    first; else the first stays. An unmatched attempt at an annotated object is a copy too: the annotation is written.
    A copy that stayed would teach the model to write an object again, or after a bad attempt at it."""
    order = list(range(len(objects)))
    if policy.duplicates == "keep":
        return order, set()
    pairs = alike_pairs(objects, objects, SAME_TRY_IOU).tolist()
    copies, moved = {later for _, later in pairs}, set[int]()
    for first, later in pairs:
        if later in matched and first not in matched and first not in copies:
            copies.add(first)
            if later not in moved:
                order[first], order[later] = later, first
                moved.add(later)
    return order, copies | {i for i, _ in alike_pairs(objects, ground_truth, SAME_TRY_IOU).tolist()}


def _is_writable(desc: str, vocab: CoordVocab) -> bool:
    # Whether the tokenizer gives a model's description back as plain text, and unchanged.
    text = json.dumps(desc, ensure_ascii=False)
    try:
        written = text.encode()
    except UnicodeEncodeError:  # half of a character, by an escape
        return False
    token_ids = vocab.encode(text)
    plain = vocab.reserved_ids.isdisjoint(token_ids) and not any(i in vocab.bins for i in token_ids)
    return plain and b"".join(vocab.pieces[i] for i in token_ids) == written
