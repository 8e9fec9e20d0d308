"""What holds for every token sequence: the target is valid JSON, the kept tokens are the rollout's own, and every
coordinate points at its token."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import COORD_TOKENS, TURN_END, CoordVocab, serialize_append, serialize_objects
from coordexp.errors import VocabError
from coordexp.parsing import parse_rollout
from coordexp.records import NUM_BINS, DropReason, GTObject, ParsedRollout
from qwen_tokenizer import qwen_vocab

FUSED = [
    "}}",
    "},",
    "}},",
    '"}}',
    '"},',
    '"]',
    '"]}',
    "]}",
    "]},",
    "{}",
    '{"',
    ' {"',
    '": ',
    '", "',
    "object_",
    "bbox_2d",
]


@lru_cache(maxsize=1)
def byte_vocab() -> CoordVocab:
    """All single bytes, some fused punctuation, an image placeholder, the turn's end and the coordinates."""
    pieces = [bytes([b]) for b in range(256)] + [piece.encode() for piece in FUSED]
    control = [len(pieces), len(pieces) + 1]
    pieces += [TURN_END.encode(), b"<|image_pad|>"]
    coord_ids = range(len(pieces), len(pieces) + NUM_BINS)
    pieces += [token.encode() for token in COORD_TOKENS]
    id_of = {piece: token_id for token_id, piece in enumerate(pieces)}
    longest_first = re.compile(b"|".join(re.escape(p) for p in sorted(pieces, key=len, reverse=True)), re.DOTALL)

    def encode(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [id_of[piece] for piece in longest_first.findall(text.encode())]}

    return CoordVocab(pieces, coord_ids, control[0], control, encode)


# A tokenizer joins by adding a factory here.
VOCABS: list[Callable[[], CoordVocab]] = [qwen_vocab, byte_vocab]
vocabs = pytest.mark.parametrize("make_vocab", VOCABS, ids=lambda make: make.__name__)


# -- an independent reading of the text, with the standard library's JSON ------------------------------------------


class Pairs(list[tuple[str, Any]]):
    """A JSON object as it is written: ordered, duplicates kept."""


def refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def read_json(text: str) -> Pairs:
    """One JSON object, with bare coordinate literals read as strings; fails on anything else."""
    quoted = re.sub(r'("(?:[^"\\]|\\.)*")|(<\|coord_\d+\|>)', lambda m: m[1] or f'"{m[2]}"', text, flags=re.DOTALL)
    root = json.loads(quoted, object_pairs_hook=Pairs, parse_constant=refuse)
    assert isinstance(root, Pairs)
    return root


def usable(key: str, value: Any) -> tuple[int, str, str, tuple[int, ...]] | None:
    """(index, desc, kind, bins) of a usable entry; the contract in other words than the parser's."""
    match = re.fullmatch(r"object_([0-9]{1,18})", key)
    if not match or not isinstance(value, Pairs) or len(value) != 2 or "desc" not in dict(value):
        return None
    fields = dict(value)
    desc = fields.pop("desc")
    if not fields or not isinstance(desc, str) or not desc.strip():
        return None
    kind, array = fields.popitem()
    if kind not in ("bbox_2d", "poly") or type(array) is not list:
        return None
    if kind == "poly" and all(type(pair) is list and len(pair) == 2 for pair in array):
        array = [coord for pair in array for coord in pair]
    literals = [re.fullmatch(r"<\|coord_(\d+)\|>", coord) if isinstance(coord, str) else None for coord in array]
    if None in literals:
        return None
    bins = tuple(int(literal[1]) for literal in literals if literal)
    if kind == "bbox_2d":
        ok = len(bins) == 4 and bins[0] <= bins[2] and bins[1] <= bins[3]
    else:
        ok = len(bins) >= 6 and len(bins) % 2 == 0
    return (int(match[1]), desc.strip(), kind, bins) if ok else None


def check(ids: Sequence[int], vocab: CoordVocab, appended: Sequence[GTObject] = ()) -> ParsedRollout:
    """Every invariant of one parse; returns it."""
    parsed = parse_rollout(ids, vocab)
    own = len(parsed.prefix_token_ids) - parsed.num_replaced_tail
    stop = ids.index(vocab.eos_id) if vocab.eos_id in ids else len(ids)

    # Kept tokens are the rollout's own; a replaced tail writes a strict prefix of the one token it replaces.
    assert own <= stop and list(parsed.prefix_token_ids[:own]) == list(ids[:own])
    if parsed.num_replaced_tail and (own or parsed.prefix_text != "{"):
        tail = b"".join(vocab.piece_bytes(t) for t in parsed.prefix_token_ids[own:])
        fused = vocab.piece_bytes(ids[own])
        assert fused.startswith(tail) and tail != fused
    assert vocab.control_ids.isdisjoint(parsed.prefix_token_ids)

    # The target is one JSON object: the kept entries, then the appended ones under new keys.
    first_new = (parsed.max_object_index or 0) + 1
    fragment = serialize_append(appended, parsed.prefix_text, first_new)
    target = [*parsed.prefix_token_ids, *vocab.encode(fragment)]
    root = read_json(vocab.decode(target))
    num_kept = len(root) - len(appended)
    assert [key for key, _ in root[num_kept:]] == [f"object_{first_new + i}" for i in range(len(appended))]
    assert not {key for key, _ in root[:num_kept]} & {key for key, _ in root[num_kept:]}

    # The objects are the usable entries of the kept part, in order; nothing is lost uncounted.
    found = [(obj.index, obj.desc, obj.kind, obj.bins) for obj in parsed.objects]
    assert found == [entry for key, value in root[:num_kept] if (entry := usable(key, value))]
    assert parsed.num_dropped >= num_kept - len(found)
    assert all(count > 0 for count in parsed.dropped.values())

    # Coordinates point at their tokens, inside their object's span; spans follow each other.
    last_end = 0
    for obj in parsed.objects:
        assert [vocab.bin_of(parsed.prefix_token_ids[i]) for i in obj.coord_token_idx] == list(obj.bins)
        assert list(obj.coord_token_idx) == sorted(set(obj.coord_token_idx))
        start, end = obj.token_span
        assert last_end - 1 <= start <= obj.coord_token_idx[0] <= obj.coord_token_idx[-1] < end
        last_end = end
    assert last_end <= len(parsed.prefix_token_ids)

    # Reading the prefix again, or the whole target, finds the same objects at the same places.
    again = parse_rollout(parsed.prefix_token_ids, vocab)
    assert (again.objects, again.prefix_token_ids, again.max_object_index, again.num_replaced_tail) == (
        parsed.objects, parsed.prefix_token_ids, parsed.max_object_index, 0,
    )  # fmt: skip
    whole = parse_rollout([*target, vocab.eos_id], vocab)
    assert len(whole.objects) == len(parsed.objects) + len(appended)
    assert [(o.bins, o.coord_token_idx) for o in whole.objects[: len(found)]] == [
        (o.bins, o.coord_token_idx) for o in parsed.objects
    ]
    assert [as_gt(obj) for obj in whole.objects[len(found) :]] == list(appended)
    return parsed


def as_gt(obj: Any) -> GTObject:
    return GTObject(obj.desc, obj.kind, obj.bins)


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


@vocabs
@settings(max_examples=100, deadline=None)
@given(scene=scenes, order=field_orders)
def test_parsing_inverts_serialising(make_vocab: Callable[[], CoordVocab], scene: list[GTObject], order: Any) -> None:
    vocab = make_vocab()
    parsed = check([*vocab.encode(serialize_objects(scene, order)), vocab.eos_id], vocab)
    assert [as_gt(obj) for obj in parsed.objects] == scene
    assert [obj.index for obj in parsed.objects] == list(range(1, len(scene) + 1))
    assert parsed.dropped == {} and not parsed.truncated


@vocabs
@settings(max_examples=200, deadline=None)
@given(data=st.data(), scene=scenes, order=field_orders, appended=st.lists(objects, max_size=2))
def test_edited_answers(
    make_vocab: Callable[[], CoordVocab],
    data: st.DataObject,
    scene: list[GTObject],
    order: Any,
    appended: list[GTObject],
) -> None:
    vocab = make_vocab()
    check(edited(data, [*vocab.encode(serialize_objects(scene, order)), vocab.eos_id], vocab), vocab, appended)


@vocabs
@settings(max_examples=200, deadline=None)
@given(data=st.data(), opened=st.booleans(), appended=st.lists(objects, max_size=1))
def test_random_tokens(
    make_vocab: Callable[[], CoordVocab], data: st.DataObject, opened: bool, appended: list[GTObject]
) -> None:
    vocab = make_vocab()
    head = vocab.encode('{"object_1": ') if opened else []
    check(head + data.draw(st.lists(tokens_of(vocab), max_size=25)), vocab, appended)


@vocabs
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    entries=st.lists(
        st.tuples(st.sampled_from(["object_1", "object_2", "object_9", "note", ""]), json_values), max_size=4
    ),
    indent=st.sampled_from([None, 1]),
)
def test_json_that_is_no_answer(
    make_vocab: Callable[[], CoordVocab], data: st.DataObject, entries: list[tuple[str, Any]], indent: int | None
) -> None:
    vocab = make_vocab()
    body = ", ".join(f"{json.dumps(k)}: {json.dumps(v, indent=indent, ensure_ascii=False)}" for k, v in entries)
    check(edited(data, vocab.encode("{" + body + "}"), vocab), vocab)


@vocabs
def test_every_truncation_of_an_answer(make_vocab: Callable[[], CoordVocab]) -> None:
    vocab = make_vocab()
    scene = [GTObject("black cat", "bbox_2d", (1, 2, 3, 4)), GTObject("龘 🦖", "poly", (0, 0, 9, 0, 9, 9))]
    ids = vocab.encode(serialize_objects(scene, "geometry_first"))
    found = [len(check(ids[:n], vocab, scene).objects) for n in range(len(ids) + 1)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 2
    dropped = [parse_rollout(ids[:n], vocab).dropped for n in range(len(ids) + 1)]
    assert all(set(counts) <= {DropReason.TRUNCATED} and sum(counts.values()) <= 1 for counts in dropped)


@vocabs
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
    check(vocab.encode(text), vocab)


# -- cuts that no tokenisation can realise -------------------------------------------------------------------------


def stubborn_vocab(*unwritable: str) -> CoordVocab:
    """:func:`byte_vocab` whose encoder gets some texts wrong, as a normalising tokenizer does."""
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


def test_uncuttable_everywhere_leaves_a_lone_brace() -> None:
    ids = [*byte_vocab().encode(' {"' + ENTRY.format(1)[1:-1]), *byte_vocab().encode("}}")]
    parsed = parse_rollout(ids, stubborn_vocab("}", " {"))
    assert parsed.prefix_text == "{" and parsed.objects == () and parsed.max_object_index is None
    assert parsed.dropped == {DropReason.UNCUTTABLE: 1}
    assert parsed.num_replaced_tail == 1


def test_a_tokenizer_without_a_brace_is_refused() -> None:
    with pytest.raises(VocabError, match="cannot write a lone"):
        parse_rollout([], stubborn_vocab("{"))


def test_half_a_character_before_the_cut_is_not_written_anew() -> None:
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
