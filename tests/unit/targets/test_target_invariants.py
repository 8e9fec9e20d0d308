"""For every scene and every answer, however broken, parse, match and build never raise, and the target is
one JSON object with exactly the kept entries and the missed objects."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import COORD_TOKENS, CoordVocab, serialize_objects
from coordexp.geometry import mask_iou
from coordexp.metrics import rollout_counters
from coordexp.records import GTObject, TokenRole
from coordexp.targets import TargetPolicy
from support.answers import SampleOutcome, outcome_of, read_json, taught_text, tiny_vocab, vocabs
from support.parse_invariants import examples

COORD_ROLES = (TokenRole.MATCHED_COORD, TokenRole.GT_COORD)
MODELS_OWN = (TokenRole.MATCHED_COORD, TokenRole.REWRITTEN_STRUCT, TokenRole.REWRITTEN_DESC)
PREFIX_ROLES = (TokenRole.MASKED, TokenRole.MATCHED_COORD, TokenRole.MATCHED_STRUCT, TokenRole.MATCHED_DESC)


def check_target(got: SampleOutcome, truth: Sequence[GTObject], vocab: CoordVocab) -> None:
    target, match = got.target, got.match
    tokens, roles = np.array(target.token_ids), target.roles_T

    # Every object of the scene is either found or appended, once.
    found = [pair.gt_idx for pair in match.pairs]
    assert sorted([*found, *target.appended_gt_idx]) == list(range(len(truth)))
    assert target.appended_gt_idx == match.fn_gt_idx
    assert [*zip(target.matched_pred_idx, target.matched_gt_idx, strict=True)] == [
        (pair.pred_idx, pair.gt_idx) for pair in match.pairs
    ]

    # The text is one JSON object: the kept entries as they were, then the missed objects, numbered on.
    root, kept = read_json(taught_text(got, vocab)), read_json(got.parsed.prefix_text + "}")
    assert root[: len(kept)] == kept
    start = (got.parsed.max_object_index or 0) + 1
    appended = root[len(kept) :]
    assert [key for key, _ in appended] == [f"object_{start + i}" for i in range(len(target.appended_gt_idx))]
    assert [key for key, _ in appended] == [f"object_{n}" for n in target.appended_object_index]
    for (_, body), gt in zip(appended, [truth[j] for j in target.appended_gt_idx], strict=True):
        assert dict(body) == {"desc": gt.desc, gt.kind: [COORD_TOKENS[k] for k in gt.bins]}

    # Roles: a prefix without text supervision, a tail, one closing brace, one stop token.
    assert len(roles) == len(tokens)
    assert target.token_ids[: target.prefix_len] == got.parsed.prefix_token_ids
    in_prefix = np.isin(roles, PREFIX_ROLES)
    assert np.flatnonzero(in_prefix).tolist() == list(range(target.prefix_len))
    assert np.flatnonzero(roles == TokenRole.CLOSE).tolist() == [len(roles) - 2]
    assert np.flatnonzero(roles == TokenRole.EOS).tolist() == [len(roles) - 1]

    # In the prefix, only a matched object's own tokens have roles, each one of three.
    matched = {pair.pred_idx for pair in match.pairs}
    for i, obj in enumerate(got.parsed.objects):
        own, desc = slice(*obj.own_token_span), slice(*obj.desc_token_span)
        inside = {*roles[own].tolist(), *roles[desc].tolist()}
        if i not in matched:
            assert inside <= {TokenRole.MASKED}
            continue
        assert inside == {TokenRole.MATCHED_COORD, TokenRole.MATCHED_STRUCT, TokenRole.MATCHED_DESC} - (
            set() if (roles[own] == TokenRole.MATCHED_STRUCT).any() else {TokenRole.MATCHED_STRUCT}
        )
        assert (roles[desc] == TokenRole.MATCHED_DESC).all()
        assert (roles[list(obj.coord_token_idx)] == TokenRole.MATCHED_COORD).all()
        at_struct = np.flatnonzero(roles[own] == TokenRole.MATCHED_STRUCT) + obj.own_token_span[0]
        written = b"".join(vocab.pieces[int(tokens[p])] for p in at_struct)
        assert b"<|coord_" not in written and written.count(b"{") <= 1 and written.count(b"}") <= 1
    # ... and all other tokens of the prefix are masked.
    of_matched = np.zeros(len(roles), dtype=bool)
    for i in matched:
        of_matched[slice(*got.parsed.objects[i].own_token_span)] = True
        of_matched[slice(*got.parsed.objects[i].desc_token_span)] = True
    assert (roles[: target.prefix_len][~of_matched[: target.prefix_len]] == TokenRole.MASKED).all()

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
    kinds = [(got.parsed.objects[pair.pred_idx].kind, truth[pair.gt_idx].kind) for pair in match.pairs]
    num_boxes = kinds.count(("bbox_2d", "bbox_2d"))  # a box on a polygon has no loss on decoded boxes
    assert len(target.box_pos_M4) == num_boxes + sum(truth[j].kind == "bbox_2d" for j in target.appended_gt_idx)

    counters = rollout_counters([got])
    assert counters["rollout/matched_total"] + counters["rollout/fn_appended_total"] == len(truth)
    assert counters["rollout/matched_total"] + counters["rollout/fp_total"] == len(got.parsed.objects)
    num_prefix_coords = sum(len(got.parsed.objects[pair.pred_idx].bins) for pair in match.pairs)
    assert counters["rollout/prefix_coord_targets_total"] == num_prefix_coords
    assert counters["match/mixed_kind_total"] == sum(pred != gt for pred, gt in kinds)


def is_plain(desc: str, vocab: CoordVocab) -> bool:
    """Whether the tokenizer writes a description as it is, by tokens that are text."""
    text = json.dumps(desc, ensure_ascii=False)
    if re.search(r"<\|[^|]*\|>|</?(think|tool_call|tool_response)>", desc):
        return False
    try:
        return vocab.decode(vocab.encode(text)) == text
    except UnicodeEncodeError:
        return False


def check_rewritten(got: SampleOutcome, truth: Sequence[GTObject], vocab: CoordVocab, policy: TargetPolicy) -> None:
    target, match, predicted = got.target, got.match, got.parsed.objects
    tokens, roles = np.array(target.token_ids), target.roles_T
    assert len(roles) == len(tokens) and target.prefix_len == 0 and target.context == "rollout"
    assert roles[-2:].tolist() == [TokenRole.CLOSE, TokenRole.EOS]
    assert not {TokenRole.CLOSE, TokenRole.EOS} & set(roles[:-2].tolist())

    # The text is one JSON object, as it would be written from objects, numbered from 1.
    text = taught_text(got, vocab)
    root = json.loads(text)
    assert [*root] == [f"object_{n}" for n in range(1, len(root) + 1)]
    entries = [
        (body["desc"], *((kind, body[kind]) for kind in ("bbox_2d", "poly") if kind in body)) for body in root.values()
    ]

    def written(desc: str, kind: str, bins: Sequence[int]) -> tuple[str, tuple[str, list[str]]]:
        return desc, (kind, [COORD_TOKENS[k] for k in bins])

    # Content: every matched object at its own coordinates, every annotation once, unmatched ones by policy.
    expected = []
    for pair in match.pairs:
        own, gt = predicted[pair.pred_idx], truth[pair.gt_idx]
        expected.append(written(gt.desc, gt.kind, own.bins if own.kind == gt.kind else gt.bins))
    expected += [written(truth[j].desc, truth[j].kind, truth[j].bins) for j in match.fn_gt_idx]
    plain = [i for i in match.fp_pred_idx if is_plain(predicted[i].desc, vocab)]
    kept = [predicted[i] for i in plain] if policy.unmatched != "drop" else []
    assert len(root) == len(truth) + len(match.fp_pred_idx) - len(target.left_out_pred_idx)
    assert set(target.left_out_pred_idx) <= set(match.fp_pred_idx)
    if policy.duplicates == "keep":
        expected += [written(obj.desc, obj.kind, obj.bins) for obj in kept]
        assert sorted(entries) == sorted(expected)
    else:
        rest = [*entries]
        for one in expected:
            rest.remove(one)
        for one in rest:  # the others are unmatched
            assert one in [written(obj.desc, obj.kind, obj.bins) for obj in kept]
        matched = [predicted[pair.pred_idx] for pair in match.pairs]
        firsts = [obj for i, obj in enumerate(predicted) if i in plain and not any(
            other.desc == obj.desc and mask_iou(other, obj) >= 0.3 for other in (*predicted[:i], *matched, *truth)
        )]  # fmt: skip
        assert len(rest) == (len(firsts) if policy.unmatched != "drop" else 0)
    if policy.missed == "append" and policy.duplicates != "replace":
        assert target.appended_object_index == tuple(range(len(root) - len(match.fn_gt_idx) + 1, len(root) + 1))
    for number, j in zip(target.appended_object_index, target.appended_gt_idx, strict=True):
        assert entries[number - 1] == written(truth[j].desc, truth[j].kind, truth[j].bins)

    # Roles: coordinates on coordinate tokens, each once, in order; masked ones have no target.
    coords = [position for position, token in enumerate(tokens.tolist()) if vocab.bin_of(token) is not None]
    taught = [p for p in coords if roles[p] in COORD_ROLES]
    assert target.coord_pos_K.tolist() == taught == np.flatnonzero(np.isin(roles, COORD_ROLES)).tolist()
    assert {TokenRole(int(roles[p])) for p in coords} <= {*COORD_ROLES, TokenRole.MASKED, TokenRole.SOFT_COORD}
    tail = roles[target.coord_pos_K] == TokenRole.GT_COORD
    assert [vocab.bin_of(int(t)) for t in tokens[target.coord_pos_K[tail]]] == target.coord_bin_K[tail].tolist()
    bin_at = dict(zip(target.coord_pos_K.tolist(), target.coord_bin_K.tolist(), strict=True))
    for positions, bins in zip(target.box_pos_M4.tolist(), target.box_bin_M4.tolist(), strict=True):
        assert [bin_at[position] for position in positions] == bins
    hard = [gt for gt in truth if gt.soft is None]
    in_place = {
        p.gt_idx: predicted[p.pred_idx] for p in match.pairs if predicted[p.pred_idx].kind == truth[p.gt_idx].kind
    }
    assert len(target.coord_pos_K) == sum(
        len(in_place[j].bins if j in in_place else gt.bins) for j, gt in enumerate(truth) if gt.soft is None
    )
    assert len(target.box_pos_M4) == sum(gt.kind == "bbox_2d" for gt in hard)

    # Without anything masked, every token is taught something.
    if not any(role == TokenRole.MASKED for role in roles.tolist()):
        assert set(roles.tolist()) <= {*range(len(TokenRole))} - {TokenRole.MATCHED_STRUCT, TokenRole.MATCHED_DESC}
    if not in_place:
        assert not set(roles.tolist()) & {int(role) for role in MODELS_OWN}

    # Softness weighs text and nothing else.
    allowed = {np.float32(1.0), *(np.float32(gt.soft) for gt in truth if gt.soft is not None)}
    text_T = target.weights["struct_ce"] + target.weights.get("desc_ce", np.float32(0))
    assert set(text_T[text_T > 0].tolist()) <= {float(weight) for weight in allowed}
    assert text_T[-2:].tolist() == [1.0, 1.0]
    assert np.flatnonzero(target.weights.get("coord", [])).tolist() == target.coord_pos_K.tolist()
    assert np.flatnonzero(target.weights.get("box", [])).tolist() == sorted(target.box_pos_M4[:, 0].tolist())

    counters = rollout_counters([got])
    assert counters["rollout/matched_total"] + counters["rollout/fn_appended_total"] == len(truth)


# -- any scene, any answer ---------------------------------------------------------------------------------------------

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
@settings(max_examples=examples(60))
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
@settings(max_examples=examples(80))
@given(case=cases(), policy=POLICIES, soft=st.lists(st.sampled_from([None, None, 0.25, 1.0]), min_size=4, max_size=4))
def test_any_answer_is_rewritten_to_a_valid_target(make_vocab, case, policy, soft) -> None:
    vocab = make_vocab()
    truth, meant, edits, cut, answer_order, append_order = case
    truth = [replace(obj, soft=how) for obj, how in zip(truth, soft, strict=False)]
    whole = [*vocab.encode(serialize_objects(meant, answer_order)), vocab.eos_id]
    got = outcome_of(edited(whole, edits, cut, vocab), truth, vocab, field_order=append_order, policy=policy)
    check_rewritten(got, truth, vocab, policy)


@settings(max_examples=examples(40))
@given(truth=SCENES, ids=st.lists(st.integers(0, 1440), max_size=60))
def test_random_tokens_become_a_valid_target(truth, ids) -> None:
    vocab = tiny_vocab()
    check_target(outcome_of(ids, truth, vocab), truth, vocab)


@vocabs
@settings(max_examples=examples(25))
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
