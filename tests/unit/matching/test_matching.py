"""Candidates, gate, Hungarian assignment with dummies, deterministic ties; objects named twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from coordexp.errors import ConfigError
from coordexp.geometry import aabbs, mask_iou
from coordexp.matching import (
    MatchingConfig,
    assign_pairs,
    duplicate_indices,
    match_objects,
    overlapping_candidates,
    top_k_candidates,
)
from coordexp.records import GTObject

# --- candidates: overlap first, then the nearest centres, ties by index ---

PRED = (100, 100, 200, 200)
NEAR, FAR, FARTHER = (300, 100, 400, 200), (100, 500, 200, 600), (800, 800, 900, 900)
GOOD, POOR = (110, 100, 210, 200), (180, 100, 280, 200)


@pytest.mark.parametrize(
    ("ground_truth", "k", "expected"),
    [
        ([POOR, GOOD], 2, [1, 0]),
        ([POOR, GOOD], 1, [1]),
        ([GOOD, GOOD, GOOD], 2, [0, 1]),
        ([FARTHER, FAR, NEAR], 2, [2, 1]),
        ([FAR, NEAR, NEAR], 2, [1, 2]),
        ([FARTHER, NEAR, POOR], 2, [2, 1]),
        ([GOOD], 10, [0]),
    ],
)
def test_choice(ground_truth, k, expected):
    chosen, iou = top_k_candidates(np.array([PRED]), np.array(ground_truth), k)
    assert chosen.tolist() == [expected]
    assert iou.shape == chosen.shape
    assert (iou[0] > 0).tolist() == [ground_truth[j] in (GOOD, POOR) for j in expected]


def test_every_prediction_has_its_own_candidates():
    chosen, _ = top_k_candidates(np.array([PRED, NEAR, FAR]), np.array([FAR, NEAR, GOOD]), 1)
    assert chosen.tolist() == [[2], [1], [0]]


BOXES = st.lists(st.tuples(*[st.integers(0, 6)] * 4), min_size=1, max_size=9).map(
    lambda boxes: np.array([(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in boxes])
)


@settings(max_examples=100)
@given(BOXES, BOXES, st.integers(1, 5))
def test_candidates_without_overlap_are_dropped_from_the_top_k(pred, ground_truth, k):
    chosen, iou = top_k_candidates(pred, ground_truth, k)
    expected = sorted((i, int(j)) for i in range(len(pred)) for j in chosen[i][iou[i] > 0])
    pred_idx, gt_idx = overlapping_candidates(pred, ground_truth, k)
    assert list(zip(pred_idx.tolist(), gt_idx.tolist(), strict=True)) == expected


# --- assignment ---


def box(*bins):
    return GTObject("thing", "bbox_2d", bins)


def at(shift, size=100):
    """A square moved right by ``shift``; IoU with ``at(0)`` is 0.545 at 30 and 0.429 at 40."""
    return box(100 + shift, 100, 100 + shift + size, 100 + size)


FAR_1 = box(700, 700, 800, 800)
TRIANGLE = GTObject("thing", "poly", (100, 100, 200, 100, 200, 200))
OVERLAPPED = [box(140, 100, 240, 200), GTObject("thing", "poly", (100, 150, 200, 150, 150, 290))]
# IoU of prediction 0 with either object is at least 0.5, that of prediction 1 is 0.45 and 0.02.
CROSSED = [box(125, 0, 225, 400), box(62, 0, 162, 400)], [box(100, 0, 200, 400), box(158, 0, 258, 400)]


def outcome(result):
    return [(pair.pred_idx, pair.gt_idx) for pair in result.pairs], result.num_gate_rejections


# id, predictions, ground truth, settings, pairs, gate rejections
OUTCOMES = [
    ("nothing predicted", [], [at(0), FAR_1], {}, [], 0),
    ("nothing annotated", [at(0), FAR_1], [], {}, [], 0),
    ("at default costs a pair past the gate matches", [at(0)], [at(50)], {"maskiou_gate": 0.3}, [(0, 0)], 0),
    ("however low the gate is", [at(0)], [at(90)], {"maskiou_gate": 0.001}, [(0, 0)], 0),
    ("plain match", [at(0)], [at(30)], {}, [(0, 0)], 0),
    ("overlap under the gate is a rejection", [at(0)], [at(70)], {}, [], 1),
    ("overlap with two objects under the gate", [at(0)], OVERLAPPED, {"maskiou_gate": 0.5}, [], 2),
    ("without the gate the nearer one matches", [at(0)], OVERLAPPED, {"maskiou_gate": 0.1}, [(0, 0)], 0),
    # Gated afterwards, the cheapest assignment would drop 1 and leave 0 with its second best.
    ("the cheapest assignment crosses over", *CROSSED, {"maskiou_gate": 0.3}, [(0, 1), (1, 0)], 1),
    ("pairs under the gate are not candidates", *CROSSED, {"maskiou_gate": 0.5}, [(0, 0)], 2),
    ("exactly at the gate matches", [at(0)], [at(40)], {"maskiou_gate": 3 / 7}, [(0, 0)], 0),
    ("boxes that do not touch are not rejected by the gate", [at(0)], [FAR_1], {}, [], 0),
    ("a cost of 0.545 is above the sum of low costs", [at(0)], [at(30)], {"fp_cost": 0.2, "fn_cost": 0.2}, [], 0),
    ("a free pair beats free dummies", [at(0)], [at(0)], {"fp_cost": 0.0, "fn_cost": 0.0}, [(0, 0)], 0),
    ("gate 0 admits disjoint shapes", [at(0)], [FAR_1], {"maskiou_gate": 0.0}, [(0, 0)], 0),
    ("duplicate predictions: the first wins", [at(0), at(0)], [at(10)], {}, [(0, 0)], 0),
    ("symmetric neighbours: the first wins", [at(40), at(0)], [at(20)], {}, [(0, 0)], 0),
    ("k=1: both want the first", [at(0), at(10)], [at(10), at(60)], {"candidate_top_k": 1}, [(1, 0)], 0),
    ("k=2: the second yields", [at(0), at(10)], [at(10), at(60)], {"candidate_top_k": 2}, [(0, 0), (1, 1)], 1),
    ("free dummies beat a pair that costs", [at(0)], [at(30)], {"fp_cost": 0.0, "fn_cost": 0.0}, [], 0),
    ("the total counts: the better pair is given up so that two match",
     [at(0), at(40)], [at(30), at(80)], {"candidate_top_k": 2}, [(0, 0), (1, 1)], 1),
    ("an exchange at the same cost: the first wins", [at(0), at(0)], [at(40), at(0)], {}, [(0, 0), (1, 1)], 0),
    ("at equal cost the lower object is matched",
     [at(100), at(100)], [at(60), at(60), at(120)], {}, [(0, 0), (1, 2)], 0),
    ("box with polygon", [at(0)], [TRIANGLE], {}, [(0, 0)], 0),
    ("coincident points match", [box(5, 5, 5, 5)], [box(5, 5, 5, 5)], {}, [(0, 0)], 0),
    ("too small for the canvas", [box(500, 500, 501, 501)], [box(500, 500, 501, 501)], {}, [(0, 0)], 0),
    ("perfect answers have no rejections",
     [at(0), FAR_1], [at(0), FAR_1], {"maskiou_resolution": 64, "candidate_top_k": 2}, [(0, 0), (1, 1)], 0),
]  # fmt: skip


@pytest.mark.scenario("Pre-assignment gating prevents wrong matches and triggers FN append")
@pytest.mark.parametrize(
    ("predicted", "ground_truth", "settings_", "pairs", "rejections"),
    [row[1:] for row in OUTCOMES],
    ids=[row[0] for row in OUTCOMES],
)
def test_outcome(predicted, ground_truth, settings_, pairs, rejections):
    result = match_objects(predicted, ground_truth, MatchingConfig(**settings_))
    assert outcome(result) == (pairs, rejections)
    assert result.fp_pred_idx == tuple(i for i in range(len(predicted)) if i not in dict(pairs))
    assert result.fn_gt_idx == tuple(j for j in range(len(ground_truth)) if j not in dict(pairs).values())
    for pair in result.pairs:
        expected = mask_iou(
            predicted[pair.pred_idx], ground_truth[pair.gt_idx], MatchingConfig(**settings_).maskiou_resolution
        )
        assert pair.iou == expected


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"candidate_top_k": 0}, "candidate_top_k"),
        ({"maskiou_gate": 1.5}, "maskiou_gate"),
        ({"maskiou_resolution": 1}, "maskiou_resolution"),
        ({"fp_cost": -1.0}, "fp_cost"),
        ({"fn_cost": float("inf")}, "fn_cost"),
    ],
)
def test_config_bounds(bad, key):
    with pytest.raises(ConfigError, match=key):
        MatchingConfig(**bad)


CROWDS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 4), st.integers(1, 4), st.booleans()), max_size=14
).map(lambda shapes: [shape_at(*shape) for shape in shapes])


def shape_at(x, y, w, h, is_box):
    x1, y1, x2, y2 = x * 60, y * 60, (x + w) * 60, (y + h) * 60
    return box(x1, y1, x2, y2) if is_box else GTObject("thing", "poly", (x1, y1, x2, y1, x2, y2))


# Two shapes that one prediction touches equally, the nearer one listed last: the lower index still wins.
@example([shape_at(0, 0, 1, 1, False)], [shape_at(0, 1, 1, 2, False), shape_at(0, 1, 1, 1, False)], 0.0, (1.0, 1.0), 2)
@settings(max_examples=120)
@given(CROWDS, CROWDS, st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([(1.0, 1.0), (0.3, 0.4)]), st.integers(1, 6))
def test_the_assignment_is_optimal_and_prefers_lower_indices(predicted, ground_truth, gate, costs, k):
    """Against one square problem over all shapes, with every top-k candidate in it."""
    if not predicted or not ground_truth:
        return
    config = MatchingConfig(k, gate, 256, *costs)
    num_pred, num_gt = len(predicted), len(ground_truth)
    cost_PG = np.full((num_pred, num_gt), np.inf)
    chosen_PK, box_iou_PK = top_k_candidates(aabbs(predicted), aabbs(ground_truth), k)
    rejections = 0
    for (i, rank), j in np.ndenumerate(chosen_PK):
        iou = mask_iou(predicted[i], ground_truth[j])
        if iou >= gate:
            cost_PG[i, j] = 1 - iou
        else:
            rejections += box_iou_PK[i, rank] > 0
    square = np.zeros((num_pred + num_gt, num_pred + num_gt))
    square[:num_pred, :num_gt] = cost_PG
    square[:num_pred, num_gt:], square[num_pred:, :num_gt] = config.fp_cost, config.fn_cost
    least = square[linear_sum_assignment(square)].sum()

    result = match_objects(predicted, ground_truth, config)

    def total(partners):
        pairs = [cost_PG[i, j] for i, j in partners.items()]
        return sum(pairs) + (num_pred - len(pairs)) * config.fp_cost + (num_gt - len(pairs)) * config.fn_cost

    partners = {pair.pred_idx: pair.gt_idx for pair in result.pairs}
    assert total(partners) == pytest.approx(least, abs=1e-9)
    assert result.num_gate_rejections == rejections
    holder = {j: i for i, j in partners.items()}
    for i, j in np.ndindex(num_pred, num_gt):
        own, other = partners.get(i, num_gt), holder.get(j)
        if j >= own or (other is not None and other < i):
            continue
        changed = {p: g for p, g in partners.items() if p not in (i, other)} | {i: j}
        if other is not None and own < num_gt:
            changed[other] = own
        assert total(changed) > least + 1e-12, f"prediction {i} could have object {j} at the same cost"


def test_unmatched_costs_are_one_by_default():
    """So a pair that passes the gate is always cheaper than leaving both alone."""
    assert (MatchingConfig().fp_cost, MatchingConfig().fn_cost) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("ious", "chosen"),
    [((0.65, 0.62, 0.62), []), ((0.75, 0.74, 0.74), [1, 2]), ((0.75, 0.6, 0.6), [0])],
    ids=["costs more than both unmatched", "two pairs", "one pair"],
)
def test_fp_cost_and_fn_cost_are_separate(ious, chosen):
    """Three competing pairs; an unmatched object costs twice as much as an unmatched prediction: 0.3 for both."""
    config = MatchingConfig(fp_cost=0.1, fn_cost=0.2)
    found = assign_pairs(np.array([0, 0, 1]), np.array([0, 1, 0]), np.array(ious), config)
    assert sorted(found.tolist()) == chosen


# --- duplicates: the same description, in nearly the same place ---

NAMED, AGAIN, AWAY = (100, 100, 300, 300), (110, 110, 310, 310), (600, 600, 800, 800)
OUTLINE = GTObject("cat", "poly", (100, 100, 300, 100, 300, 300, 100, 300))


def named(desc, bins):
    return GTObject(desc, "bbox_2d", bins)


@pytest.mark.parametrize(
    ("objects", "expected", "why"),
    [
        ([], 0, "nothing named"),
        ([named("cat", NAMED)], 0, "named once"),
        ([named("cat", NAMED), named("cat", AWAY)], 0, "two of a kind"),
        ([named("cat", NAMED), named("cat", AGAIN)], 1, "IoU 0.82"),
        ([named("cat", NAMED), named("dog", NAMED)], 0, "another thing in the same place"),
        ([named("cat", NAMED), named("cat", AGAIN), named("cat", NAMED)], 2, "the first of three is not a duplicate"),
        ([named("cat", NAMED), named("cat", (100, 100, 199, 300))], 0, "half of it: IoU just under 0.5"),
        ([named("cat", NAMED), OUTLINE], 1, "a polygon of the same outline"),
    ],
)
def test_duplicates(objects, expected, why):
    assert len(duplicate_indices(objects)) == expected, why
