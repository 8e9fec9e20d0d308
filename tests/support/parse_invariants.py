"""Invariants of every parse, checked independently of the parser; and a small vocabulary."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest

from coordexp.coords import COORD_TOKENS, TURN_END, CoordVocab, serialize_append
from coordexp.parsing import parse_rollout
from coordexp.records import NUM_BINS, GTObject, ParsedRollout, PredictedObject
from support.answers import Pairs, read_json, tiny_vocab
from support.qwen_tokenizer import qwen_vocab

FUSED = [
    "}}", "},", "}},", '"}}', '"},', '"]', '"]}', "]}", "]},", "{}", '{"', ' {"', '": ', '", "', "object_", "bbox_2d",
]  # fmt: skip


def examples(count: int) -> int:
    """``count`` random cases, times the environment's FUZZ; see ``make fuzz``."""
    return count * int(os.environ.get("FUZZ", "1"))


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
VOCABS: list[Callable[[], CoordVocab]] = [qwen_vocab, tiny_vocab, byte_vocab]
all_vocabs = pytest.mark.parametrize("make_vocab", VOCABS, ids=lambda make: make.__name__)


# -- an independent reading of the text, with the standard library's JSON ------------------------------------------


BARE = r"\u0000"  # before a coordinate without quotes


def usable(key: str, value: Any) -> tuple[int, str, str, tuple[int, ...]] | None:
    """(index, desc, kind, bins) of a usable entry; the contract in other words than the parser's."""
    match = re.fullmatch(r"object_([0-9]{1,18})", key)
    if not match or not isinstance(value, Pairs) or len(value) != 2 or "desc" not in dict(value):
        return None
    fields = dict(value)
    desc = fields.pop("desc")
    if not fields or not isinstance(desc, str) or not desc.strip() or desc.startswith("\0<|coord_"):
        return None
    kind, array = fields.popitem()
    if kind not in ("bbox_2d", "poly") or type(array) is not list:
        return None
    if kind == "poly" and all(type(pair) is list and len(pair) == 2 for pair in array):
        array = [coord for pair in array for coord in pair]
    literals = [
        re.fullmatch(r"\0?<\|coord_(0|[1-9]\d{0,2})\|>", coord) if isinstance(coord, str) else None for coord in array
    ]
    if None in literals:
        return None
    bins = tuple(int(found[1]) for found in literals if found)
    if kind == "bbox_2d":
        ok = len(bins) == 4 and bins[0] <= bins[2] and bins[1] <= bins[3]
    else:
        ok = len(bins) >= 6 and len(bins) % 2 == 0
    return (int(match[1]), desc.strip(), kind, bins) if ok else None


def check_parse(ids: Sequence[int], vocab: CoordVocab, appended: Sequence[GTObject] = ()) -> ParsedRollout:
    """Every invariant of one parse; returns it."""
    parsed = parse_rollout(ids, vocab)
    own = len(parsed.prefix_token_ids) - parsed.num_replaced_tail
    stop = ids.index(vocab.eos_id) if vocab.eos_id in ids else len(ids)

    # Kept tokens are the rollout's own; a replaced tail writes a strict prefix of the one token it replaces.
    assert own <= stop and list(parsed.prefix_token_ids[:own]) == list(ids[:own])
    if parsed.num_replaced_tail and (own or parsed.prefix_text != "{"):
        tail = b"".join(vocab.pieces[t] for t in parsed.prefix_token_ids[own:])
        fused = vocab.pieces[ids[own]]
        assert fused.startswith(tail) and tail != fused
    assert vocab.control_ids.isdisjoint(parsed.prefix_token_ids)

    # The target is one JSON object: the kept entries, then the appended ones under new keys.
    first_new = (parsed.max_object_index or 0) + 1
    fragment = serialize_append(appended, parsed.prefix_text, first_new)
    target = [*parsed.prefix_token_ids, *vocab.encode(fragment)]
    root = read_json(vocab.decode(target), BARE)
    num_kept = len(root) - len(appended)
    assert [key for key, _ in root[num_kept:]] == [f"object_{first_new + i}" for i in range(len(appended))]
    assert not {key for key, _ in root[:num_kept]} & {key for key, _ in root[num_kept:]}

    # The objects are the usable entries of the kept part, in order; nothing is lost uncounted.
    found = [(obj.index, obj.desc, obj.kind, obj.bins) for obj in parsed.objects]
    assert found == [entry for key, value in root[:num_kept] if (entry := usable(key, value))]
    assert parsed.num_dropped >= num_kept - len(found)
    assert all(count > 0 for count in parsed.dropped.values())
    text = vocab.decode(i for i in ids[:stop] if 0 <= i < len(vocab))
    if not parsed.objects and re.search(r"[^\W_]", text) and not re.match(r"[ \t\n\r]*\{[ \t\n\r]*\}", text):
        assert parsed.dropped, "a non-empty answer looks empty"

    # Coordinates point at their tokens, inside their object's span; spans follow each other.
    last_end = 0
    for obj in parsed.objects:
        assert [vocab.bin_of(parsed.prefix_token_ids[i]) for i in obj.coord_token_idx] == list(obj.bins)
        assert list(obj.coord_token_idx) == sorted(set(obj.coord_token_idx))
        start, end = obj.token_span
        assert last_end - 1 <= start <= obj.coord_token_idx[0] <= obj.coord_token_idx[-1] < end
        check_spans(obj, parsed, vocab)
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


def check_spans(obj: PredictedObject, parsed: ParsedRollout, vocab: CoordVocab) -> None:
    """The entry's own tokens write the entry alone; its desc's tokens write the desc, and no more than they must."""
    pieces = [vocab.pieces[t] for t in parsed.prefix_token_ids]
    (start, end), (own_start, own_end) = obj.token_span, obj.own_token_span
    desc_start, desc_end = obj.desc_token_span
    assert (start <= own_start <= start + 1 and end - 1 <= own_end <= end) or own_start == own_end
    # A fused end is outside; an exact one is the entry's own quote or brace.
    touched = b"".join(pieces[start:end])
    key = re.search(rb'"(?:[^"\\]|\\.)*"\s*:\s*\{', touched)
    assert key is not None and (own_start == start) == (key.start() == 0)
    assert (own_end == end) == touched.endswith(b"}") or own_start == own_end
    # The desc's value as a regular expression finds it, and the tokens that hold any of its bytes.
    assert start <= desc_start < desc_end <= end
    found = re.search(rb'"desc"\s*:\s*"((?:[^"\\]|\\.)*)"', touched, re.DOTALL)
    if found is None:  # the key itself is spelled with escapes
        return
    ends = [sum(map(len, pieces[start : i + 1])) for i in range(start, end)]
    touching = [i for i, stop in enumerate(ends, start=start)
                if stop > found.start(1) and stop - len(pieces[i]) < found.end(1)]  # fmt: skip
    assert list(range(desc_start, desc_end)) == touching


def as_gt(obj: Any) -> GTObject:
    return GTObject(obj.desc, obj.kind, obj.bins)
