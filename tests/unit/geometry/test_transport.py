"""Barycentric targets by log-space Sinkhorn."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp import geometry
from coordexp.geometry import barycentric_targets, barycentric_targets_of

SQUARE = np.array([(100, 100), (200, 100), (200, 200), (100, 200)], dtype=float)
SHIFTED = SQUARE + np.array([20, 10])
TRIANGLE = np.array([(120, 110), (220, 110), (220, 210)], dtype=float)
POINTS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=12)


@pytest.mark.parametrize(
    ("gt", "epsilon", "iters", "expected", "tolerance"),
    [
        (SHIFTED, 10, 30, [(120.007, 110.014), (219.749, 110.015), (219.745, 209.907), (120.007, 209.911)], 1e-3),
        (SHIFTED, 50, 30, [(140.3, 130.2), (199.9, 129.0), (200.1, 190.8), (139.7, 190.0)], 0.05),
        (SHIFTED, 1, 50, SHIFTED, 1e-3),
        (SQUARE, 1, 50, SQUARE, 1e-3),
        (TRIANGLE, 10, 30, [(121.53, 110.00), (220.00, 110.00), (220.00, 208.48), (185.11, 144.88)], 0.01),
    ],
)
def test_known_values(gt, epsilon, iters, expected, tolerance):
    got = barycentric_targets(SQUARE, gt, epsilon=epsilon, iters=iters)
    np.testing.assert_allclose(got, expected, atol=tolerance)


def test_more_ground_truth_points_than_predicted_ones():
    """A triangle taught by a box: its AABB comes from four corners, one target per vertex."""
    got = barycentric_targets([(100, 100), (200, 100), (200, 200)], SQUARE)
    np.testing.assert_allclose(got, [(100, 125.23), (175.26, 124.74), (174.77, 200)], atol=0.01)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("shift", [(700, 700), (700, 0), (0, 500), (700, 300), (100, 100), (-100, 0)])
def test_far_apart_shapes_keep_their_shape(cost, shift):
    got = barycentric_targets(SQUARE, SQUARE + shift, cost=cost)
    np.testing.assert_allclose(got, SQUARE + shift, atol=0.1)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("direction", [(1, 0), (-1, 0), (0, 1), (1, 1), (1, 0.5)])
def test_targets_are_continuous_while_shapes_move_apart(cost, direction):
    """From one on the other, over touching, to a gap: in steps of a bin no target leaps, and the square stays one."""
    shifts = np.arange(0, 131)[:, None] * np.array(direction)
    targets = np.stack([barycentric_targets(SQUARE, SQUARE + shift, cost=cost) - shift for shift in shifts])
    assert targets.std(axis=1).min() > 48  # 50 for the square itself
    assert np.abs(np.diff(targets, axis=0)).max() < 1
    near = barycentric_targets(SQUARE, SQUARE + np.array(direction) * 99.999, cost=cost)
    np.testing.assert_allclose(
        near, barycentric_targets(SQUARE, SQUARE + np.array(direction) * 100, cost=cost), atol=0.01
    )


@settings(max_examples=100)
@given(POINTS, POINTS, st.integers(-999, 999), st.integers(-999, 999))
def test_targets_are_continuous_in_the_predicted_shape(pred, gt, dx, dy):
    there = np.array(pred) + np.array([dx, dy])
    found, beside = (barycentric_targets(there + step, gt) for step in (0.0, 1e-6))
    np.testing.assert_allclose(found, beside, atol=1e-3)


def test_tiny_epsilon_neither_overflows_nor_underflows():
    got = barycentric_targets(SQUARE, SHIFTED, epsilon=1e-3, iters=200)
    np.testing.assert_allclose(got, SHIFTED, atol=1e-6)


def test_order_of_ground_truth_points_does_not_matter():
    turned = np.roll(SHIFTED, 1, axis=0)[::-1]
    np.testing.assert_allclose(barycentric_targets(SQUARE, turned), barycentric_targets(SQUARE, SHIFTED))


@settings(max_examples=150)
@given(POINTS, POINTS, st.sampled_from(["l1", "l2"]), st.sampled_from([7.1, 10.0, 100.0]), st.sampled_from([1, 30]))
def test_multiplicative_and_logarithmic_form_agree(pred, gt, cost, epsilon, iters):
    arguments = {"cost": cost, "epsilon": epsilon, "iters": iters}
    with mock.patch.object(geometry, "_MAX_SPREAD", 300.0):
        multiplied = barycentric_targets(pred, gt, **arguments)
    with mock.patch.object(geometry, "_MAX_SPREAD", -1.0):
        added = barycentric_targets(pred, gt, **arguments)
    np.testing.assert_allclose(multiplied, added, atol=1e-7)


@settings(max_examples=60)
@given(st.lists(st.tuples(POINTS, POINTS), max_size=5), st.sampled_from([0.5, 10.0]), st.sampled_from([13, 128]))
def test_batch_equals_single_calls(pairs, epsilon, at_once):
    """Some problems share a kernel, some are too far spread for it: none may touch another."""
    with mock.patch.object(geometry, "_POINTS_AT_ONCE", at_once):
        together = barycentric_targets_of(pairs, "l2", epsilon, 30)
    assert len(together) == len(pairs)
    for found, (pred, gt) in zip(together, pairs, strict=True):
        np.testing.assert_allclose(found, barycentric_targets(pred, gt, epsilon=epsilon), atol=1e-9)


@settings(max_examples=100)
@given(POINTS, POINTS, st.sampled_from(["l1", "l2"]), st.sampled_from([0.1, 1.0, 10.0, 100.0]))
def test_targets_are_within_the_ground_truth(pred, gt, cost, epsilon):
    got = barycentric_targets(pred, gt, cost=cost, epsilon=epsilon)
    low, high = np.min(gt, axis=0), np.max(gt, axis=0)
    assert got.shape == (len(pred), 2)
    assert ((got >= low - 1e-6) & (got <= high + 1e-6)).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"iters": 0}, "iters"),
        ({"cost": "l3"}, "cost"),
        ({"gt_points": np.zeros((0, 2))}, "gt_points"),
        ({"pred_points": [1, 2, 3]}, "pred_points"),
    ],
)
def test_bad_arguments_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        barycentric_targets(**{"pred_points": SQUARE, "gt_points": SQUARE, **arguments})
