"""Candidate reduction: overlap first, then the nearest centres, ties by index."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.matching import top_k_candidates
from coordexp.matching.assign import overlapping_candidates

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


@settings(max_examples=200, deadline=None)
@given(BOXES, BOXES, st.integers(1, 5))
def test_candidates_without_overlap_are_dropped_from_the_top_k(pred, ground_truth, k):
    chosen, iou = top_k_candidates(pred, ground_truth, k)
    expected = sorted((i, int(j)) for i in range(len(pred)) for j in chosen[i][iou[i] > 0])
    pred_idx, gt_idx = overlapping_candidates(pred, ground_truth, k)
    assert list(zip(pred_idx.tolist(), gt_idx.tolist(), strict=True)) == expected
