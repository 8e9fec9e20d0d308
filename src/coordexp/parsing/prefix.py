"""Where to stop keeping a rollout's tokens, so that further entries can be appended behind them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from coordexp.coords import CoordVocab
from coordexp.errors import VocabError


@dataclass(frozen=True, slots=True)
class Prefix:
    """``token_ids``: the rollout's own tokens, but for the last ``num_replaced``. ``cut``: the byte of the rollout at
    which they end; None when nothing of the rollout was kept."""

    token_ids: tuple[int, ...]
    num_replaced: int
    cut: int | None


def choose_prefix(token_ids: Sequence[int], ends: Sequence[int], cuts: Sequence[int], vocab: CoordVocab) -> Prefix:
    """The prefix for the last of ``cuts`` that tokens can realise; a lone ``{`` when none can.

    Args:
        token_ids: the rollout. ends: byte offset behind each token. cuts: ascending byte offsets, each right behind
            the root's ``{`` or the ``}`` of an entry.
    """
    for cut in reversed(cuts):
        prefix = _cut_at(token_ids, ends, cut, vocab)
        if prefix is not None:
            return prefix
    opening = exact_encoding(b"{", vocab)
    if opening is None:
        raise VocabError("the tokenizer cannot write a lone '{'; use a byte-level BPE tokenizer (the Qwen family's)")
    return Prefix(opening, len(opening), None)


def _cut_at(token_ids: Sequence[int], ends: Sequence[int], cut: int, vocab: CoordVocab) -> Prefix | None:
    last = bisect_left(ends, cut)  # the token that holds the byte before the cut
    if ends[last] == cut:
        return Prefix(tuple(token_ids[: last + 1]), 0, cut)
    start = ends[last - 1] if last else 0
    tail = exact_encoding(vocab.piece_bytes(token_ids[last])[: cut - start], vocab)
    return None if tail is None else Prefix((*token_ids[:last], *tail), len(tail), cut)


def exact_encoding(piece: bytes, vocab: CoordVocab) -> tuple[int, ...] | None:
    """Token ids that write exactly ``piece``; None when the tokenizer has none (a half character, a normalised one)."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return None
    ids = tuple(vocab.encode_answer(text))  # the same few pieces in every answer: remembered
    return ids if b"".join([vocab.piece_bytes(token_id) for token_id in ids]) == piece else None
