"""For every scene and every answer, however broken, parse, match and build never raise, and the target is
one JSON object with exactly the kept entries and the missed objects."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.records import GTObject
from coordexp.targets import TargetPolicy
from support.answers import outcome_of, taught_text, tiny_vocab, vocabs
from support.parse_invariants import examples
from support.target_invariants import check_rewritten, check_target

DESCS = st.sampled_from(["red circle", "U.S.", "wow!", 'a "quote"', "雪豹 🐆", "back\\slash", "}{][", "x,"])
BIN = st.integers(0, 999)


@st.composite
def boxes(draw) -> GTObject:
    x, y = sorted((draw(BIN), draw(BIN))), sorted((draw(BIN), draw(BIN)))
    return GTObject(draw(DESCS), "bbox_2d", (x[0], y[0], x[1], y[1]))


POLYS = st.builds(
    lambda desc, points: GTObject(desc, "poly", tuple(k for point in points for k in point)),
    DESCS,
    st.lists(st.tuples(BIN, BIN), min_size=3, max_size=5),
)
SCENES = st.lists(st.one_of(boxes(), POLYS), max_size=4)


@st.composite
def cases(draw) -> tuple[list[GTObject], list[GTObject], list[tuple[int, int, int]], int | None, str, str]:
    """Ground truth, the intended answer, edits (place, kind, value), a cut, and both field orders."""
    truth = draw(SCENES)
    jitter = st.integers(-15, 15)

    def moved(obj: GTObject) -> GTObject:
        return GTObject(obj.desc, obj.kind, tuple(min(999, max(0, k + draw(jitter))) for k in obj.bins))

    meant = [moved(obj) for obj in truth if draw(st.booleans())] + draw(st.lists(boxes(), max_size=2))
    edit = st.tuples(st.integers(0, 400), st.integers(0, 3), st.integers(0, 10**6))
    orders = st.sampled_from(["desc_first", "geometry_first"])
    edits, cut = draw(st.lists(edit, max_size=3)), draw(st.none() | st.integers(0, 200))
    return truth, meant, edits, cut, draw(orders), draw(orders)


def edited(ids: list[int], edits: list[tuple[int, int, int]], cut: int | None, vocab: CoordVocab) -> list[int]:
    ids = list(ids)
    for place, kind, value in edits:
        at, token = place % (len(ids) + 1), value % len(vocab)
        if kind == 0:
            del ids[at : at + 1]
        elif kind == 1:
            ids.insert(at, token)
        elif kind == 2:
            ids[at : at + 1] = [token]
        else:  # say something twice
            ids[at:at] = ids[at : at + 1 + value % 40]
    return ids[:cut]


@vocabs
@settings(max_examples=examples(120), deadline=None)
@given(case=cases())
def test_any_answer_becomes_a_valid_target(make_vocab, case) -> None:
    vocab = make_vocab()
    truth, meant, edits, cut, answer_order, append_order = case
    whole = [*vocab.encode(serialize_objects(meant, answer_order)), vocab.eos_id]
    got = outcome_of(edited(whole, edits, cut, vocab), truth, vocab, field_order=append_order)
    check_target(got, truth, vocab)
    if not edits and cut is None:
        assert Counter(got.parsed.dropped).total() == sum(
            obj.kind == "bbox_2d" and (obj.bins[2] < obj.bins[0] or obj.bins[3] < obj.bins[1]) for obj in meant
        )


POLICIES = st.builds(
    TargetPolicy,
    answer=st.just("rewritten"),
    unmatched=st.sampled_from(["mask", "drop"]),
    duplicates=st.sampled_from(["keep", "drop", "replace"]),
    missed=st.sampled_from(["append", "in_order"]),
)


@vocabs
@settings(max_examples=examples(150), deadline=None)
@given(case=cases(), policy=POLICIES, soft=st.lists(st.sampled_from([None, None, 0.25, 1.0]), min_size=4, max_size=4))
def test_any_answer_is_rewritten_to_a_valid_target(make_vocab, case, policy, soft) -> None:
    vocab = make_vocab()
    truth, meant, edits, cut, answer_order, append_order = case
    truth = [replace(obj, soft=how) for obj, how in zip(truth, soft, strict=False)]
    whole = [*vocab.encode(serialize_objects(meant, answer_order)), vocab.eos_id]
    got = outcome_of(edited(whole, edits, cut, vocab), truth, vocab, field_order=append_order, policy=policy)
    check_rewritten(got, truth, vocab, policy)


@settings(max_examples=examples(80), deadline=None)
@given(truth=SCENES, ids=st.lists(st.integers(0, 1440), max_size=60))
def test_random_tokens_become_a_valid_target(truth, ids) -> None:
    vocab = tiny_vocab()
    check_target(outcome_of(ids, truth, vocab), truth, vocab)


@vocabs
@settings(max_examples=examples(25), deadline=None)
@given(truth=SCENES)
def test_a_perfect_answer_is_its_own_target(make_vocab, truth) -> None:
    vocab = make_vocab()
    text = serialize_objects(truth)
    got = outcome_of([*vocab.encode(text), vocab.eos_id], truth, vocab)
    assert len(got.match.pairs) == len(truth)
    assert taught_text(got, vocab) == text
    assert json.loads(text).keys() == {f"object_{i + 1}" for i in range(len(truth))}
    boxes_only = [
        k for pair in got.match.pairs if truth[pair.gt_idx].kind == "bbox_2d" for k in truth[pair.gt_idx].bins
    ]
    assert sum(len(row) for row in got.target.box_bin_M4) == len(boxes_only)
