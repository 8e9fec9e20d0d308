"""Concatenation of segments into packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordexp.errors import AlignmentError
from coordexp.records import PackedRow, Segment


def build_row(segments: Sequence[Segment]) -> PackedRow:
    """Lay segments end to end, each as its prompt tokens and then its target tokens.

    Raises:
        ValueError: no segment. AlignmentError: roles or weights do not have one value per target token, or the
            coordinates of a target are not exactly its assistant tokens with a ``coord`` weight.
    """
    if not segments:
        raise ValueError("a packed row needs at least one segment")
    for segment in segments:  # a shifted position would train silently on the wrong tokens
        target, where = segment.target, f"sample {segment.sample_id}"
        length = len(target.token_ids)
        for name, array_T in (("roles", target.roles_T), *target.weights.items()):
            if len(array_T) != length:
                raise AlignmentError(f"{where}: {len(array_T)} {name} for {length} target tokens")
        positions = np.concatenate([np.ravel(target.coord_pos_K), np.ravel(target.box_pos_M4)]).astype(np.int64)
        outside = positions[(positions < 0) | (positions >= length)]
        if outside.size:
            raise AlignmentError(
                f"{where}: supervised coordinate at target position {outside[0]} is outside the {length} assistant "
                "tokens (it would point into the prompt or the next sample); rebuild the target"
            )
        coord_T = target.weights.get("coord", np.zeros(length))
        unweighted = positions[coord_T[positions] == 0]
        if unweighted.size:
            raise AlignmentError(
                f"{where}: supervised coordinate at target position {unweighted[0]} is a token without a coord weight; "
                "rebuild the target"
            )
        if not np.array_equal(np.flatnonzero(coord_T), target.coord_pos_K):
            raise AlignmentError(
                f"{where}: {np.count_nonzero(coord_T)} tokens have a coord weight, but {len(target.coord_pos_K)} have "
                "a target bin, or not in this order; rebuild the target"
            )
    token_ids_L = np.concatenate(
        [np.asarray((*segment.prompt_token_ids, *segment.target.token_ids), dtype=np.int64) for segment in segments]
    )
    offsets = np.concatenate([[0], np.cumsum([segment.length for segment in segments])])
    return PackedRow(tuple(segments), token_ids_L, tuple(offsets.tolist()))
