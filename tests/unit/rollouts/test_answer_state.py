"""Forced tokens of canonical answers, and drafts, for the tiny tokenizer and Qwen's real one."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import CoordVocab, FieldOrder, serialize_objects
from coordexp.records import GTObject
from coordexp.rollouts.answer_state import AnswerGrammar, AnswerState, forced_positions
from support.answers import tiny_vocab
from support.qwen_tokenizer import qwen_vocab

NAMES = st.one_of(
    st.sampled_from(["cat", "a b", "猫", "龘", "🙂 face", 'a "quoted" one', "tab\t.", "back\\slash", "7 up", "-x-"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF), min_size=1, max_size=8)
    .map(lambda text: unicodedata.normalize("NFC", text).strip()).filter(bool),  # as every dataset's names are
)  # fmt: skip
BIN = st.integers(0, 999)
BOXES = st.builds(lambda name, bins: GTObject(name, "bbox_2d", bins), NAMES, st.tuples(BIN, BIN, BIN, BIN))
POLYS = st.builds(
    lambda name, points: GTObject(name, "poly", tuple(k for point in points for k in point)),
    NAMES,
    st.lists(st.tuples(BIN, BIN), min_size=3, max_size=6),
)
ANSWERS = st.lists(st.one_of(BOXES, POLYS), max_size=5)
ORDERS = st.sampled_from(["desc_first", "geometry_first"])


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def grammar(request: pytest.FixtureRequest) -> AnswerGrammar:
    return AnswerGrammar(tiny_vocab() if request.param == "tiny" else qwen_vocab())


def tokens_of(objects: list[GTObject], order: FieldOrder, vocab: CoordVocab) -> list[int]:
    return [*vocab.encode(serialize_objects(objects, order)), vocab.eos_id]


def after(grammar: AnswerGrammar, ids: Iterable[int]) -> AnswerState:
    state = grammar.start()
    for token in ids:
        state.push(token)
    return state


@settings(max_examples=60)
@given(objects=ANSWERS, order=ORDERS)
def test_forced_tokens_are_those_of_the_canonical_answer(
    grammar: AnswerGrammar, objects: list[GTObject], order: FieldOrder
) -> None:
    ids = tokens_of(objects, order, grammar.vocab)
    state = grammar.start()
    for at, token in enumerate(ids):
        assert state.is_canonical, grammar.vocab.decode(ids[:at])
        forced = state.forced()
        assert tuple(ids[at : at + len(forced)]) == forced
        draft = state.draft(64)
        assert draft[: len(forced)] == forced
        state.push(token)
    assert state.is_canonical and state.names == [json.dumps(o.desc, ensure_ascii=False)[1:-1] for o in objects]


@pytest.mark.parametrize("order", ["desc_first", "geometry_first"])
def test_only_decisions_are_left(grammar: AnswerGrammar, order: FieldOrder) -> None:
    """Without guesses: the object, its name and the name's end, the kind, four coordinates, and fused quotes."""
    vocab = grammar.vocab
    objects = [GTObject("cat", "bbox_2d", (1, 2, 3, 4)), GTObject("dog", "bbox_2d", (5, 6, 7, 8))] * 4
    ids, state, decided, at = tokens_of(objects, order, vocab), grammar.start(), 0, 0
    while at < len(ids):
        forced = state.forced()
        decided += not forced
        for token in forced or (ids[at],):
            state.push(token)
            at += 1
    assert decided / len(objects) <= 9 + len(vocab.encode("cat"))


def test_positions_of_forced_tokens(grammar: AnswerGrammar) -> None:
    """The text between two coordinates is forced; names, coordinates and all of another text are not."""
    vocab = grammar.vocab
    ids = vocab.encode(serialize_objects([GTObject("cat", "bbox_2d", (1, 2, 3, 4))])[:-1])
    forced = set(forced_positions(grammar, [*ids, *vocab.encode(" and a dog")]))
    coordinates = [at for at, token in enumerate(ids) if vocab.bin_of(token) is not None]
    assert len(coordinates) == 4 and forced >= set(range(coordinates[0], coordinates[3])) - set(coordinates)
    decided = "".join(vocab.piece(token) for at, token in enumerate(ids) if at not in forced)
    assert "cat" in decided and all(f"<|coord_{k}|>" in decided for k in (1, 2, 3, 4))
    assert max(forced) < len(ids)


def test_another_token_than_the_forced_one_is_not_forced(grammar: AnswerGrammar) -> None:
    text = serialize_objects([GTObject("cat", "bbox_2d", (1, 2, 3, 4))])
    ids = grammar.vocab.encode(text[: text.index("<|coord_2|>") - len('", "')])
    assert grammar.vocab.bin_of(ids[-1]) == 1
    assert len(ids) not in set(forced_positions(grammar, [*ids, *grammar.vocab.encode("]")]))


def test_a_coordinate_after_the_end_and_an_end_before_it_are_another_text(grammar: AnswerGrammar) -> None:
    vocab, text = grammar.vocab, serialize_objects([GTObject("cat", "bbox_2d", (1, 2, 3, 4))])
    half = text[: text.index("<|coord_4|>")]
    for ids in ([*vocab.encode(text), vocab.coord_token_ids[5]], [*vocab.encode(half), vocab.eos_id]):
        assert after(grammar, ids[:-1]).is_canonical and not after(grammar, ids).is_canonical


def steps(ids: list[int], grammar: AnswerGrammar, limit: int) -> int:
    """Forward passes of greedy decoding: each accepts the draft's right tokens, and writes one more."""
    state, at, passes = grammar.start(), 0, 0
    while at < len(ids):
        passes += 1
        draft = state.draft(limit)
        accepted = next((k for k, token in enumerate(draft) if at + k >= len(ids) or token != ids[at + k]), len(draft))
        for token in ids[at : at + accepted + 1]:
            state.push(token)
        at += accepted + 1
    return passes


def test_steps_per_box_with_qwens_tokenizer() -> None:
    grammar = AnswerGrammar(qwen_vocab())
    names = ["person", "car", "dog", "traffic light", "person", "cup", "fire hydrant", "chair"]
    objects = [GTObject(name, "bbox_2d", (k, k + 1, k + 2, k + 3)) for k, name in enumerate(names)]
    crowd = [GTObject("person", "bbox_2d", (k, k + 1, k + 2, k + 3)) for k in range(20)]
    mixed = tokens_of(objects, "desc_first", grammar.vocab)
    assert len(mixed) / len(objects) > 25
    assert steps(mixed, grammar, 32) / len(objects) <= 8
    assert steps(tokens_of(crowd, "desc_first", grammar.vocab), grammar, 32) / len(crowd) <= 5


def draft_after(grammar: AnswerGrammar, objects: list[GTObject], shown: str) -> str:
    """The draft after the last ``shown`` in the answer with these objects."""
    vocab = grammar.vocab
    text = serialize_objects(objects)
    state = after(grammar, vocab.encode(text[: text.rindex(shown) + len(shown)]))
    assert state.is_canonical
    return vocab.decode(state.draft(32))


def test_a_name_of_as_many_words_as_the_one_before_is_guessed_to_end() -> None:
    objects = [GTObject("red cat", "bbox_2d", (1, 2, 3, 4)), GTObject("blue dog", "bbox_2d", (5, 6, 7, 8))]
    tiny, qwen = AnswerGrammar(tiny_vocab()), AnswerGrammar(qwen_vocab())
    assert draft_after(tiny, objects, "blue dog").startswith('"')
    assert draft_after(tiny, objects, "blue") == ""
    assert draft_after(qwen, objects, "blue dog") == ""  # the text after it takes many tokens
    assert draft_after(AnswerGrammar(qwen_vocab(), on_gpu=True), objects, "blue dog").startswith('"')


def test_a_name_is_guessed_from_those_before() -> None:
    tiny = AnswerGrammar(tiny_vocab())
    named = {name: GTObject(name, "bbox_2d", (1, 2, 3, 4)) for name in ("red cat", "red dog", "red fox")}
    cat, dog, fox = named.values()
    assert draft_after(tiny, [cat, dog, fox], '"desc": "red').startswith(" dog")  # the latest that begins so
    assert draft_after(tiny, [cat, cat, cat], '"desc": "').startswith("red cat")
    assert draft_after(tiny, [cat, cat], '"desc": "') == "", "one name alone is not repeated"
    assert draft_after(tiny, [cat, dog, fox], '"desc": "') == ""


def test_a_draft_has_at_most_as_many_tokens_as_asked_for(grammar: AnswerGrammar) -> None:
    text = serialize_objects([GTObject("cat", "bbox_2d", (1, 2, 3, 4))])[: -len('"]}}')]
    state = after(grammar, grammar.vocab.encode(text))
    whole = state.draft(64)
    assert len(whole) > 3 and state.draft(3) == whole[:3] and state.draft(0) == ()


def test_a_polygon_is_guessed_to_be_as_long_as_the_one_before(grammar: AnswerGrammar) -> None:
    first, second = (GTObject("cat", "poly", tuple(range(k, k + 8))) for k in (1, 21))
    assert draft_after(grammar, [first, second], "<|coord_28|>").startswith('"]}')
    assert draft_after(grammar, [first, second], "<|coord_26|>").startswith('", "')
    assert draft_after(grammar, [first], "<|coord_8|>").startswith('", "')


@pytest.mark.parametrize(
    "text",
    ["[", "{ ", '{"object_2"', '{"object_1": {"label"', '{"object_1": {"desc": "a", "bbox_2d": [<|coord_1|>', "no"],
)
def test_another_text_is_not_followed(grammar: AnswerGrammar, text: str) -> None:
    state = after(grammar, grammar.vocab.encode(text))
    assert state.forced() == () == state.draft(8)


def test_a_token_beyond_the_vocabulary_is_not_followed(grammar: AnswerGrammar) -> None:
    assert after(grammar, [len(grammar.vocab) + 5]).forced() == ()
