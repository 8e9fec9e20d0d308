"""For every token sequence the target is valid JSON, the kept tokens are the rollout's own, and every
coordinate points at its token."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import TURN_END, CoordVocab, serialize_objects
from coordexp.parsing import parse_rollout
from coordexp.records import NUM_BINS, DropReason, GTObject
from support.parse_invariants import all_vocabs, as_gt, check_parse, examples

# -- strategies ----------------------------------------------------------------------------------------------------

bins = st.integers(0, NUM_BINS - 1)
# Normalised, because Qwen's tokenizer normalises; without control tokens' text, which would become those tokens.
descs = (
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
    .map(lambda text: unicodedata.normalize("NFC", text).strip())
    .filter(lambda text: text and "<" not in text)
)
boxes = st.tuples(bins, bins, bins, bins).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)
rings = st.integers(3, 6).flatmap(lambda n: st.tuples(*[bins] * (2 * n)))
objects = st.one_of(
    st.builds(GTObject, descs, st.just("bbox_2d"), boxes), st.builds(GTObject, descs, st.just("poly"), rings)
)
scenes = st.lists(objects, max_size=4)
field_orders = st.sampled_from(["desc_first", "geometry_first"])

json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["desc", "bbox_2d", "poly", "note", "object_3"]), inner, max_size=3),
    ),
    max_leaves=6,
)

STRUCTURE = [
    *'{}[]:,"\\ \n-01e.', "}}", "},", '"}}', '"]', '"},', "{}", '{"', ' {"', '":', '",', ' "', ' ["', "]]", "true",
    "nul", "object_1", "object_", "desc", "bbox_2d", "poly", "cat", "龘", "<|coord_1|>", "<|coord_9|>", "<|coord_*|>",
    "<|image_pad|>", "<think>", TURN_END, '"object_2": {"desc": "', '"bbox_2d": ["', '"object_3": {}',
]  # fmt: skip


@cache
def structure_ids(vocab: CoordVocab) -> list[int]:
    return sorted({token_id for text in STRUCTURE for token_id in vocab.encode(text)})


def tokens_of(vocab: CoordVocab) -> st.SearchStrategy[int]:
    return st.one_of(
        st.sampled_from(structure_ids(vocab)), st.sampled_from(structure_ids(vocab)), st.integers(0, len(vocab))
    )


def edited(data: st.DataObject, ids: list[int], vocab: CoordVocab) -> list[int]:
    """``ids`` after a few deletions, insertions, swaps, and perhaps a truncation."""
    ids = list(ids)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(len(ids) - 1, 0)))
        match data.draw(st.sampled_from(["delete", "insert", "replace", "swap", "truncate"])):
            case "delete":
                del ids[at : at + 1]
            case "insert":
                ids.insert(at, data.draw(tokens_of(vocab)))
            case "replace":
                ids[at : at + 1] = [data.draw(tokens_of(vocab))]
            case "swap":
                ids[at : at + 2] = ids[at : at + 2][::-1]
            case "truncate":
                del ids[at:]
    return ids


# -- invariants ----------------------------------------------------------------------------------------------------


@pytest.mark.scenario("geometry-first object remains valid under strict parse")
@all_vocabs
@settings(max_examples=examples(50))
@given(scene=scenes, order=field_orders)
def test_parsing_inverts_serialising(make_vocab: Callable[[], CoordVocab], scene: list[GTObject], order: Any) -> None:
    vocab = make_vocab()
    parsed = check_parse([*vocab.encode(serialize_objects(scene, order)), vocab.eos_id], vocab)
    assert [as_gt(obj) for obj in parsed.objects] == scene
    assert [obj.index for obj in parsed.objects] == list(range(1, len(scene) + 1))
    assert parsed.dropped == {} and not parsed.truncated


@all_vocabs
@settings(max_examples=examples(80))
@given(data=st.data(), scene=scenes, order=field_orders, appended=st.lists(objects, max_size=2))
def test_edited_answer(
    make_vocab: Callable[[], CoordVocab],
    data: st.DataObject,
    scene: list[GTObject],
    order: Any,
    appended: list[GTObject],
) -> None:
    vocab = make_vocab()
    check_parse(edited(data, [*vocab.encode(serialize_objects(scene, order)), vocab.eos_id], vocab), vocab, appended)


@all_vocabs
@settings(max_examples=examples(80))
@given(data=st.data(), opened=st.booleans(), appended=st.lists(objects, max_size=1))
def test_random_tokens(
    make_vocab: Callable[[], CoordVocab], data: st.DataObject, opened: bool, appended: list[GTObject]
) -> None:
    vocab = make_vocab()
    head = vocab.encode('{"object_1": ') if opened else []
    check_parse(head + data.draw(st.lists(tokens_of(vocab), max_size=25)), vocab, appended)


@all_vocabs
@settings(max_examples=examples(60))
@given(
    data=st.data(),
    entries=st.lists(
        st.tuples(st.sampled_from(["object_1", "object_2", "object_9", "note", ""]), json_values), max_size=4
    ),
    indent=st.sampled_from([None, 1]),
)
def test_json_that_is_not_an_answer(
    make_vocab: Callable[[], CoordVocab], data: st.DataObject, entries: list[tuple[str, Any]], indent: int | None
) -> None:
    vocab = make_vocab()
    body = ", ".join(f"{json.dumps(k)}: {json.dumps(v, indent=indent, ensure_ascii=False)}" for k, v in entries)
    check_parse(edited(data, vocab.encode("{" + body + "}"), vocab), vocab)


@pytest.mark.scenario("Truncated rollout tail is trimmed (suffix-only) and training proceeds")
@all_vocabs
def test_every_truncation_of_an_answer(make_vocab: Callable[[], CoordVocab]) -> None:
    vocab = make_vocab()
    scene = [GTObject("black cat", "bbox_2d", (1, 2, 3, 4)), GTObject("龘 🦖", "poly", (0, 0, 9, 0, 9, 9))]
    ids = vocab.encode(serialize_objects(scene, "geometry_first"))
    found = [len(check_parse(ids[:n], vocab, scene).objects) for n in range(len(ids) + 1)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 2
    dropped = [parse_rollout(ids[:n], vocab).dropped for n in range(len(ids) + 1)]
    assert all(set(counts) <= {DropReason.TRUNCATED} and sum(counts.values()) <= 1 for counts in dropped)


@all_vocabs
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 5000, id="brackets"),
        pytest.param('{"a":' * 5000, id="objects"),
        pytest.param('{"a": ' + "[" * 5000 + "]" * 5000 + "}", id="closed brackets"),
        pytest.param('{"a": {}, "b": ' + "1" * 5000 + ', "c": {}}', id="number"),
        pytest.param('{"object_' + "1" * 5000 + '": {}}', id="key"),
        pytest.param('{"a": {}' + " " * 5000, id="spaces"),
        pytest.param('{"a": "' + "\\\\" * 5000, id="backslashes"),
        pytest.param('{"a": {}},' + '"object_1":' * 5000, id="keys"),
    ],
)
def test_runaway_answers(make_vocab: Callable[[], CoordVocab], text: str) -> None:
    vocab = make_vocab()
    check_parse(vocab.encode(text), vocab)
