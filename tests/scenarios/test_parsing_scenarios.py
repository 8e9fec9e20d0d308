"""The contract's scenarios about reading a rollout, on real Qwen token boundaries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coordexp.coords import COORD_TOKENS, TURN_END, serialize_append, serialize_objects
from coordexp.parsing import parse_rollout
from coordexp.records import DropReason, GTObject, ParsedRollout
from support.qwen_tokenizer import qwen_vocab

CAT = GTObject("black cat", "bbox_2d", (10, 20, 200, 220))
LEAF = GTObject("leaf", "poly", (0, 0, 90, 0, 90, 90))


def entry(n: int, obj: GTObject = CAT) -> str:
    """``"object_n": {…}`` as the model writes it."""
    return serialize_append([obj], "{", n)[:-1]


def read(text: str) -> ParsedRollout:
    return parse_rollout(qwen_vocab().encode(text), qwen_vocab())


def target_text(parsed: ParsedRollout, missed: list[GTObject]) -> str:
    """The decoded training target of a parsed rollout, without the stop token."""
    vocab = qwen_vocab()
    fragment = serialize_append(missed, parsed.prefix_text, (parsed.max_object_index or 0) + 1)
    return vocab.decode([*parsed.prefix_token_ids, *vocab.encode(fragment)])


@pytest.mark.scenario("Highest retained object key controls FN start even when object is invalid")
def test_next_key_follows_invalid_object_9() -> None:
    parsed = read(f'{{{entry(2)}, "object_9": {{"desc": "", "bbox_2d": []}}}}{TURN_END}')
    assert [obj.index for obj in parsed.objects] == [2]
    assert parsed.max_object_index == 9
    assert list(json.loads(target_text(parsed, [CAT]))) == ["object_2", "object_9", "object_10"]


@pytest.mark.scenario("Dict keys are not sorted for matching order")
def test_objects_stand_in_order_of_appearance() -> None:
    parsed = read(f"{{{entry(10)}, {entry(2, LEAF)}}}{TURN_END}")
    assert [(obj.index, obj.desc) for obj in parsed.objects] == [(10, "black cat"), (2, "leaf")]


@pytest.mark.scenario("One malformed object does not block training")
def test_malformed_middle_object_is_dropped_alone() -> None:
    three_coords = entry(2).replace(f', "{COORD_TOKENS[220]}"', "")
    parsed = read(f"{{{entry(1)}, {three_coords}, {entry(3, LEAF)}}}{TURN_END}")
    assert [obj.index for obj in parsed.objects] == [1, 3]
    assert parsed.dropped == {DropReason.WRONG_ARITY: 1}
    assert list(json.loads(target_text(parsed, [CAT]))) == ["object_1", "object_2", "object_3", "object_4"]


@pytest.mark.scenario("Truncated rollout tail is trimmed (suffix-only) and training proceeds")
@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (f"{{{entry(1)}, {entry(2)[:-30]}", [entry(1)]),
        (f"{{{entry(1)}, {entry(2)}, {entry(3)[:12]}", [entry(1), entry(2)]),
        (f"{{{entry(1)[:-30]}", []),
    ],
)
def test_truncated_tail_is_trimmed_to_the_last_complete_object(answer: str, kept: list[str]) -> None:
    ids = qwen_vocab().encode(answer)
    parsed = parse_rollout(ids, qwen_vocab())
    assert parsed.prefix_text == "{" + ", ".join(kept)
    own = len(parsed.prefix_token_ids) - parsed.num_replaced_tail
    assert list(parsed.prefix_token_ids[:own]) == ids[:own]
    assert parsed.truncated and parsed.dropped == {DropReason.TRUNCATED: 1}
    appended = json.loads(target_text(parsed, [CAT, LEAF]))
    assert list(appended) == [f"object_{n}" for n in range(1, len(kept) + 3)]


@pytest.mark.scenario("Ambiguous coord-slot alignment excludes object from self-context supervision")
def test_spelled_coordinate_excludes_its_object_only() -> None:
    vocab = qwen_vocab()
    # The second object reads as a box, but its first value is written by several ordinary tokens.
    spelled = [token for char in COORD_TOKENS[10] for token in vocab.encode(char)]
    head, tail = entry(2).split(COORD_TOKENS[10])
    ids = [*vocab.encode(f"{{{entry(1)}, {head}"), *spelled, *vocab.encode(f"{tail}}}{TURN_END}")]
    parsed = parse_rollout(ids, vocab)
    assert json.loads(parsed.prefix_text + "}")["object_2"]["bbox_2d"] == [COORD_TOKENS[k] for k in CAT.bins]
    assert [obj.index for obj in parsed.objects] == [1]  # so only object_1 can be matched or supervised
    assert parsed.dropped == {DropReason.AMBIGUOUS_COORDS: 1}
    assert list(json.loads(target_text(parsed, [CAT]))) == ["object_1", "object_2", "object_3"]


@pytest.mark.scenario("geometry-first object remains valid under strict parse")
@pytest.mark.parametrize("obj", [CAT, LEAF])
def test_field_order_is_irrelevant_to_the_parser(obj: GTObject) -> None:
    geometry_first = read(serialize_objects([obj], "geometry_first") + TURN_END)
    desc_first = read(serialize_objects([obj], "desc_first") + TURN_END)
    for parsed in (geometry_first, desc_first):
        assert parsed.dropped == {}
        assert [(o.desc, o.kind, o.bins) for o in parsed.objects] == [(obj.desc, obj.kind, obj.bins)]
    assert geometry_first.prefix_text != desc_first.prefix_text


@pytest.mark.scenario("geometry-first changes only per-object field order in FN append")
def test_geometry_first_append_changes_field_order_only() -> None:
    parsed = read(f"{{{entry(10)}, {entry(2)}}}{TURN_END}")
    fragment = serialize_append([CAT, LEAF], parsed.prefix_text, (parsed.max_object_index or 0) + 1, "geometry_first")
    appended = json.loads(parsed.prefix_text + fragment)
    assert list(appended) == ["object_10", "object_2", "object_11", "object_12"]
    assert list(appended["object_11"]) == ["bbox_2d", "desc"]
    assert list(appended["object_12"]) == ["poly", "desc"]


@pytest.mark.scenario("desc-first remains baseline append layout")
def test_desc_first_append_is_the_default() -> None:
    parsed = read(f"{{{entry(1)}}}{TURN_END}")
    default = serialize_append([CAT, LEAF], parsed.prefix_text, 2)
    assert default == serialize_append([CAT, LEAF], parsed.prefix_text, 2, "desc_first")
    appended = json.loads(parsed.prefix_text + default)
    assert list(appended["object_2"]) == ["desc", "bbox_2d"]
    assert list(appended["object_3"]) == ["desc", "poly"]


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
    done = subprocess.run([sys.executable, "-c", CONSUMER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "read"
