"""Concatenation into packed rows, and every target position shifted to where its token now stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordexp.errors import AlignmentError
from coordexp.records import PackedRow, Segment, TokenRole

PROMPT_ROLE = -1
_COORD_ROLES = (int(TokenRole.PREFIX_COORD), int(TokenRole.TAIL_COORD))


@dataclass(frozen=True, slots=True, eq=False)
class RowSupervision:
    """Supervision of a packed row of L tokens, in row positions. K supervised coordinates, M supervised boxes.

    ``roles_L`` int8 of :class:`TokenRole`, -1 on prompt tokens; ``segment_L`` int64 index into the row's segments;
    ``text_weight_L`` float64, the factor on each token's cross-entropy;
    ``coord_pos_K`` int64, ``coord_bin_K`` float64, ``coord_segment_K`` int64; ``box_pos_M4`` int64 as (x1, y1, x2, y2),
    ``box_bin_M4`` float64, ``box_segment_M`` int64. Coordinates and boxes stand in the order of their segments.
    """

    roles_L: np.ndarray
    segment_L: np.ndarray
    text_weight_L: np.ndarray
    coord_pos_K: np.ndarray
    coord_bin_K: np.ndarray
    coord_segment_K: np.ndarray
    box_pos_M4: np.ndarray
    box_bin_M4: np.ndarray
    box_segment_M: np.ndarray


def build_row(segments: Sequence[Segment]) -> PackedRow:
    """Lay segments end to end, each as its prompt tokens and then its target tokens.

    Raises:
        ValueError: there is no segment. AlignmentError: a supervised coordinate lies outside its segment's assistant
            tokens, or on a token whose role is not a coordinate's; or a target does not have one role per token.
    """
    if not segments:
        raise ValueError("a packed row needs at least one segment")
    for segment in segments:
        _check_alignment(segment)
    token_ids_L = np.concatenate(
        [np.asarray((*segment.prompt_token_ids, *segment.target.token_ids), dtype=np.int64) for segment in segments]
    )
    offsets = np.concatenate([[0], np.cumsum([segment.length for segment in segments])])
    return PackedRow(tuple(segments), token_ids_L, tuple(offsets.tolist()))


def segment_ids(row: PackedRow) -> np.ndarray:
    """Index of the segment that each token belongs to: (L,) int64, ascending."""
    return np.repeat(np.arange(len(row.segments), dtype=np.int64), np.diff(row.offsets))


def supervise_row(row: PackedRow) -> RowSupervision:
    """Supervision of every segment of a row that :func:`build_row` checked, shifted from target positions to row
    positions."""
    roles_L = np.full(row.length, PROMPT_ROLE, dtype=np.int8)
    text_weight_L = np.ones(row.length)
    coord_pos, coord_bin, box_pos, box_bin = [], [], [], []
    for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
        target = segment.target
        first = start + len(segment.prompt_token_ids)
        roles_L[first:end] = target.roles_T
        if target.text_weight_T is not None:
            text_weight_L[first:end] = target.text_weight_T
        coord_pos.append(np.asarray(target.coord_pos_K, dtype=np.int64) + first)
        coord_bin.append(np.asarray(target.coord_bin_K, dtype=np.float64))
        box_pos.append(np.asarray(target.box_pos_M4, dtype=np.int64).reshape(-1, 4) + first)
        box_bin.append(np.asarray(target.box_bin_M4, dtype=np.float64).reshape(-1, 4))
    index = np.arange(len(row.segments), dtype=np.int64)
    return RowSupervision(
        roles_L=roles_L,
        segment_L=segment_ids(row),
        text_weight_L=text_weight_L,
        coord_pos_K=np.concatenate(coord_pos),
        coord_bin_K=np.concatenate(coord_bin),
        coord_segment_K=np.repeat(index, [len(positions) for positions in coord_pos]),
        box_pos_M4=np.concatenate(box_pos),
        box_bin_M4=np.concatenate(box_bin),
        box_segment_M=np.repeat(index, [len(positions) for positions in box_pos]),
    )


def _check_alignment(segment: Segment) -> None:
    """A shifted mistake would train silently on the wrong tokens."""
    target = segment.target
    length = len(target.token_ids)
    if len(target.roles_T) != length:
        raise AlignmentError(f"sample {segment.sample_id}: {len(target.roles_T)} roles for {length} target tokens")
    if target.text_weight_T is not None and len(target.text_weight_T) != length:
        raise AlignmentError(
            f"sample {segment.sample_id}: {len(target.text_weight_T)} text weights for {length} target tokens"
        )
    positions = np.concatenate([np.ravel(target.coord_pos_K), np.ravel(target.box_pos_M4)]).astype(np.int64)
    outside = positions[(positions < 0) | (positions >= length)]
    if outside.size:
        raise AlignmentError(
            f"sample {segment.sample_id}: supervised coordinate at target position {outside[0]} lies outside the "
            f"{length} assistant tokens (it would point into the prompt or the next sample); rebuild the target"
        )
    misplaced = positions[~np.isin(target.roles_T[positions], _COORD_ROLES)]
    if misplaced.size:
        role = TokenRole(int(target.roles_T[misplaced[0]])).name
        raise AlignmentError(
            f"sample {segment.sample_id}: supervised coordinate at target position {misplaced[0]} stands on a token "
            f"with role {role}; rebuild the target"
        )
