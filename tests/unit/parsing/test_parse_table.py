"""Parsing of each kind of answer: one line per case, on the real Qwen token boundaries."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coordexp.coords import COORD_TOKENS, TURN_END, CoordVocab
from coordexp.errors import VocabError
from coordexp.parsing import parse_rollout
from coordexp.records import DropReason, ParsedRollout
from coordexp.records import DropReason as R
from support.parse_invariants import byte_vocab, check_parse
from support.qwen_tokenizer import qwen_tokenizer, qwen_vocab


def coords(*bins: int, quote: str = '"') -> str:
    return "[" + ", ".join(f"{quote}{COORD_TOKENS[k]}{quote}" for k in bins) + "]"


def pairs(*bins: int) -> str:
    return "[" + ", ".join(coords(x, y) for x, y in zip(bins[::2], bins[1::2], strict=True)) + "]"


def box(desc: str = "black cat", at: str = coords(10, 20, 200, 220)) -> str:
    return f'{{"desc": "{desc}", "bbox_2d": {at}}}'


def poly(at: str) -> str:
    return f'{{"desc": "leaf", "poly": {at}}}'


def spelled(text: str) -> list[int]:
    """Token ids that write ``text`` with ordinary tokens only, also where a coordinate token would fit."""
    return [token for char in text for token in qwen_vocab().encode(char)]


O1, O2, O3 = (f'"object_{n}": {box()}' for n in (1, 2, 3))
GOOD = box()
END = TURN_END
TRIANGLE = (0, 0, 9, 0, 9, 9)
NO_CLOSE_BRACKET = O2.replace("]}", "}")
NO_CLOSE_BRACE = O2[:-1]
NO_CLOSE_QUOTE = O2.replace('cat"', "cat")
NOTE = f'"note": {box()}'


def entry(value: str, n: int | str = 2) -> str:
    return f'"object_{n}": {value}'


def around(value: str) -> str:
    """``value`` as object_2 between two good objects."""
    return f"{{{O1}, {entry(value)}, {O3}}}{END}"


def kept(value: str) -> str:
    return f"{{{O1}, {entry(value)}, {O3}"


KEY_INSIDE = entry(box()[:-1] + ', "note": {"object_77": 1}}')

# id, answer, indices of valid objects, dropped, prefix text, highest index
WHOLE_ANSWERS = [
    ("two good objects", f"{{{O1}, {O2}}}{END}", [1, 2], {}, f"{{{O1}, {O2}", 2),
    ("root not closed", f"{{{O1}", [1], {}, f"{{{O1}", 1),
    ("ends after comma and space", f"{{{O1}, ", [1], {}, f"{{{O1}", 1),
    ("ends inside object 2", f"{{{O1}, {O2[:60]}", [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("ends inside the key of object 2", f'{{{O1}, "obj', [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("ends after the key of object 2", f'{{{O1}, "object_2"', [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("ends after the colon of object 2", f'{{{O1}, "object_2":', [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("ends inside an undelimited number", f"{{{O1}, {entry('12')}", [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("ends inside an escape", f'{{{O1}, "object_2": {{"desc": "a\\u00', [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("ends inside the first object", f"{{{O1[:40]}", [], {R.TRUNCATED: 1}, "{", None),
    ("keys out of order", f"{{{entry(GOOD, 10)}, {O2}}}{END}", [10, 2], {}, f"{{{entry(GOOD, 10)}, {O2}", 10),
    ("invalid last object counts for the index", f"{{{O2}, {entry(box(' '), 9)}}}{END}", [2], {R.MISSING_DESC: 1},
     f"{{{O2}, {entry(box(' '), 9)}", 9),
    ("scalar entry, then a good one", f"{{{entry('123', 4)}, {O3}}}{END}", [3], {R.NOT_AN_OBJECT: 1},
     f"{{{entry('123', 4)}, {O3}", 4),
    ("nothing is appended after a scalar entry", f"{{{O3}, {entry('123', 4)}}}{END}", [3], {R.NOT_AN_OBJECT: 1},
     f"{{{O3}", 3),
    ("scalar entry only", f"{{{entry('[]', 4)}}}{END}", [], {R.NOT_AN_OBJECT: 1}, "{", None),
    ("text between two stop tokens", f"{{{O1}}}{END} {{{O2}}}{END}", [1], {}, f"{{{O1}", 1),
    ("stop token inside a desc", f'{{{O1}, "object_2": {{"desc": "a{END}b"}}}}', [1], {R.TRUNCATED: 1}, f"{{{O1}", 1),
    ("prose", f"I see a black cat.{END}", [], {R.PROSE: 1}, "{", None),
    ("prose after an entry", f"{{{O1}, and a dog}}{END}", [1], {R.PROSE: 1}, f"{{{O1}", 1),
    ("prose and an object", f"One cat: {GOOD}{END}", [], {R.UNKEYED: 1}, "{", None),
    ("unkeyed objects after a keyed one", f"{{{O1}, {GOOD}, {GOOD}}}{END}", [1], {R.UNKEYED: 2}, f"{{{O1}", 1),
    ("unkeyed objects, then a keyed one", f"{{{O1}, {GOOD}, {O2}}}{END}", [1], {R.UNKEYED: 1, R.AFTER_BREAK: 1},
     f"{{{O1}", 1),
    ("unkeyed object after the root", f"{{{O1}}} {GOOD}{END}", [1], {R.UNKEYED: 1}, f"{{{O1}", 1),
    ("unkeyed object after a broken one", f"{{{O1}, {NO_CLOSE_BRACKET}, {GOOD}}}{END}", [1],
     {R.MALFORMED: 1, R.UNKEYED: 1}, f"{{{O1}", 1),
    ("a list of objects", f"[{GOOD}, {GOOD}]{END}", [], {R.WRONG_ROOT: 2}, "{", None),
    ("a list of nothing", f"[]{END}", [], {R.WRONG_ROOT: 1}, "{", None),
    ("nothing at all", "", [], {}, "{", None),
    ("white space only", " \n", [], {}, "{", None),
    ("no opening brace", f"{O1}, {O2}", [], {R.PREAMBLE: 2}, "{", None),
    ("empty root", f"{{}}{END}", [], {}, "{", None),
    ("duplicate key", f"{{{O1}, {O1}}}{END}", [1, 1], {}, f"{{{O1}, {O1}", 1),
    ("zero-padded key", f"{{{entry(GOOD, '007')}}}{END}", [7], {}, f"{{{entry(GOOD, '007')}", 7),
    ("escaped key", f'{{"object\\u005f8": {GOOD}}}{END}', [8], {}, f'{{"object\\u005f8": {GOOD}', 8),
    ("key of 19 digits", f"{{{O1}, {entry(GOOD, '1' * 19)}}}{END}", [1], {R.KEY_INVALID: 1},
     f"{{{O1}, {entry(GOOD, '1' * 19)}", 1),
    ("missing ]", f"{{{O1}, {NO_CLOSE_BRACKET}, {O3}}}{END}", [1], {R.MALFORMED: 1, R.AFTER_BREAK: 1}, f"{{{O1}", 1),
    # The root's "}" closes the entry, which is sound JSON and stays.
    ("missing }", f"{{{O1}, {NO_CLOSE_BRACE}, {O3}}}{END}", [1], {R.UNKNOWN_FIELD: 1},
     f"{{{O1}, {NO_CLOSE_BRACE}, {O3}}}", 2),
    ("missing }, truncated", f"{{{O1}, {NO_CLOSE_BRACE}, {O3[:60]}", [1], {R.MALFORMED: 1, R.AFTER_BREAK: 1},
     f"{{{O1}", 1),
    ("entry's key inside, then truncated", f"{{{O1}, {KEY_INSIDE}, {O3}, {O3[:60]}", [1, 3],
     {R.UNKNOWN_FIELD: 1, R.TRUNCATED: 1}, f"{{{O1}, {KEY_INSIDE}, {O3}", 3),
    ("entry's key inside, last", f"{{{O1}, {KEY_INSIDE}}}{END}", [1], {R.UNKNOWN_FIELD: 1}, f"{{{O1}, {KEY_INSIDE}", 2),
    ("missing quote", f"{{{O1}, {NO_CLOSE_QUOTE}, {O3}}}{END}", [1], {R.MALFORMED: 1, R.AFTER_BREAK: 1}, f"{{{O1}", 1),
    ("missing comma", f"{{{O1} {O2}, {O3}}}{END}", [1], {R.AFTER_BREAK: 2}, f"{{{O1}", 1),
    ("missing colon", f'{{{O1}, "object_2" {GOOD}, {O3}}}', [1], {R.MALFORMED: 1, R.AFTER_BREAK: 1}, f"{{{O1}", 1),
    ("missing quote of a key", f'{{{O1}, "object_2: {GOOD}, {O3}}}', [1], {R.MALFORMED: 1, R.AFTER_BREAK: 1},
     f"{{{O1}", 1),
    ("comma before the closing brace", f"{{{O1},}}{END}", [1], {}, f"{{{O1}", 1),
    ("Python quotes", "{" + O1.replace('"', "'") + "}" + END, [], {R.AFTER_BREAK: 1}, "{", None),
    ("unquoted keys", f"{{object_1: {GOOD}, object_2: {GOOD}}}", [], {R.AFTER_BREAK: 2}, "{", None),
    ("line break inside a desc", f"{{{O1}, {entry(box('a' + chr(10)))}}}", [1], {R.MALFORMED: 1}, f"{{{O1}", 1),
    ("illegal escape", f"{{{O1}, {entry(box(chr(92) + 'x'))}}}", [1], {R.MALFORMED: 1}, f"{{{O1}", 1),
    ("leading zero", f"{{{O1}, {entry('01')}, {O3}}}", [1], {R.MALFORMED: 1, R.AFTER_BREAK: 1}, f"{{{O1}", 1),
    ("NaN", f"{{{O1}, {entry('NaN')}}}", [1], {R.MALFORMED: 1}, f"{{{O1}", 1),
    ("nested too deep", f"{{{O1}, {entry('[' * 100 + ']' * 100)}, {O3}}}{END}", [1],
     {R.MALFORMED: 1, R.AFTER_BREAK: 1}, f"{{{O1}", 1),
    ("image placeholder between objects", f"{{{O1}, <|image_pad|>{O2}}}{END}", [1], {R.AFTER_BREAK: 1}, f"{{{O1}", 1),
    ("image placeholder before the root", f"<|image_pad|>{{{O1}}}{END}", [], {R.PREAMBLE: 1}, "{", None),
    ("coordinate wildcard in an array", f"{{{entry(box(at='[<|coord_*|>]'))}}}", [], {R.MALFORMED: 1}, "{", None),
    ("foreign entry first", f"{{{NOTE}, {O1}}}{END}", [1], {R.KEY_INVALID: 1}, f"{{{NOTE}, {O1}", 1),
    ("foreign entry last", f"{{{O1}, {NOTE}}}{END}", [1], {R.KEY_INVALID: 1}, f"{{{O1}, {NOTE}", 1),
    ("foreign entry after a scalar one", f"{{{entry('123', 4)}, {NOTE}}}{END}", [],
     {R.NOT_AN_OBJECT: 1, R.KEY_INVALID: 1}, f"{{{entry('123', 4)}, {NOTE}", 4),
    ("a list of objects", f'{{"objects": [{GOOD}, {GOOD}]}}{END}', [], {R.KEY_INVALID: 1}, "{", None),
    ("code fence", f"```json\n{{{O1}}}\n```{END}", [], {R.PREAMBLE: 1}, "{", None),
    ("preamble, then truncated", f"Sure! {{{O1}, {O2[:60]}", [], {R.PREAMBLE: 2}, "{", None),
    ("preamble, foreign keys only", f"Sure! {{{NOTE}}}", [], {R.UNKEYED: 1}, "{", None),
    ("preamble with braces", f"The {{objects}}: {{{O1}}}{END}", [], {R.PREAMBLE: 1}, "{", None),
    ("two roots", f"{{{O1}}} {{{O2}, {O3}}}{END}", [1], {R.AFTER_ROOT: 2}, f"{{{O1}", 1),
    ("one brace too many", f"{{{O1}}}, {O2}, {O3}}}{END}", [1], {R.AFTER_ROOT: 2}, f"{{{O1}", 1),
    ("chatter after the root", f"{{{O1}}} I hope this helps!{END}", [1], {}, f"{{{O1}", 1),
    ("pretty-printed", f"{{\n  {O1},\n  {O2}\n}}{END}", [1, 2], {}, f"{{\n  {O1},\n  {O2}", 2),
    ("white space before the root", f"\n {{{O1}}}{END}", [1], {}, f"\n {{{O1}", 1),
    ("only a root, spaced", " {", [], {}, " {", None),
    ("a list as root", f"[{{{O1}}}]{END}", [], {R.WRONG_ROOT: 1}, "{", None),
]  # fmt: skip

# id, value of object_2, why it is dropped (None: it is valid)
VALUES = [
    ("box", box(), None),
    ("geometry first", f'{{"bbox_2d": {coords(1, 2, 3, 4)}, "desc": "cat"}}', None),
    ("bare coordinates", box(at=coords(1, 2, 3, 4, quote="")), None),
    ("flat polygon", poly(coords(*TRIANGLE)), None),
    ("polygon of pairs", poly(pairs(*TRIANGLE)), None),
    ("polygon of one point", poly(coords(5, 5, 5, 5, 5, 5)), None),
    ("box of one point", box(at=coords(5, 5, 5, 5)), None),
    ("spaced box", '{ "desc" : "a" ,\t"bbox_2d" : [ "<|coord_1|>" , <|coord_2|>\n, <|coord_3|>,<|coord_4|> ] }', None),
    ("escaped field", f'{{"d\\u0065sc": "cat", "bbox_2d": {coords(1, 2, 3, 4)}}}', None),
    ("brackets in the desc", box("} { ] [ , :"), None),
    ("quotes in the desc", box(r"a \"big\" cat \\"), None),
    ("coordinate in the desc", box("cat at <|coord_5|>"), None),
    ("quoted coordinate in the desc", box(r"cat at \"<|coord_5|>\""), None),
    ("coordinate as the desc", box("<|coord_5|>"), None),
    ("other added tokens in the desc", box("<|object_ref_start|>cat<|object_ref_end|> <|coord_*|> <think>"), None),
    ("emoji and rare characters in the desc", box("🦖 龘 𠮷 né"), None),
    ("scalar", "123", R.NOT_AN_OBJECT),
    ("null", "null", R.NOT_AN_OBJECT),
    ("list", "[]", R.NOT_AN_OBJECT),
    ("string", '"cat"', R.NOT_AN_OBJECT),
    ("bare coordinate", "<|coord_1|>", R.NOT_AN_OBJECT),
    ("empty object", "{}", R.MISSING_DESC),
    ("no desc", f'{{"bbox_2d": {coords(1, 2, 3, 4)}}}', R.MISSING_DESC),
    ("empty desc", box(""), R.MISSING_DESC),
    ("blank desc", box(r" \n"), R.MISSING_DESC),
    ("desc is a number", box().replace('"black cat"', "7"), R.MISSING_DESC),
    ("no geometry", '{"desc": "cat"}', R.MISSING_GEOMETRY),
    ("unknown name of the geometry", box().replace("bbox_2d", "bbox"), R.UNKNOWN_FIELD),
    ("extra field", box()[:-1] + ', "score": 1}', R.UNKNOWN_FIELD),
    ("entry's key deeper inside", box()[:-1] + ', "note": {"object_77": {"a": 1}}}', R.UNKNOWN_FIELD),
    ("entry's key in a list", '[1, {"object_3": {}}]', R.NOT_AN_OBJECT),
    ("two descs", box()[:-1] + ', "desc": "dog"}', R.UNKNOWN_FIELD),
    ("box and polygon", box()[:-1] + f', "poly": {coords(*TRIANGLE)}}}', R.MULTIPLE_GEOMETRIES),
    ("two boxes", box()[:-1] + f', "bbox_2d": {coords(1, 2, 3, 4)}}}', R.MULTIPLE_GEOMETRIES),
    ("integers", box(at="[1, 2, 3, 4]"), R.NON_COORD_TOKEN),
    ("one integer", box(at='["<|coord_1|>", 2, "<|coord_3|>", "<|coord_4|>"]'), R.NON_COORD_TOKEN),
    ("padded coordinate", box(at='["<|coord_1|> ", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]'), R.NON_COORD_TOKEN),
    ("two coordinates in a string", box(at='["<|coord_1|><|coord_2|>"]'), R.NON_COORD_TOKEN),
    ("geometry is a string", box(at='"<|coord_1|>"'), R.NON_COORD_TOKEN),
    ("geometry is an object", box(at="{}"), R.NON_COORD_TOKEN),
    ("box of pairs", box(at=pairs(1, 2, 3, 4)), R.NON_COORD_TOKEN),
    ("polygon of flat and pairs", poly(f'["<|coord_1|>", "<|coord_1|>", {coords(2, 2)}]'), R.NON_COORD_TOKEN),
    ("polygon of triples", poly(f"[{coords(1, 2, 3)}, {coords(4, 5, 6)}]"), R.WRONG_ARITY),
    ("coordinate out of range", box(at='["<|coord_1000|>"]'), R.NON_COORD_TOKEN),
    ("empty box", box(at="[]"), R.WRONG_ARITY),
    ("empty polygon", poly("[]"), R.WRONG_ARITY),
    ("box of 3", box(at=coords(1, 2, 3)), R.WRONG_ARITY),
    ("box of 5", box(at=coords(1, 2, 3, 4, 5)), R.WRONG_ARITY),
    ("polygon of 4", poly(coords(1, 2, 3, 4)), R.WRONG_ARITY),
    ("polygon of 7", poly(coords(1, 2, 3, 4, 5, 6, 7)), R.WRONG_ARITY),
    ("x2 < x1", box(at=coords(5, 0, 4, 9)), R.BOX_INVERTED),
    ("y2 < y1", box(at=coords(0, 5, 9, 4)), R.BOX_INVERTED),
]  # fmt: skip


def read(text: str) -> ParsedRollout:
    return parse_rollout(qwen_vocab().encode(text), qwen_vocab())


@pytest.mark.scenario("Dict keys are not sorted for matching order")
@pytest.mark.scenario("Truncated rollout tail is trimmed (suffix-only) and training proceeds")
@pytest.mark.parametrize(
    ("answer", "valid", "dropped", "prefix", "max_index"),
    [row[1:] for row in WHOLE_ANSWERS],
    ids=[r[0] for r in WHOLE_ANSWERS],
)
def test_whole_answer(answer: str, valid: list[int], dropped: dict[R, int], prefix: str, max_index: int | None) -> None:
    parsed = check_parse(qwen_vocab().encode(answer), qwen_vocab())  # spans and coordinate tokens, too
    assert [obj.index for obj in parsed.objects] == valid
    assert parsed.dropped == dropped
    assert parsed.prefix_text == prefix
    assert parsed.max_object_index == max_index
    assert parsed.truncated == (END not in answer)


@pytest.mark.parametrize(("value", "reason"), [row[1:] for row in VALUES], ids=[row[0] for row in VALUES])
def test_value_of_one_entry(value: str, reason: R | None) -> None:
    parsed = check_parse(qwen_vocab().encode(around(value)), qwen_vocab())
    assert [obj.index for obj in parsed.objects] == ([1, 3] if reason else [1, 2, 3])
    assert parsed.dropped == ({reason: 1} if reason else {})
    assert parsed.prefix_text == kept(value)  # sound JSON stays in the prefix, usable or not
    assert parsed.max_object_index == 3


@pytest.mark.parametrize(
    ("desc", "text"),
    [
        ("  padded ", "padded"),
        (r"a \"big\" cat", 'a "big" cat'),
        (r"caf\u00e9 \ud83e\udd96", "café 🦖"),
        (r"lone \ud83e surrogate", "lone � surrogate"),
        ("🦖 龘 𠮷", "🦖 龘 𠮷"),
        ("at <|coord_5|>", "at <|coord_5|>"),
        ("wow!", "wow!"),
    ],
)
def test_desc_is_decoded_from_its_whole_span(desc: str, text: str) -> None:
    assert read(f"{{{entry(box(desc))}}}").objects[0].desc == text


@pytest.mark.parametrize(("answer", "replaced"), [(f"NOT_JSON{END}", 1), ("", 1), ("{", 0), (f"{{{O1}", 0)])
def test_lone_brace_counts_as_replaced(answer: str, replaced: int) -> None:
    assert read(answer).num_replaced_tail == replaced


def test_a_cut_character_in_a_desc_becomes_a_replacement_character() -> None:
    ids = qwen_vocab().encode(around(box("龘")))
    half = next(i for i, t in enumerate(ids) if "�" in qwen_vocab().piece(t))
    parsed = parse_rollout(ids[:half] + ids[half + 1 :], qwen_vocab())
    assert [obj.desc for obj in parsed.objects][::2] == ["black cat", "black cat"]
    assert "�" in parsed.objects[1].desc


@pytest.mark.parametrize(
    ("geometry", "reason"),
    [
        (spelled(coords(1, 2, 3, 4)[1:-1]), R.NON_COORD_TOKEN),
        (spelled('"<|coord_1|>", ') + qwen_vocab().encode(coords(2, 3, 4)[1:-1]), R.AMBIGUOUS_COORDS),
        (spelled("<|coord_1|>"), R.MALFORMED),  # without quotes it is not JSON
    ],
)
def test_spelled_coordinates_are_not_coordinate_tokens(geometry: list[int], reason: R) -> None:
    vocab = qwen_vocab()
    head, tail = vocab.encode(f'{{{O1}, "object_2": {{"desc": "cat", "bbox_2d": ['), vocab.encode("]}}")
    parsed = parse_rollout(head + geometry + tail, vocab)
    assert [obj.index for obj in parsed.objects] == [1] and parsed.dropped == {reason: 1}
    assert parsed.max_object_index == (1 if reason == R.MALFORMED else 2)


@pytest.mark.parametrize(
    ("answer", "fused", "written"),
    [
        (f"{{{O1}}}", "}}", ["}"]),
        (f"{{{O1},", "},", ["}"]),
        (f'{{"object_1": {{"bbox_2d": {coords(1, 2, 3, 4)}, "desc": "cat"}}}}', '"}}', ['"}']),
        ("{}", "{}", ["{"]),
        ('{"', '{"', ["{"]),
    ],
)
def test_cut_inside_a_fused_token_replaces_only_that_token(answer: str, fused: str, written: list[str]) -> None:
    vocab = qwen_vocab()
    ids = vocab.encode(answer)
    assert vocab.piece(ids[-1]) == fused
    parsed = parse_rollout(ids, vocab)
    assert list(parsed.prefix_token_ids[:-1]) == ids[:-1]
    assert [vocab.piece(t) for t in parsed.prefix_token_ids[len(ids) - 1 :]] == written
    assert parsed.num_replaced_tail == 1


@pytest.mark.parametrize("stop", ["", END])
@pytest.mark.parametrize("ended", [None, False, True])
def test_truncated_means_no_stop_token(stop: str, ended: bool | None) -> None:
    ids = qwen_vocab().encode(f"{{{O1}}}{stop}")
    assert parse_rollout(ids, qwen_vocab(), ended=ended).truncated is (stop == "" and not ended)


@pytest.mark.parametrize(
    "token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|im_start|>", "<|endoftext|>"]
)
def test_control_token_in_a_desc_ends_the_readable_part(token: str) -> None:
    parsed = read(f"{{{O1}, {entry(box(f'cat {token}'))}, {O3}}}{END}")
    assert [obj.index for obj in parsed.objects] == [1]
    assert parsed.dropped == {R.MALFORMED: 1, R.AFTER_BREAK: 1}


def test_an_unknown_id_and_one_without_text_end_the_readable_part() -> None:
    real = qwen_vocab()
    vocab = CoordVocab([*real.pieces, b""], real.coord_token_ids, real.eos_id, real.control_ids, qwen_tokenizer())
    ids = vocab.encode(f"{{{O1}, {O2}")
    for odd in (len(real), len(vocab), len(vocab) + 10**6, -1):
        parsed = parse_rollout([*ids[:-5], odd, *ids[-5:]], vocab)
        assert [obj.index for obj in parsed.objects] == [1] and parsed.dropped == {R.MALFORMED: 1}


def test_the_qwen_vocabulary_is_the_real_one() -> None:
    tokenizer, vocab = qwen_tokenizer(), qwen_vocab()
    assert len(vocab) == 152_670
    assert (vocab.eos_id, vocab.coord_token_ids[0], vocab.coord_token_ids[-1]) == (151_645, 151_670, 152_669)
    ids = vocab.encode(around(box("🦖 龘 née <think>")))
    assert vocab.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert [vocab.piece(t) for t in vocab.encode('{"object_12": ')[:5]] == ['{"', "object", "_", "1", "2"]


# --- cuts that no tokens can realise: the prefix ends earlier, and what that loses is counted ---


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


# --- without the trainer ---

CONSUMER = """
import sys

for name in ("torch", "transformers", "tokenizers", "vllm", "coordexp.training"):
    sys.modules[name] = None  # importing it now fails

from coordexp.coords import COORD_TOKENS, CoordVocab
from coordexp.parsing import parse_rollout

pieces = [bytes([byte]) for byte in range(256)] + [b"<|im_end|>"] + [token.encode() for token in COORD_TOKENS]
vocab = CoordVocab(pieces, range(257, 1257), 256, [256], lambda text, add_special_tokens: {"input_ids": text.encode()})
comma = ord(",")
array = [258, comma, 259, comma, 260, comma, 261]  # bins 1, 2, 3, 4
ids = [*b'{"object_3": {"desc": "cat", "bbox_2d": [', *array, *b"]}}"]
parsed = parse_rollout([*ids, 256], vocab)
(cat,) = parsed.objects
assert (cat.index, cat.desc, cat.kind, cat.bins) == (3, "cat", "bbox_2d", (1, 2, 3, 4))
assert [parsed.prefix_token_ids[i] for i in cat.coord_token_idx] == [258, 259, 260, 261]
assert (parsed.dropped, parsed.max_object_index, parsed.truncated) == ({}, 3, False)
print("read")
"""


@pytest.mark.scenario("Shared parsing contract is importable without trainer class dependency")
def test_parsing_works_without_trainer_torch_or_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", CONSUMER], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "read"
