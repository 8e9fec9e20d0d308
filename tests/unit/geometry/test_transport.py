"""Barycentric targets by log-space Sinkhorn: relative to the shape, and with a blur in bins."""

import math
from itertools import product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp import transport
from coordexp.geometry import barycentric_targets, exact_iou
from coordexp.transport import barycentric_targets_of

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
        (SHIFTED, 1e-3, 200, SHIFTED, 1e-6),  # neither overflows nor underflows
        (SQUARE, 1, 50, SQUARE, 1e-3),
        (TRIANGLE, 10, 30, [(121.53, 110.00), (220.00, 110.00), (220.00, 208.48), (185.11, 144.88)], 0.01),
    ],
)
def test_known_values(gt, epsilon, iters, expected, tolerance):
    got = barycentric_targets(SQUARE, gt, epsilon=epsilon, iters=iters)
    np.testing.assert_allclose(got, expected, atol=tolerance)


def test_more_ground_truth_points_than_predicted_ones():
    got = barycentric_targets([(100, 100), (200, 100), (200, 200)], SQUARE, epsilon=10)
    np.testing.assert_allclose(got, [(100, 125.23), (175.26, 124.74), (174.77, 200)], atol=0.01)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("epsilon", [None, 10])
@pytest.mark.parametrize("shift", [(700, 700), (0, 500), (100, 100), (-100, 0)])
def test_far_apart_shapes_keep_their_shape(cost, epsilon, shift):
    got = barycentric_targets(SQUARE, SQUARE + shift, cost=cost, epsilon=epsilon)
    np.testing.assert_allclose(got, SQUARE + shift, atol=0.1)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("direction", [(1, 0), (0, -1), (1, 0.5)])
def test_targets_are_continuous_while_shapes_move_apart(cost, direction):
    """From one on the other, over touching, to a gap: in steps of a bin no target leaps, and the square stays one."""

    def targets_of(shift):
        return barycentric_targets(SQUARE, SQUARE + shift, cost=cost, epsilon=10)

    shifts = np.arange(0, 131)[:, None] * np.array(direction)
    targets = np.stack([targets_of(shift) - shift for shift in shifts])
    assert targets.std(axis=1).min() > 48  # 50 for the square itself
    assert np.abs(np.diff(targets, axis=0)).max() < 1
    near, touching = (targets_of(np.array(direction) * distance) for distance in (99.999, 100))
    np.testing.assert_allclose(near, touching, atol=0.01)


@settings(max_examples=50)
@given(POINTS, POINTS, st.integers(-999, 999), st.integers(-999, 999))
def test_targets_are_continuous_in_the_predicted_shape(pred, gt, dx, dy):
    there = np.array(pred) + np.array([dx, dy])
    found, beside = (barycentric_targets(there + step, gt, epsilon=10) for step in (0.0, 1e-6))
    np.testing.assert_allclose(found, beside, atol=1e-3)


@settings(max_examples=40)
@given(POINTS, POINTS, st.sampled_from([None, 10.0]), st.integers(0, 11), st.booleans())
def test_order_and_direction_of_vertices_do_not_matter(pred, gt, epsilon, turn, reverse):
    step = -1 if reverse else 1
    turned_pred, turned_gt = np.roll(pred, turn, axis=0)[::step], np.roll(gt, -turn, axis=0)[::step]
    wanted = np.roll(barycentric_targets(pred, gt, epsilon=epsilon), turn, axis=0)[::step]
    np.testing.assert_allclose(barycentric_targets(turned_pred, turned_gt, epsilon=epsilon), wanted, atol=1e-6)


@settings(max_examples=80)
@given(POINTS, POINTS, st.sampled_from(["l1", "l2"]), st.sampled_from([7.1, 10.0, 100.0]), st.sampled_from([1, 30]))
def test_multiplicative_and_logarithmic_form_agree(pred, gt, cost, epsilon, iters):
    arguments = {"cost": cost, "epsilon": epsilon, "iters": iters}
    with mock.patch.object(transport, "_MAX_SPREAD", 300.0):
        multiplied = barycentric_targets(pred, gt, **arguments)
    with mock.patch.object(transport, "_MAX_SPREAD", -1.0):
        added = barycentric_targets(pred, gt, **arguments)
    np.testing.assert_allclose(multiplied, added, atol=1e-7)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(POINTS, POINTS), max_size=5),
    st.sampled_from([None, 0.5, 10.0]),
    st.sampled_from([(13, 3), (128, 16)]),
)
def test_batch_equals_single_calls(pairs, epsilon, at_once):
    """Some problems share a kernel or are padded, some are too far spread for it: none may touch another."""
    with mock.patch.multiple(transport, _POINTS_AT_ONCE=at_once[0], _PAIRS_AT_ONCE=at_once[1]):
        together = barycentric_targets_of(pairs, "l2", epsilon, 30)
    assert len(together) == len(pairs)
    for found, (pred, gt) in zip(together, pairs, strict=True):
        np.testing.assert_allclose(found, barycentric_targets(pred, gt, epsilon=epsilon), atol=1e-9)


@settings(max_examples=60)
@given(
    POINTS, POINTS, st.sampled_from(["l1", "l2"]), st.sampled_from([None, 0.1, 1.0, 10.0, 100.0]), st.integers(1, 30)
)
def test_targets_are_within_the_ground_truth(pred, gt, cost, epsilon, iters):
    got = barycentric_targets(pred, gt, cost=cost, epsilon=epsilon, iters=iters)
    low, high = np.min(gt, axis=0), np.max(gt, axis=0)
    assert got.shape == (len(pred), 2)
    assert ((got >= low - 1e-6) & (got <= high + 1e-6)).all()


# -- without an epsilon: relative to the shape ---------------------------------------------------------------------

RADII = (3, 12, 50, 400)
VERTICES = (3, 4, 5, 12, 24, 60)


def polygon(radius: float, vertices: int, turn: float = 0.3) -> np.ndarray:
    """A regular polygon around (500, 500), in whole bins."""
    angle_N = 2 * math.pi * np.arange(vertices) / vertices + turn
    return np.round(500 + radius * np.stack([np.cos(angle_N), np.sin(angle_N)], axis=1))


def star(radius: float, vertices: int) -> np.ndarray:
    """Every second vertex is at half the radius."""
    scale_N1 = np.where(np.arange(vertices) % 2, 0.5, 1.0)[:, None]
    return np.round(500 + (polygon(radius, vertices) - 500) * scale_N1)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("make", [polygon, star])
def test_a_polygon_is_its_own_target(cost, radius, make):
    for vertices in VERTICES:
        shape = make(radius, vertices)
        error = np.abs(barycentric_targets(shape, shape, cost=cost) - shape).max()
        assert error <= max(1.0, 0.02 * 2 * radius), (vertices, error)


@pytest.mark.parametrize("cost", ["l1", "l2"])
def test_thin_polygons_and_close_vertices_are_their_own_targets(cost):
    thin = np.array([(100, 500), (900, 500), (900, 503), (100, 503)])
    sliver = np.array([(100, 500), (101, 500), (900, 503)])
    doubled = np.array([(100, 100), (100, 100), (200, 100), (200, 200), (100, 200)])
    for shape in (thin, sliver, doubled):
        np.testing.assert_allclose(barycentric_targets(shape, shape, cost=cost), shape, atol=0.01)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("radius", RADII)
def test_a_moved_polygon_is_taught_the_annotation(cost, radius):
    """Moved by a tenth of its size, in any direction: each vertex goes to its own place, within 5 % of the size."""
    for vertices, direction in product(VERTICES, range(4)):
        shape, angle = polygon(radius, vertices), 2 * math.pi * direction / 4 + 0.1
        moved = np.round(shape + 0.1 * 2 * radius * np.array([math.cos(angle), math.sin(angle)]))
        error = np.linalg.norm(barycentric_targets(moved, shape, cost=cost) - shape, axis=1).max()
        assert error <= 0.05 * 2 * radius, (vertices, direction, error)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("scale", [0.6, 1.3])
def test_a_scaled_polygon_is_taught_the_annotation(cost, scale):
    for shape in (polygon(150, 24), star(150, 24), polygon(40, 8)):
        scaled = np.round(510 + scale * (shape - 500))
        np.testing.assert_allclose(barycentric_targets(scaled, shape, cost=cost), shape, atol=0.5)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize("scale", [0.8, 1.1])
@pytest.mark.parametrize("on_a_side", [2, 5, 15])
def test_a_polygon_with_many_more_vertices_keeps_its_extent(cost, scale, on_a_side):
    """Four corners on a square that is annotated with up to 60 points: the mean of 15 would be far inside."""
    along = np.linspace(0, 100, on_a_side, endpoint=False).round()
    side = np.stack([along, np.zeros_like(along)], axis=1)
    outline = 100 + np.concatenate([side, (100, 0) + side[:, ::-1], 100 - side, (0, 100) - side[:, ::-1]])
    corners = np.array([(0, 0), (100, 0), (100, 100), (0, 100)])
    got = barycentric_targets(150 + scale * (corners - 50), outline, cost=cost)
    np.testing.assert_allclose(got, 100 + corners, atol=1.0)


@pytest.mark.parametrize("vertices", [3, 4, 6])
def test_few_vertices_on_a_circle_of_60_stay_on_it(vertices):
    got = barycentric_targets(polygon(90, vertices), polygon(100, 60))
    assert np.linalg.norm(got - 500, axis=1).min() > 97


@pytest.mark.parametrize("cost", ["l1", "l2"])
def test_every_annotated_vertex_is_taught_if_the_prediction_has_more(cost):
    """24 predicted points on a square: some at each corner, and none inside."""
    got = barycentric_targets(polygon(60, 24), SQUARE + 350, cost=cost)
    for corner in SQUARE + 350:
        assert np.abs(got - corner).max(axis=1).min() < 0.1
    assert np.abs(got - 500).max(axis=1) == pytest.approx(50, abs=0.1)
    # A vertex in the middle of a side, one more than the annotation has, stays in the middle of the side.
    five = np.array([(100, 100), (150, 100), (200, 100), (200, 200), (100, 200)])
    np.testing.assert_allclose(barycentric_targets(five, SQUARE, cost=cost), five, atol=0.5)


ELL = np.array([(100, 100), (500, 100), (500, 200), (200, 200), (200, 500), (100, 500)])
BAR = np.array([(100, 100), (900, 100), (900, 180), (100, 180)])
FLAT = np.array([(100, 500), (700, 500), (400, 560)])


def halved(shape):
    """With a vertex in the middle of every edge."""
    return np.stack([shape, (shape + np.roll(shape, -1, axis=0)) // 2], axis=1).reshape(-1, 2)


@pytest.mark.parametrize("cost", ["l1", "l2"])
@pytest.mark.parametrize(
    ("pred", "gt"),
    [
        pytest.param(np.insert(ELL, 1, (300, 100), axis=0), ELL, id="next to a concave corner"),
        pytest.param(halved(ELL), ELL, id="a vertex on every edge"),
        pytest.param(np.insert(BAR, 1, (500, 100), axis=0), BAR, id="a long edge"),
        pytest.param(np.insert(FLAT, 1, (400, 500), axis=0), FLAT, id="opposite of a flat corner"),
        pytest.param(np.insert(ELL, 1, (300, 100), axis=0), np.insert(ELL, 5, (150, 500), axis=0), id="other edges"),
        pytest.param(np.insert(ELL, 1, (300, 100), axis=0), halved(ELL), id="fewer of them"),
        pytest.param(halved(halved(star(200, 12))), star(200, 12), id="a star"),
        pytest.param(polygon(12, 24), polygon(12, 40), id="a small circle"),
    ],
)
def test_a_right_shape_with_other_vertices_on_its_edges_stays(cost, pred, gt):
    for moved in (0, (37, -21)):
        found = np.round(barycentric_targets(pred + np.array(moved), gt, cost=cost))
        assert exact_iou(found.astype(int), gt.astype(int)) > 0.9 + 0.08 * (np.ptp(gt, axis=0).min() > 50)
    assert np.ptp(found, axis=0) == pytest.approx(np.ptp(gt, axis=0), abs=1)


@pytest.mark.parametrize("height", [2, 6])
def test_a_flat_corner_between_vertices_on_edges_is_taught(height):
    """The annotation has a bump that the prediction lacks, and vertices that it does not need."""
    bump = (300, 100 - height)
    gt = np.array([(100, 100), bump, (500, 100), (500, 200), (500, 300), (300, 300), (100, 300), (100, 200)])
    pred = halved(np.array([(100, 100), (500, 100), (500, 300), (100, 300)]))
    found = barycentric_targets(pred, gt)
    assert np.abs(found - bump).sum(axis=1).min() < 1e-6


def test_equal_predicted_points_have_equal_targets():
    doubled = np.repeat(halved(ELL), 2, axis=0)
    found = barycentric_targets(doubled, ELL)
    np.testing.assert_array_equal(found[0::2], found[1::2])
    np.testing.assert_allclose(found, doubled, atol=1e-9)


def test_a_spike_does_not_move_the_rest_of_an_outline():
    shape = polygon(60, 12)
    spiked = shape.copy()
    spiked[0] += (200, 50)
    np.testing.assert_allclose(barycentric_targets(spiked, shape), shape, atol=1.0)


def test_following_the_targets_ends_at_the_annotation():
    """The limit of a model that follows its targets: with a blur of 10 bins, a point."""
    for radius, vertices in product((12, 25), (4, 24)):
        shape, found = polygon(radius, vertices), polygon(1.2 * radius, vertices, turn=0.35)
        for _ in range(5):
            found = np.round(barycentric_targets(found, shape))
        assert exact_iou(found.astype(int), shape.astype(int)) > 0.95


@pytest.mark.parametrize(("radius", "factor"), [(6, 0.32), (12, 0.62), (25, 0.93), (100, 1.0)])
def test_an_epsilon_in_bins_shrinks_small_polygons(radius, factor):
    """A number keeps its meaning: a blur that is the same for every shape."""
    angle_N = 2 * math.pi * np.arange(4) / 4 + 0.3
    shape = 500 + radius * np.stack([np.cos(angle_N), np.sin(angle_N)], axis=1)
    got = barycentric_targets(shape, shape, epsilon=10.0)
    assert np.linalg.norm(got - 500, axis=1).mean() / radius == pytest.approx(factor, abs=0.01)


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
