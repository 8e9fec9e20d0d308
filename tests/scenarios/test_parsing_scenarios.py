"""The contract's scenarios about reading a rollout, on real Qwen token boundaries."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coordexp.coords import TURN_END, serialize_append, serialize_objects
from coordexp.parsing import parse_rollout
from coordexp.records import DropReason, GTObject, ParsedRollout
from support.answers import CAT, LEAF, entry
from support.qwen_tokenizer import qwen_vocab


def read(text: str) -> ParsedRollout:
    return parse_rollout(qwen_vocab().encode(text), qwen_vocab())


def target_text(parsed: ParsedRollout, missed: list[GTObject]) -> str:
    """The decoded training target of a parsed rollout, without the stop token."""
    vocab = qwen_vocab()
    fragment = serialize_append(missed, parsed.prefix_text, (parsed.max_object_index or 0) + 1)
    return vocab.decode([*parsed.prefix_token_ids, *vocab.encode(fragment)])


@pytest.mark.scenario("Dict keys are not sorted for matching order")
def test_objects_are_in_order_of_appearance() -> None:
    parsed = read(f"{{{entry(10)}, {entry(2, LEAF)}}}{TURN_END}")
    assert [(obj.index, obj.desc) for obj in parsed.objects] == [(10, "black cat"), (2, "leaf")]


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


@pytest.mark.scenario("geometry-first object remains valid under strict parse")
@pytest.mark.parametrize("obj", [CAT, LEAF])
def test_field_order_is_irrelevant_to_the_parser(obj: GTObject) -> None:
    geometry_first = read(serialize_objects([obj], "geometry_first") + TURN_END)
    desc_first = read(serialize_objects([obj], "desc_first") + TURN_END)
    for parsed in (geometry_first, desc_first):
        assert parsed.dropped == {}
        assert [(o.desc, o.kind, o.bins) for o in parsed.objects] == [(obj.desc, obj.kind, obj.bins)]
    assert geometry_first.prefix_text != desc_first.prefix_text


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
