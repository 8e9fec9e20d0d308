"""Text written from ground truth → token ids, one role per token, and where its coordinates are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from coordexp.coords import CoordVocab, Fragment
from coordexp.errors import AlignmentError
from coordexp.records import GTObject, TokenRole


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """Tokens of a fragment written from ground truth: T ids, their roles, K coordinate positions and bins, M boxes."""

    token_ids: tuple[int, ...]
    roles_T: np.ndarray
    coord_pos_K: np.ndarray
    coord_bin_K: np.ndarray
    box_pos_M4: np.ndarray
    box_bin_M4: np.ndarray


def encode_tail(fragment: Fragment, objects: Sequence[GTObject], vocab: CoordVocab) -> Tail:
    """Tokenise ``fragment`` (which writes exactly ``objects``) and say what each token is.

    A token that touches a desc value is TAIL_DESC, also where the closing quote is fused into it; a coordinate token is
    TAIL_COORD; the last token, which holds the root's closing brace, is CLOSE; all else is TAIL_STRUCT.

    Raises:
        AlignmentError: the tokens do not decode to the fragment, its coordinate tokens are not the objects', or a
            description writes a control token.
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
    roles_T = np.full(len(token_ids), TokenRole.TAIL_STRUCT, dtype=np.uint8)
    for start, end in _byte_spans(fragment):
        roles_T[bisect_right(ends_T, start) : bisect_right(ends_T, end - 1) + 1] = TokenRole.TAIL_DESC
    roles_T[-1] = TokenRole.CLOSE
    bins = vocab.bins
    written = [(position, bins[i]) for position, i in enumerate(token_ids) if i in bins]
    wanted = [k for obj in objects for k in obj.bins]
    if [k for _, k in written] != wanted:
        raise AlignmentError(
            f"the tokens of {fragment.text[:80]!r}… hold {len(written)} coordinates, the objects have {len(wanted)}; "
            "descriptions must not contain coordinate tokens"
        )
    coord_pos_K = np.array([position for position, _ in written], dtype=np.int64)
    roles_T[coord_pos_K] = TokenRole.TAIL_COORD
    box_pos, box_bin, at = [], [], 0
    for obj in objects:
        if obj.kind == "bbox_2d":
            box_pos.append(coord_pos_K[at : at + 4])
            box_bin.append(obj.bins)
        at += len(obj.bins)
    return Tail(
        token_ids=tuple(token_ids),
        roles_T=roles_T,
        coord_pos_K=coord_pos_K,
        coord_bin_K=np.array(wanted, dtype=np.float64),
        box_pos_M4=np.array(box_pos, dtype=np.int64).reshape(-1, 4),
        box_bin_M4=np.array(box_bin, dtype=np.float64).reshape(-1, 4),
    )


def _byte_spans(fragment: Fragment) -> list[tuple[int, int]]:
    if fragment.text.isascii():
        return list(fragment.desc_spans)
    spans, at_char, at_byte = [], 0, 0
    for start, end in fragment.desc_spans:
        at_byte += len(fragment.text[at_char:start].encode())
        length = len(fragment.text[start:end].encode())
        spans.append((at_byte, at_byte + length))
        at_char, at_byte = end, at_byte + length
    return spans
