"""Supervision: text written from ground truth → token ids, one role per token, and where its coordinates are; and
where each coordinate of a matched prediction should have been: at the true box, or by transport between polygons."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from coordexp.config.rollout import TransportConfig
from coordexp.coords import CoordVocab, Fragment
from coordexp.errors import AlignmentError
from coordexp.geometry import aabb, nearest_on_outline
from coordexp.records import (
    NUM_BINS,
    GeometryKind,
    GTObject,
    Match,
    PredictedObject,
    SupervisionContext,
    TokenRole,
    TrainingTarget,
)
from coordexp.targets.weights import SupervisionWeights, weigh_tokens
from coordexp.transport import barycentric_targets_of


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Tokens of a fragment written from objects, and the end of the turn.

    ``softness_T``: factor on the cross-entropy, below 1 on soft objects' text. Per object, in the order written:
    ``entry_tokens``, the half-open range of the tokens that touch its entry or the separator before it, and
    ``coords_of``, the positions of its coordinates.
    """

    token_ids: tuple[int, ...]
    roles_T: np.ndarray
    softness_T: np.ndarray
    entry_tokens: tuple[tuple[int, int], ...]
    coords_of: tuple[tuple[int, ...], ...]


def encode_tail(fragment: Fragment, objects: Sequence[GTObject], vocab: CoordVocab) -> Tail:
    """Tokenise ``fragment`` (which writes exactly ``objects``) and say what each token is.

    A token that touches a desc value is GT_DESC, also where the closing quote is fused into it; a coordinate token is
    GT_COORD, or SOFT_COORD where its object is soft; the last token of text, which holds the root's closing brace, is
    CLOSE; all else is GT_STRUCT. A token that touches a soft object's entry, or the separator before it, weighs as
    little as the softest of what it touches. Raises AlignmentError if the tokens do not decode to the fragment, its
    coordinate tokens are not the objects', or a description writes a control token.
    """
    token_ids = vocab.encode_answer(fragment.text)
    pieces = vocab.pieces
    written_T = [pieces[i] for i in token_ids]
    if b"".join(written_T) != fragment.text.encode():
        raise AlignmentError(f"tokens of {fragment.text[:80]!r}… do not decode to it; normalise descriptions to NFC")
    if not vocab.reserved_ids.isdisjoint(token_ids):
        control = next(vocab.piece(i) for i in token_ids if i in vocab.reserved_ids)
        raise AlignmentError(
            f"a description contains {control!r}, which the tokenizer reads as a control token; remove it"
        )
    ends_T = list(accumulate(map(len, written_T)))
    roles_T = np.full(len(token_ids), TokenRole.GT_STRUCT, dtype=np.uint8)
    for start, end in _byte_spans(fragment.text, fragment.desc_spans):
        roles_T[bisect_right(ends_T, start) : bisect_right(ends_T, end - 1) + 1] = TokenRole.GT_DESC
    roles_T[-1] = TokenRole.CLOSE
    bins = vocab.bins
    written = [(position, bins[i]) for position, i in enumerate(token_ids) if i in bins]
    wanted = [k for obj in objects for k in obj.bins]
    if [k for _, k in written] != wanted:
        raise AlignmentError(
            f"the tokens of {fragment.text[:80]!r}… hold {len(written)} coordinates, the objects have {len(wanted)}; "
            "descriptions must not contain coordinate tokens"
        )
    entry_tokens = tuple(
        (bisect_right(ends_T, start), bisect_right(ends_T, end - 1) + 1)
        for start, end in _byte_spans(fragment.text, fragment.entry_spans)
    )
    coords_of, at = [], 0
    for obj in objects:
        coords_of.append(tuple([position for position, _ in written[at : at + len(obj.bins)]]))
        at += len(obj.bins)
    taught = [k for obj, positions in zip(objects, coords_of, strict=True) if obj.soft is None for k in positions]
    roles_T[[position for position, _ in written]] = TokenRole.SOFT_COORD
    roles_T[taught] = TokenRole.GT_COORD
    softness_T = np.ones(len(token_ids))
    for obj, (start, end) in zip(objects, entry_tokens, strict=True):
        if obj.soft is not None:
            softness_T[start:end] = np.minimum(softness_T[start:end], obj.soft)
    softness_T[-1] = 1.0  # the end of the answer belongs to no object
    return Tail(
        (*token_ids, vocab.eos_id),
        np.append(roles_T, np.uint8(TokenRole.EOS)),
        np.append(softness_T, 1.0),
        entry_tokens,
        tuple(coords_of),
    )


# Kind as which its coordinates are trained, their target positions, their bins.
Shape = tuple[GeometryKind, Sequence[int], Sequence[float]]


def assemble(
    sample_id: str,
    token_ids: Sequence[int],
    roles_T: np.ndarray,
    softness_T: np.ndarray,
    shapes: Sequence[Shape],
    weights: SupervisionWeights,
    *,
    context: SupervisionContext,
    prefix_len: int = 0,
    pairs: Sequence[Match] = (),
    appended_gt_idx: Sequence[int] = (),
    appended_object_index: Sequence[int] = (),
    left_out_pred_idx: Sequence[int] = (),
) -> TrainingTarget:
    """The target with these tokens and roles, whose ``shapes`` have coordinate targets."""
    shapes = sorted(shapes, key=lambda shape: shape[1][0])  # a matched object's are in the model's order
    boxes = [(positions, bins) for kind, positions, bins in shapes if kind == "bbox_2d"]
    box_pos_M4 = np.array([positions for positions, _ in boxes], dtype=np.int64).reshape(-1, 4)
    return TrainingTarget(
        sample_id=sample_id,
        token_ids=tuple(token_ids),
        roles_T=roles_T,
        coord_pos_K=np.array([position for _, positions, _ in shapes for position in positions], dtype=np.int64),
        coord_bin_K=np.array([k for _, _, bins in shapes for k in bins], dtype=np.float64),
        box_pos_M4=box_pos_M4,
        box_bin_M4=np.array([bins for _, bins in boxes], dtype=np.float64).reshape(-1, 4),
        weights=weigh_tokens(roles_T, box_pos_M4, context, weights, softness_T),
        context=context,
        prefix_len=prefix_len,
        matched_pred_idx=tuple(pair.pred_idx for pair in pairs),
        matched_gt_idx=tuple(pair.gt_idx for pair in pairs),
        appended_gt_idx=tuple(appended_gt_idx),
        appended_object_index=tuple(appended_object_index),
        left_out_pred_idx=tuple(left_out_pred_idx),
    )


def _byte_spans(text: str, spans: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Ascending character ranges of ``text`` as ranges of its UTF-8."""
    if text.isascii():
        return spans
    in_bytes, at_char, at_byte = [], 0, 0
    for start, end in spans:
        at_byte += len(text[at_char:start].encode())
        length = len(text[start:end].encode())
        in_bytes.append((at_byte, at_byte + length))
        at_char, at_byte = end, at_byte + length
    return in_bytes


def coordinate_targets(
    pairs: Sequence[tuple[PredictedObject, GTObject]], transport: TransportConfig
) -> list[Sequence[float]]:
    """Where each coordinate of each prediction should have been, given its object: as many float bins as it has.

    ==========  =========  ==============================================================
    prediction  object     target
    ==========  =========  ==============================================================
    box         box        the box
    polygon     polygon    of each vertex: the barycentre of its row of the transport plan
    box         polygon    the polygon's bounds
    polygon     box        of each vertex: the nearest point of the box's outline
    ==========  =========  ==============================================================
    """
    targets: list[Sequence[float]] = []
    polygons: list[int] = []
    for k, (pred, truth) in enumerate(pairs):
        if pred.kind == "bbox_2d":
            targets.append(truth.bins if truth.kind == "bbox_2d" else aabb(truth))
        elif truth.kind == "bbox_2d":
            targets.append(nearest_on_outline(_points(pred), aabb(truth)).reshape(-1).tolist())
        else:
            polygons.append(k)
            targets.append(())
    if not polygons:
        return targets
    moved = barycentric_targets_of(
        [(_points(pairs[k][0]), _points(pairs[k][1])) for k in polygons],
        cost=transport.cost,
        epsilon=transport.epsilon,
        iters=transport.iters,
    )
    for k, moved_N2 in zip(polygons, moved, strict=True):
        targets[k] = np.minimum(np.maximum(moved_N2, 0), NUM_BINS - 1).reshape(-1).tolist()
    return targets


def _points(shape: PredictedObject | GTObject) -> np.ndarray:
    return np.array(shape.bins, dtype=np.float64).reshape(-1, 2)
