"""Roles of the tokens of a rollout's own prefix, token by token: which of them a matched object vouches for."""

from __future__ import annotations

import pytest

from coordexp.coords import CoordVocab
from coordexp.records import GTObject, TokenRole, TrainingTarget
from support.answers import CAT, DOG, answer, entry, outcome_of, tiny_vocab
from support.parse_invariants import byte_vocab
from support.qwen_tokenizer import qwen_vocab

# . masked, s matched structure, d matched desc, x matched coordinate
LETTER = {TokenRole.MASKED: ".", TokenRole.MATCHED_STRUCT: "s", TokenRole.MATCHED_DESC: "d",
          TokenRole.MATCHED_COORD: "x"}  # fmt: skip
NEAR = GTObject("black cat", "bbox_2d", (12, 22, 202, 222))
FAR = GTObject("dog", "bbox_2d", (800, 800, 900, 900))
TINY_NEAR = GTObject("red circle", "bbox_2d", NEAR.bins)


def cells(text: str, vocab: CoordVocab, truth: list[GTObject]) -> list[tuple[str, str]]:
    return lettered(outcome_of(text, truth, vocab).target, vocab)


def lettered(target: TrainingTarget, vocab: CoordVocab) -> list[tuple[str, str]]:
    of_prefix = zip(target.roles_T[: target.prefix_len].tolist(), target.token_ids[: target.prefix_len], strict=True)
    return [(LETTER[TokenRole(role)], vocab.piece(token)) for role, token in of_prefix]


@pytest.mark.parametrize(
    ("make_vocab", "text", "truth", "expected"),
    [
        pytest.param(
            qwen_vocab, answer(entry(1, NEAR)), [CAT],
            [(".", '{"'), ("s", "object"), ("s", "_"), ("s", "1"), ("s", '":'), ("s", ' {"'), ("s", "desc"),
             ("s", '":'), ("s", ' "'), ("d", "black"), ("d", " cat"), ("s", '",'), ("s", ' "'), ("s", "bbox"),
             ("s", "_"), ("s", "2"), ("s", "d"), ("s", '":'), ("s", ' ["'), ("x", "<|coord_12|>"), ("s", '",'),
             ("s", ' "'), ("x", "<|coord_22|>"), ("s", '",'), ("s", ' "'), ("x", "<|coord_202|>"), ("s", '",'),
             ("s", ' "'), ("x", "<|coord_222|>"), ("s", '"]'), ("s", "}")],
            id="qwen: the root's brace is fused into the key's quote; the last brace is a replaced token",
        ),
        pytest.param(
            tiny_vocab, answer(entry(1, TINY_NEAR), entry(2, FAR)), [CAT],
            [(".", "{"), ("s", '"object_'), ("s", "1"), ("s", '": {"desc": "'), ("d", "red"), ("d", " circle"),
             ("s", '", "bbox_2d": ["'), ("x", "<|coord_12|>"), ("s", '", "'), ("x", "<|coord_22|>"), ("s", '", "'),
             ("x", "<|coord_202|>"), ("s", '", "'), ("x", "<|coord_222|>"), ("s", '"]}'), (".", ', "object_'),
             (".", "2")],
            id="tiny: a token of the separator and of the next key",
        ),
    ],
)  # fmt: skip
def test_every_prefix_token_has_its_role(make_vocab, text, truth, expected) -> None:
    assert cells(text, make_vocab(), truth)[: len(expected)] == expected


def test_tokens_between_two_matched_entries_have_no_entry() -> None:
    """Qwen writes ``"]`` ``},`` `` "``: the comma and space say that an entry follows, not that this one is right."""
    rows = cells(answer(entry(1, NEAR), entry(2, DOG)), qwen_vocab(), [CAT, DOG])
    at = next(i for i, (_, piece) in enumerate(rows) if piece == "},")
    assert rows[at - 1 : at + 3] == [("s", '"]'), (".", "},"), (".", ' "'), ("s", "object")]


def glued_vocab(*pieces: str) -> CoordVocab:
    """:func:`byte_vocab` with further tokens, which its encoder never uses: only a model writes them."""
    vocab = byte_vocab()
    return CoordVocab(
        [*vocab.pieces, *(piece.encode() for piece in pieces)], vocab.coord_token_ids, vocab.eos_id, vocab.control_ids,
        lambda text, add_special_tokens: {"input_ids": vocab.encode(text)},
    )  # fmt: skip


def written_with(vocab: CoordVocab, text: str, glued: str) -> list[int]:
    """Token ids of ``text`` with every ``glued`` as one token."""
    (token,) = [i for i, piece in enumerate(vocab.pieces) if piece == glued.encode() and i >= len(byte_vocab())]
    ids: list[int] = []
    for i, part in enumerate(text.split(glued)):
        ids += [token] * (i > 0) + vocab.encode(part)
    return ids


@pytest.mark.parametrize("glued", ['}, "object_', '"]}, "object_', '"]}, "object_2": {"desc": "do'])
def test_a_token_of_two_entries_belongs_to_neither_as_structure(glued: str) -> None:
    vocab = glued_vocab(glued)
    text = f"{{{entry(1, NEAR)}, {entry(2, DOG)}}}"
    got = outcome_of(written_with(vocab, text, glued), [CAT, DOG], vocab)
    first, second = got.parsed.objects
    shared = first.token_span[1] - 1
    assert shared == second.token_span[0] and vocab.piece(got.target.token_ids[shared]) == glued
    assert first.own_token_span[1] == shared and second.own_token_span[0] == shared + 1
    # Where it reaches into the next description it is that description's, else it is masked; never structure.
    wanted = TokenRole.MATCHED_DESC if glued.endswith("do") else TokenRole.MASKED
    assert got.target.roles_T[shared] == wanted


@pytest.mark.parametrize(
    ("glued", "own"),
    [
        pytest.param('cat", "bbox_2d": ["', 'cat", "bbox_2d": ["', id="desc and structure in one token"),
        pytest.param('"desc": "bl', '"desc": "bl', id="structure and desc in one token"),
    ],
)
def test_a_token_of_desc_and_structure_is_desc(glued: str, own: str) -> None:
    vocab = glued_vocab(glued)
    got = outcome_of(written_with(vocab, f"{{{entry(1, NEAR)}}}", glued), [CAT], vocab)
    pieces = [vocab.piece(t) for t in got.target.token_ids[: got.target.prefix_len]]
    assert got.target.roles_T[pieces.index(own)] == TokenRole.MATCHED_DESC
    written = "".join(p for p, r in zip(pieces, got.target.roles_T, strict=False) if r == TokenRole.MATCHED_DESC)
    assert "black cat" in written


def test_desc_of_the_last_entry_ends_in_a_replaced_token() -> None:
    """Geometry first, the model's last token closes desc, entry and root: the kept part of it is desc still."""
    vocab = glued_vocab('cat"}}')
    text = f"{{{entry(1, NEAR)}}}".replace('"desc": "black cat", ', "").replace("]}}", '], "desc": "black cat"}}')
    got = outcome_of(written_with(vocab, text, 'cat"}}'), [CAT], vocab)
    (obj,) = got.parsed.objects
    assert got.parsed.num_replaced_tail > 1  # rewritten: c, a, t and the closing characters
    rows = lettered(got.target, vocab)
    assert rows[obj.desc_token_span[0] : obj.desc_token_span[1]] == [("d", c) for c in "black cat"]
    assert rows[obj.desc_token_span[1] :] == [("s", '"'), ("s", "}")]


def test_a_coordinate_inside_a_desc_is_desc() -> None:
    vocab = qwen_vocab()
    text = answer(entry(1, GTObject("at <|coord_5|>", "bbox_2d", NEAR.bins)))
    target = outcome_of(text, [CAT], vocab).target
    roles = [TokenRole(int(r)) for r, t in zip(target.roles_T, target.token_ids, strict=True) if vocab.bin_of(t) == 5]
    assert roles == [TokenRole.MATCHED_DESC]
