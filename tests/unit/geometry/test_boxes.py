"""Axis-aligned boxes in continuous norm1000 space."""

import numpy as np
import pytest

from coordexp.geometry import aabb, aabbs, box_iou, box_iou_pairs, overlapping_boxes
from coordexp.records import GTObject

SQUARE = (100, 100, 200, 200)


@pytest.mark.parametrize(
    ("kind", "bins", "expected"),
    [
        ("bbox_2d", (1, 2, 3, 4), (1, 2, 3, 4)),
        ("bbox_2d", (3, 4, 1, 2), (1, 2, 3, 4)),
        ("bbox_2d", (-5, 0, 1200, 999), (0, 0, 999, 999)),
        ("poly", (10, 50, 40, 20, 30, 90), (10, 20, 40, 90)),
        ("poly", (-10, 50, 1040, 20, 30, 90), (0, 20, 999, 90)),
    ],
)
def test_aabb(kind, bins, expected):
    shape = GTObject("a", kind, bins)
    assert aabb(shape) == expected
    assert aabbs([shape, GTObject("b", "bbox_2d", SQUARE)]).tolist() == [list(expected), list(SQUARE)]


@pytest.mark.parametrize(
    ("kind", "bins", "named"),
    [
        ("bbox_2d", (1, 2, 3), "bbox_2d"),
        ("poly", (1, 2, 3, 4), "poly"),
        ("poly", (1, 2, 3, 4, 5, 6, 7), "poly"),
        ("circle", (1, 2, 3, 4), "circle"),
    ],
)
def test_malformed_shape_is_refused(kind, bins, named):
    with pytest.raises(ValueError, match=named):
        aabb(GTObject("a", kind, bins))
    with pytest.raises(ValueError, match=named):
        aabbs([GTObject("a", kind, bins)])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (SQUARE, SQUARE, 1.0),
        (SQUARE, (110, 100, 210, 200), 9 / 11),
        (SQUARE, (150, 100, 250, 200), 1 / 3),
        (SQUARE, (200, 100, 300, 200), 0.0),
        (SQUARE, (400, 400, 500, 500), 0.0),
        (SQUARE, (150, 150, 150, 150), 0.0),
        ((7, 7, 7, 7), (7, 7, 7, 7), 1.0),
        ((7, 7, 7, 9), (7, 7, 7, 8), 0.0),
    ],
)
def test_box_iou(a, b, expected):
    assert box_iou(np.array([a]), np.array([b]))[0, 0] == pytest.approx(expected, abs=1e-12)


def test_box_iou_is_a_table_of_all_pairs():
    boxes = aabbs([GTObject("a", "bbox_2d", SQUARE), GTObject("b", "bbox_2d", (110, 100, 210, 200))])
    np.testing.assert_allclose(box_iou(boxes, boxes[:1]), [[1.0], [9 / 11]])
    assert box_iou(aabbs([]), boxes).shape == (0, 2)


def test_pairs_and_overlaps_agree_with_the_table():
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 4, (40, 2, 2))
    boxes = np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
    table = box_iou(boxes[:25], boxes[25:])
    first, second = np.indices(table.shape).reshape(2, -1)
    assert box_iou_pairs(boxes[:25][first], boxes[25:][second]).tolist() == table.ravel().tolist()
    assert np.stack(overlapping_boxes(boxes[:25], boxes[25:])).tolist() == np.stack(np.nonzero(table > 0)).tolist()
    assert (table == 1).any() and (table == 0).any()
