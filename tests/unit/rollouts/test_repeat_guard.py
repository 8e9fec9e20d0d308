"""The repeat guard against a rescan of the whole answer, and on the real Qwen vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.rollouts.repeat_guard import GuardRule, ObjectKeyReader, RepeatGuard, Trigger
from support.qwen_tokenizer import qwen_vocab
from support.settings import first_trigger


class Keys(RepeatTerminateConfig):
    """Every rule off; a case switches on what it is about."""

    enabled: bool = True
    min_new_tokens: int = 0
    max_consecutive_token_repeats: int = 0
    ngram_size: int = 0
    ngram_repeats: int = 2
    max_object_keys: int | None = None


BYTES = ObjectKeyReader([bytes([byte]) for byte in range(256)])  # one token a byte


def rescanned(ids: Sequence[int], keys: Keys) -> Trigger | None:
    """The definition, without a thought for speed: look at every prefix, from its end."""
    for n in range(1, len(ids) + 1):
        if n < keys.min_new_tokens:
            continue
        run, size, total = keys.max_consecutive_token_repeats, keys.ngram_size, keys.ngram_size * keys.ngram_repeats
        if 0 < run <= n and len(set(ids[n - run : n])) == 1:
            return Trigger(GuardRule.TOKEN_RUN, n)
        if 0 < total <= n and list(ids[n - total : n]) == list(ids[n - size : n]) * keys.ngram_repeats:
            return Trigger(GuardRule.NGRAM, n)
        if keys.max_object_keys is not None and keys_in(bytes(ids[:n])) > keys.max_object_keys:
            return Trigger(GuardRule.OBJECT_KEYS, n)
    return None


def keys_in(text: bytes) -> int:
    unescaped = re.sub(rb"\\[\s\S]?", b"  ", text)
    return len(re.findall(rb'"object_[0-9]+"[ \t\n\r]*:', unescaped))


RUN, NGRAM, OBJECT_KEYS = GuardRule.TOKEN_RUN, GuardRule.NGRAM, GuardRule.OBJECT_KEYS


@pytest.mark.parametrize(
    ("ids", "keys", "expected"),
    [
        # a run of one token
        ([1, 2, 9, 9, 9, 9, 9], Keys(max_consecutive_token_repeats=4), Trigger(RUN, 6)),
        ([9, 9, 9, 2, 9, 9, 9], Keys(max_consecutive_token_repeats=4), None),  # interrupted
        ([9, 9, 9, 9], Keys(max_consecutive_token_repeats=4), Trigger(RUN, 4)),  # from the first token on
        ([9] * 9, Keys(max_consecutive_token_repeats=4, min_new_tokens=8), Trigger(RUN, 8)),  # not before the minimum
        ([9] * 4 + [1] * 3, Keys(max_consecutive_token_repeats=4, min_new_tokens=6), None),  # over before the minimum
        # a repeated n-gram
        ([5, 7, 8, 7, 8, 7, 8], Keys(ngram_size=2, ngram_repeats=3), Trigger(NGRAM, 7)),
        ([11, 12, 11, 12], Keys(ngram_size=2), Trigger(NGRAM, 4)),
        ([1, 2, 3, 1, 2, 4, 1, 2, 3], Keys(ngram_size=3), None),  # not one after the other
        ([1, 2, 1, 2, 1], Keys(ngram_size=2, ngram_repeats=3), None),  # two and a half times
        ([3, 3, 3], Keys(ngram_size=1, ngram_repeats=3), Trigger(NGRAM, 3)),
        ([1, 2] * 6, Keys(ngram_size=4), Trigger(NGRAM, 8)),  # a shorter period repeats the longer n-gram too
        # both rules hold at once: one verdict
        ([4] * 8, Keys(max_consecutive_token_repeats=4, ngram_size=2), Trigger(RUN, 4)),
        ([4] * 80, Keys(ngram_repeats=0), None),  # every rule off
        ([1, 2] * 40, Keys(ngram_size=2, ngram_repeats=0), None),
    ],
)
def test_runs_and_ngrams(ids: list[int], keys: Keys, expected: Trigger | None) -> None:
    assert first_trigger(ids, keys) == expected
    assert rescanned(ids, keys) == expected


@pytest.mark.parametrize(
    ("text", "keys_seen"),
    [
        ('{"object_1": {}, "object_2": {}}', 2),
        ('{"object_1" \n: {}}', 1),
        ('{"object_12345":{}}', 1),
        ('{"object_": {}, "object_x": {}, "objects_1": {}, "Object_1": {}}', 0),
        ('{"object_1": {"desc": "object_2"}}', 1),  # a description that looks like a key
        ('{"object_1": {"desc": "\\"object_2\\": \\"object_3\\":"}}', 1),  # escaped quotes begin no key
        ('{"a\\"object_1": {}}', 0),  # escaped at its beginning alone
        ('{"a\\\\"object_1": {}}', 1),  # an escaped backslash, so the quote is a real one
        ('{"object_1"object_2": {}}', 1),  # broken: the quote that closes one opens the other
        ('""object_1":', 1),
        ('"object_1object_2":', 0),
        ('"object_1" , :', 0),
        ('x"object_1": y" "object_2": z', 2),  # quotes out of step, as in degenerate tails
    ],
)
def test_object_keys_in_text(text: str, keys_seen: int) -> None:
    assert keys_in(text.encode()) == keys_seen
    for limit in range(keys_seen + 2):
        trigger = first_trigger(text.encode(), Keys(max_object_keys=limit), BYTES)
        assert (trigger is not None) == (keys_seen > limit)


@settings(max_examples=400)
@given(
    ids=st.lists(st.integers(0, 2), max_size=40),
    keys=st.builds(
        Keys,
        min_new_tokens=st.integers(0, 20),
        max_consecutive_token_repeats=st.integers(2, 6) | st.just(0),
        ngram_size=st.integers(0, 5),
        ngram_repeats=st.integers(2, 4),
    ),
)
def test_guard_equals_a_rescan(ids: list[int], keys: Keys) -> None:
    assert first_trigger(ids, keys) == rescanned(ids, keys)


@settings(max_examples=400)
@given(
    text=st.lists(st.sampled_from(['"', "object_", "obj", "ect_", "7", ":", " ", "\\", "x", '"object_1":'])),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    limit=st.integers(0, 3),
)
def test_object_keys_are_counted_however_tokens_cut_them(text: list[str], cuts: list[int], limit: int) -> None:
    """Tokens of any length: a key may be spread over several, and one token may hold several keys."""
    whole = "".join(text).encode()
    pieces, start = [], 0
    while start < len(whole):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(whole[start : start + size])
        start += size
    trigger = first_trigger(range(len(pieces)), Keys(max_object_keys=limit), ObjectKeyReader(pieces))
    by_prefix = [keys_in(b"".join(pieces[:n])) for n in range(1, len(pieces) + 1)]
    crossed = next((n for n, seen in enumerate(by_prefix, 1) if seen > limit), None)
    assert trigger == (None if crossed is None else Trigger(OBJECT_KEYS, crossed))


def answer(objects: int) -> str:
    return json.dumps(
        {
            f"object_{n}": {"desc": f"cat {n}", "bbox_2d": [f"<|coord_{n + k}|>" for k in range(4)]}
            for n in range(1, objects + 1)
        }
    )


@pytest.mark.parametrize("limit", [1, 9, 58])
def test_max_object_keys_fires_with_the_real_vocabulary(limit: int) -> None:
    """Qwen's tokenizer fuses the quote before ``object_`` with the preceding text, so no token sequence marks
    the start of a key; the text does."""
    vocab = qwen_vocab()
    ids = vocab.encode(answer(59))
    trigger = first_trigger(ids, Keys(max_object_keys=limit), ObjectKeyReader(vocab.pieces))
    assert trigger is not None
    assert trigger.rule is OBJECT_KEYS
    kept = vocab.decode(ids[: trigger.num_new_tokens])
    assert kept.endswith(f'"object_{limit + 1}":')
    assert first_trigger(ids, Keys(max_object_keys=59), ObjectKeyReader(vocab.pieces)) is None


def test_object_keys_need_a_reader() -> None:
    with pytest.raises(ValueError, match="ObjectKeyReader"):
        RepeatGuard(Keys(max_object_keys=3))


def test_unknown_ids_write_nothing() -> None:
    assert ObjectKeyReader([b"a"]).read(3, 17) == (3, 0)


def test_trigger_is_final() -> None:
    guard = RepeatGuard(Keys(max_consecutive_token_repeats=2))
    verdicts = [guard.push(token) for token in (1, 1, 2, 3)]
    assert verdicts == [None, *[Trigger(RUN, 2)] * 3]


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_fork_is_independent(shared: list[int], own: list[int]) -> None:
    keys = Keys(ngram_size=3, max_consecutive_token_repeats=5)
    guard = RepeatGuard(keys)
    for token in shared:
        guard.push(token)
    fork = guard.fork()
    for token in (1, 0, 0, 1, 1, 0):
        guard.push(token)
    for token in own:
        fork.push(token)
    assert fork.trigger == rescanned([*shared, *own], keys)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1] * 256, Trigger(GuardRule.TOKEN_RUN, 256)),
        ([*range(192), *[7] * 63, 8], None),
        ([*range(200), *[7] * 64], Trigger(GuardRule.TOKEN_RUN, 264)),
        ([*range(128), *range(300, 364), *range(300, 364)], Trigger(GuardRule.NGRAM, 256)),
        ([*range(128), *range(300, 363), *range(300, 363), 1, 2], None),
    ],
)
def test_default_guard_triggers_as_in_the_contract(ids: list[int], expected: Trigger | None) -> None:
    assert first_trigger(ids, RepeatTerminateConfig(enabled=True)) == expected


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8),
    run=st.integers(0, 6), size=st.integers(0, 3), repeats=st.integers(0, 4), least=st.integers(0, 12),
)  # fmt: skip
def test_tokens_in_parts_trigger_where_single_ones_do_and_never_where_it_was_ruled_out(
    parts: list[list[int]], run: int, size: int, repeats: int, least: int
) -> None:
    keys = Keys(max_consecutive_token_repeats=run, ngram_size=size, ngram_repeats=repeats, min_new_tokens=least)
    single, in_parts = RepeatGuard(keys), RepeatGuard(keys)
    for part in parts:
        possible = len(part) >= in_parts.fewest_to_trigger()
        for token in part:
            single.push(token)
        assert in_parts.extend(part) == single.trigger
        assert possible or single.trigger is None
    assert (in_parts.num_tokens, in_parts.trigger) == (single.num_tokens, single.trigger)


def test_object_keys_are_counted_in_parts_too() -> None:
    guard = RepeatGuard(Keys(max_object_keys=1), BYTES)
    assert guard.extend(list(b'{"object_1": {}, ')) is None
    assert guard.extend(list(b'"object_2": {}}')) == Trigger(OBJECT_KEYS, 28)


def test_a_pattern_that_breaks_off_in_a_part_is_counted_anew() -> None:
    guard = RepeatGuard(Keys(ngram_size=2, ngram_repeats=3, min_new_tokens=9))
    assert guard.extend([1, 2, 1, 2, 7, 8]) is None  # too few tokens for a trigger, so only counted
    assert guard.extend([7, 8, 7]) is None
    assert guard.extend([8]) == Trigger(NGRAM, 10)


def test_a_run_that_began_in_an_earlier_part_is_ended() -> None:
    guard = RepeatGuard(Keys(max_consecutive_token_repeats=3))
    assert guard.extend([5, 5]) is None
    assert guard.fewest_to_trigger() == 1
    assert guard.extend([5]) == Trigger(RUN, 3)
