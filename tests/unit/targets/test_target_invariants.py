"""What holds for every scene and every answer, however broken: parse, match and build never raise, and the target is
one JSON object that holds exactly the kept entries and the missed objects."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from answers import SampleOutcome, outcome_of, read_json, taught_text, tiny_vocab, vocabs
from coordexp.coords import COORD_TOKENS, CoordVocab, serialize_objects
from coordexp.metrics import rollout_counters
from coordexp.records import GTObject, TokenRole

DESCS = st.sampled_from(["red circle", "U.S.", "wow!", 'a "quote"', "雪豹 🐆", "back\\slash", "}{][", "x,"])
BIN = st.integers(0, 999)
COORD_ROLES = (TokenRole.PREFIX_COORD, TokenRole.TAIL_COORD)


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
    """Ground truth, what the model meant to write, edits (place, kind, value), a cut, and both field orders."""
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


def check(got: SampleOutcome, truth: list[GTObject], vocab: CoordVocab) -> None:
    target, match = got.target, got.match
    tokens, roles = np.array(target.token_ids), target.roles_T

    # Every object of the scene is either found or appended, once.
    found = [pair.gt_idx for pair in match.pairs]
    assert sorted([*found, *target.appended_gt_idx]) == list(range(len(truth)))
    assert target.appended_gt_idx == match.fn_gt_idx

    # The text is one JSON object: the kept entries as they were, then the missed objects, numbered on.
    root, kept = read_json(taught_text(got, vocab)), read_json(got.parsed.prefix_text + "}")
    assert root[: len(kept)] == kept
    start = (got.parsed.max_object_index or 0) + 1
    appended = root[len(kept) :]
    assert [key for key, _ in appended] == [f"object_{start + i}" for i in range(len(target.appended_gt_idx))]
    for (_, body), gt in zip(appended, [truth[j] for j in target.appended_gt_idx], strict=True):
        assert dict(body) == {"desc": gt.desc, gt.kind: [COORD_TOKENS[k] for k in gt.bins]}

    # Roles: a prefix without text supervision, a tail, one closing brace, one stop token.
    assert len(roles) == len(tokens)
    assert target.token_ids[: target.prefix_len] == got.parsed.prefix_token_ids
    in_prefix = np.isin(roles, [TokenRole.PREFIX_MASKED, TokenRole.PREFIX_COORD])
    assert np.flatnonzero(in_prefix).tolist() == list(range(target.prefix_len))
    assert np.flatnonzero(roles == TokenRole.CLOSE).tolist() == [len(roles) - 2]
    assert np.flatnonzero(roles == TokenRole.EOS).tolist() == [len(roles) - 1]

    # Coordinates: on coordinate tokens, in order, each once; in the tail they write their own target.
    assert target.coord_pos_K.tolist() == np.flatnonzero(np.isin(roles, COORD_ROLES)).tolist()
    written = [vocab.bin_of(int(token)) for token in tokens[target.coord_pos_K]]
    assert None not in written
    assert ((target.coord_bin_K >= 0) & (target.coord_bin_K <= 999)).all()
    tail = target.coord_pos_K >= target.prefix_len
    assert np.array(written, dtype=float)[tail].tolist() == target.coord_bin_K[tail].tolist()
    bin_at = dict(zip(target.coord_pos_K.tolist(), target.coord_bin_K.tolist(), strict=True))
    for positions, bins in zip(target.box_pos_M4.tolist(), target.box_bin_M4.tolist(), strict=True):
        assert [bin_at[position] for position in positions] == bins
    num_boxes = sum(got.parsed.objects[pair.pred_idx].kind == "bbox_2d" for pair in match.pairs)
    assert len(target.box_pos_M4) == num_boxes + sum(truth[j].kind == "bbox_2d" for j in target.appended_gt_idx)

    counters = rollout_counters([got])
    assert counters["rollout/matched_total"] + counters["rollout/fn_appended_total"] == len(truth)
    assert counters["rollout/matched_total"] + counters["rollout/fp_total"] == len(got.parsed.objects)
    num_prefix_coords = sum(len(got.parsed.objects[pair.pred_idx].bins) for pair in match.pairs)
    assert counters["rollout/prefix_coord_targets_total"] == num_prefix_coords


@vocabs
@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_any_answer_becomes_a_sound_target(make_vocab, case) -> None:
    vocab = make_vocab()
    truth, meant, edits, cut, answer_order, append_order = case
    whole = [*vocab.encode(serialize_objects(meant, answer_order)), vocab.eos_id]
    got = outcome_of(edited(whole, edits, cut, vocab), truth, vocab, field_order=append_order)
    check(got, truth, vocab)
    if not edits and cut is None:
        assert Counter(got.parsed.dropped).total() == sum(
            obj.kind == "bbox_2d" and (obj.bins[2] < obj.bins[0] or obj.bins[3] < obj.bins[1]) for obj in meant
        )


@settings(max_examples=80, deadline=None)
@given(truth=SCENES, ids=st.lists(st.integers(0, 1440), max_size=60))
def test_random_tokens_become_a_sound_target(truth, ids) -> None:
    vocab = tiny_vocab()
    check(outcome_of(ids, truth, vocab), truth, vocab)


@vocabs
@settings(max_examples=25, deadline=None)
@given(truth=SCENES)
def test_a_perfect_answer_is_taught_as_it_is(make_vocab, truth) -> None:
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
