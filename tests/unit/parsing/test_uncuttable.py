"""Cuts that no tokens can realise: the prefix ends earlier, and what that loses is counted."""

from __future__ import annotations

import pytest

from coordexp.coords import CoordVocab
from coordexp.errors import VocabError
from coordexp.parsing import parse_rollout
from coordexp.records import DropReason
from support.parse_invariants import byte_vocab


def stubborn_vocab(*unwritable: str) -> CoordVocab:
    """:func:`byte_vocab` with an encoder that changes some texts, as a normalising tokenizer does."""
    vocab = byte_vocab()

    def encode(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": vocab.encode("?" if text in unwritable else text)}

    return CoordVocab(vocab.pieces, vocab.coord_token_ids, vocab.eos_id, vocab.control_ids, encode)


ENTRY = '"object_{}": {{"desc": "cat", "poly": ["<|coord_1|>"' + ', "<|coord_2|>"' * 5 + "]}}"


def test_uncuttable_end_falls_back_to_the_entry_before() -> None:
    first, second = ENTRY.format(1), ENTRY.format(2)
    # The space keeps the first entry's "}" from fusing with the comma.
    ids = [*byte_vocab().encode("{" + first + " , " + second[:-1]), *byte_vocab().encode("}}")]
    parsed = parse_rollout(ids, stubborn_vocab("}"))
    assert parsed.prefix_text == "{" + first
    assert [obj.index for obj in parsed.objects] == [1] and parsed.max_object_index == 1
    assert parsed.dropped == {DropReason.UNCUTTABLE: 1}
    assert parsed.num_replaced_tail == 0


def test_without_any_possible_cut_a_lone_brace_is_left() -> None:
    ids = [*byte_vocab().encode(' {"' + ENTRY.format(1)[1:-1]), *byte_vocab().encode("}}")]
    parsed = parse_rollout(ids, stubborn_vocab("}", " {"))
    assert parsed.prefix_text == "{" and parsed.objects == () and parsed.max_object_index is None
    assert parsed.dropped == {DropReason.UNCUTTABLE: 1}
    assert parsed.num_replaced_tail == 1


def test_tokenizer_without_a_brace_is_refused() -> None:
    with pytest.raises(VocabError, match=r"'\{'"):
        parse_rollout([], stubborn_vocab("{"))


def test_cut_after_half_a_character_falls_back_to_the_entry_before() -> None:
    vocab = byte_vocab()
    fused = b'\x98"}}'  # the last byte of a character, and what closes entry and root
    pieces = [*vocab.pieces, fused]
    odd = CoordVocab(
        pieces, vocab.coord_token_ids, vocab.eos_id, vocab.control_ids,
        lambda text, add_special_tokens: {"input_ids": vocab.encode(text)},
    )  # fmt: skip
    entry = ENTRY.format(1)
    text = f'{{{entry} , "object_2": {{"poly": ["<|coord_1|>"], "desc": "'
    ids = vocab.encode(text) + list("龘".encode()[:2]) + [len(pieces) - 1]
    parsed = parse_rollout(ids, odd)
    assert parsed.prefix_text == "{" + entry
    assert parsed.dropped == {DropReason.WRONG_ARITY: 1}  # lost to the cut, but never a usable object
