"""IoU of boxes, and of masks on the virtual canvas: closed form for boxes, exact for shapes too small for it."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from coordexp.geometry import (
    aabb,
    aabbs,
    box_iou,
    box_iou_pairs,
    exact_iou,
    mask_iou,
    mask_iou_pairs,
    overlapping_boxes,
    ring,
)
from coordexp.matching import duplicate_indices, match_objects
from coordexp.records import GTObject

# --- axis-aligned boxes in continuous norm1000 space ---

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


# --- masks ---

# pycocotools' decode predates NumPy 2's copy keyword
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BIN = st.integers(0, 999)


def box(*bins):
    return GTObject("thing", "bbox_2d", bins)


def poly(*bins):
    return GTObject("thing", "poly", bins)


def as_poly(shape):
    """The box's quadrilateral, written as a polygon: takes the raster path."""
    x1, y1, x2, y2 = shape.bins
    return poly(x1, y1, x2, y1, x2, y2, x1, y2)


def raster(shape, resolution):
    """The mask as pycocotools draws it, pixel by pixel."""
    bins = shape.bins if shape.kind == "poly" else as_poly(shape).bins
    (rle,) = coco_mask.frPyObjects([[k * (resolution - 1) / 999 for k in bins]], resolution, resolution)
    return coco_mask.decode(rle).astype(bool)


def boxes(corner):
    x, y = (st.tuples(corner, corner).map(sorted) for _ in "xy")
    return st.builds(lambda x, y: box(x[0], y[0], x[1], y[1]), x, y)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (box(100, 100, 200, 200), box(110, 100, 210, 200), 0.821429),
        (box(100, 100, 200, 200), box(150, 100, 250, 200), 0.342105),
        (box(0, 0, 999, 999), box(0, 0, 499, 999), 0.498039),
        (box(0, 0, 999, 999), box(-40, -1, 1200, 5000), 1.0),
        (poly(0, -40, 1200, 0, 999, 5000, -1, 999), box(0, 0, 999, 999), 1.0),
        (poly(100, 100, 300, 100, 300, 300), box(100, 100, 300, 300), 0.490196),
        (poly(200, 100, 300, 200, 200, 300, 100, 200), box(100, 100, 300, 300), 0.499808),
        (poly(100, 100, 300, 300, 300, 100, 100, 300), poly(100, 100, 300, 300, 300, 100, 100, 300), 1.0),
        (box(100, 100, 200, 200), box(200, 100, 300, 200), 0.0),
        (poly(100, 100, 200, 100, 200, 200), poly(500, 500, 600, 500, 600, 600), 0.0),
    ],
)
def test_known_values(a, b, expected):
    assert mask_iou(a, b) == pytest.approx(expected, abs=1e-6)
    assert mask_iou(b, a) == mask_iou(a, b)


@pytest.mark.parametrize(
    "shape",
    [
        box(500, 500, 500, 500),
        box(500, 500, 501, 501),
        box(500, 100, 500, 900),
        poly(500, 500, 501, 500, 500, 501),
        poly(500, 500, 500, 500, 500, 500),
        poly(100, 100, 300, 300, 200, 200),
        poly(100, 100, 101, 900, 100, 900),
    ],
)
def test_small_shape_has_iou_one_with_itself(shape):
    assert mask_iou(shape, shape) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (box(500, 500, 502, 502), box(500, 500, 502, 501), 1 / 2),
        (box(500, 500, 502, 502), box(501, 500, 503, 502), 1 / 3),
        (box(500, 500, 502, 502), box(400, 400, 600, 600), 4 / 40000),
        (box(500, 500, 500, 500), box(400, 400, 600, 600), 0.0),
        (box(500, 500, 500, 500), box(500, 500, 500, 501), 0.0),
        (poly(500, 500, 502, 500, 502, 502), box(500, 500, 502, 502), 1 / 2),
        (poly(500, 500, 502, 502, 502, 500, 500, 502), box(500, 500, 502, 502), 1 / 2),
        (poly(500, 500, 502, 500, 500, 502), poly(500, 500, 502, 500, 502, 502), 1 / 3),
        (poly(500, 500, 500, 800, 500, 600), box(500, 500, 500, 800), 1.0),
        (poly(500, 500, 500, 800, 500, 600), box(500, 500, 500, 801), 0.0),
        (poly(7, 7, 7, 7, 7, 7), box(7, 7, 7, 7), 1.0),
        (poly(7, 7, 7, 7, 7, 7), box(7, 7, 7, 8), 0.0),
        (poly(10.2, 5.2, 20.2, 15.2, 15.2, 10.2), poly(10.8, 5.2, 20.8, 15.2, 15.8, 10.2), 0.0),
        (poly(10.2, 5.2, 20.2, 15.2, 15.2, 10.2), poly(20.2, 15.2, 10.2, 5.2, 10.2, 5.2), 1.0),
        (poly(0, 0, 5.5, 10, 10, 10), poly(0, 0, 5, 10, 10, 10), 45 / 50),
    ],
)
def test_shapes_without_a_raster_fall_back_to_exact_iou(a, b, expected):
    assert mask_iou(a, b) == pytest.approx(expected, abs=1e-12)
    assert mask_iou(b, a) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=120)
@given(boxes(BIN), boxes(BIN), st.sampled_from([256, 256, 256, 2, 64, 333]))
def test_boxes_equal_their_raster(a, b, resolution):
    mask_a, mask_b = raster(a, resolution), raster(b, resolution)
    if mask_a.any() and mask_b.any():
        assert mask_iou(a, b, resolution) == (mask_a & mask_b).sum() / (mask_a | mask_b).sum()
    assert mask_iou(a, b, resolution) == pytest.approx(mask_iou(as_poly(a), as_poly(b), resolution), abs=1e-12)


@settings(max_examples=80)
@given(st.lists(st.tuples(BIN, BIN), min_size=3, max_size=9), st.lists(st.tuples(BIN, BIN), min_size=3, max_size=9))
def test_iou_is_symmetric_bounded_and_one_with_itself(first, second):
    a, b = poly(*itertools.chain(*first)), poly(*itertools.chain(*second))
    assert mask_iou(a, a) == pytest.approx(1.0)
    assert 0.0 <= mask_iou(a, b) <= 1.0
    assert mask_iou(a, b) == pytest.approx(mask_iou(b, a), abs=1e-12)


@settings(max_examples=20)
@given(st.lists(st.tuples(BIN, BIN), min_size=3, max_size=7), st.lists(st.tuples(BIN, BIN), min_size=3, max_size=7))
def test_exact_fallback_agrees_with_a_fine_raster(first, second):
    a, b = poly(*itertools.chain(*first)), poly(*itertools.chain(*second))
    pycoco: Any = coco_mask  # declared for whole numbers only
    masks = [
        pycoco.decode(pycoco.frPyObjects([[4.0 * value for value in shape.bins]], 4000, 4000)[0]).astype(bool)
        for shape in (a, b)
    ]
    union = (masks[0] | masks[1]).sum()
    if union < 200_000:  # of 16 million: too thin for the raster to be a judge
        return
    expected = (masks[0] & masks[1]).sum() / union
    assert exact_iou(np.array(first), np.array(second)) == pytest.approx(expected, abs=0.02)


def test_shapes_of_one_point_overlap_only_at_that_point():
    here, there = np.full((3, 2), 100), np.full((3, 2), 102)
    assert exact_iou(here, here) == 1.0
    assert exact_iou(here, there) == exact_iou(there, here) == 0.0


@pytest.mark.parametrize("integer", [int, np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_whole_bins_of_every_integer_type_are_drawn_on_the_canvas(integer):
    shift = tuple(map(integer, (110, 100, 210, 200)))
    square = tuple(map(integer, (100, 100, 200, 100, 200, 200, 100, 200)))
    for shape in (GTObject("a", "bbox_2d", SQUARE), GTObject("a", "poly", square)):
        assert mask_iou(shape, GTObject("b", "bbox_2d", shift)) == pytest.approx(0.821429, abs=1e-6)
    (pair,) = match_objects([GTObject("a", "bbox_2d", shift)], [GTObject("b", "bbox_2d", SQUARE)]).pairs
    assert pair.iou == pytest.approx(0.821429, abs=1e-6)


def test_a_small_shape_that_is_written_again_and_again_is_compared_once(monkeypatch):
    compared = []
    monkeypatch.setattr("coordexp.geometry.exact_iou", lambda *rings: compared.append(rings) or exact_iou(*rings))
    again = [poly(500, 500, 501, 500, 501, 501)] * 100
    assert duplicate_indices([*again, poly(500, 500, 501, 500, 500, 501)]) == list(range(1, 100))
    assert len(compared) == 2


def test_canvas_of_one_pixel_is_refused():
    with pytest.raises(ValueError, match="1"):
        mask_iou(box(0, 0, 1, 1), box(0, 0, 1, 1), resolution=1)


def naive(a, b, resolution):
    """Both shapes drawn as polygons, pixel by pixel; the exact overlap where one of them draws nothing."""
    masks = [raster(shape, resolution) for shape in (a, b)]
    if not (masks[0].any() and masks[1].any()):
        return exact_iou(ring(a), ring(b))
    return (masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum()


# A coarse grid, so that shapes touch, coincide and vanish between the pixels often.
CORNER = st.sampled_from([0, 100, 101, 102, 200, 300, 500, 999])
SHAPES = st.lists(
    st.one_of(
        st.lists(st.tuples(CORNER, CORNER), min_size=3, max_size=5).map(lambda v: poly(*itertools.chain(*v))),
        boxes(CORNER),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80)
@given(SHAPES, SHAPES, st.sampled_from([256, 64, 7]))
def test_pairs_equal_counted_pixels(first, second, resolution):
    pairs = list(itertools.product(range(len(first)), range(len(second))))[::-1]
    found = mask_iou_pairs(first, second, np.array(pairs), resolution)
    expected = [naive(first[i], second[j], resolution) for i, j in pairs]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_hundreds_of_polygons_and_no_pairs():
    assert mask_iou_pairs([box(0, 0, 9, 9)], [], np.zeros((0, 2), dtype=int), 128).shape == (0,)
    shapes = [poly(x, y, x + 20, y, x + 20, y + 20) for x in range(0, 900, 50) for y in range(0, 900, 50)]
    assert len(shapes) > 300
    pairs = np.repeat(np.arange(len(shapes))[:, None], 2, axis=1)
    assert (mask_iou_pairs(shapes, shapes, pairs, 256) == 1.0).all()
