"""Answers of tiles, merged. An oracle stands in for the model: it writes exactly what a tile shows of the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordexp.data.polygons import clipped_shape, shape_area
from coordexp.data.tiles import Tiling
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, from_line, to_line
from coordexp.evaluation.coco_results import average_precision
from coordexp.evaluation.detection import count_image
from coordexp.evaluation.join_tiles import merge_tiles
from coordexp.evaluation.several_answers import merge_answers
from coordexp.geometry import mask_iou, pixel_box, pixel_ring, to_bin
from coordexp.records import GeometryKind, GTObject, ImageRecord

Truth = tuple[str, GeometryKind, tuple[float, ...]]  # name, kind, points in pixels


def oracle_answers(size: tuple[int, int], truth: Sequence[Truth], tiling: Tiling, least: float) -> list[ImageAnswer]:
    """In each tile all objects of which it shows more than ``least`` of the area, in the tile's own bins."""
    answers = []
    for window in tiling.windows(*size):
        sides = window[2] - window[0], window[3] - window[1]
        pred = []
        for name, kind, points in truth:
            part, share = clipped_shape(kind, points, window)
            if share > least:
                bins = tuple(to_bin(x - window[at % 2], sides[at % 2]) for at, x in enumerate(part))
                pred.append(ScoredObject(name, kind, bins, share, share))
        answers.append(ImageAnswer("t", "t.png", *sides, None, tuple(pred), num_tokens=10))
    return answers


def photograph(size: tuple[int, int], *objects: GTObject) -> ImageRecord:
    return ImageRecord("photo", Path("photo.png"), *size, objects)


def merged(size: tuple[int, int], truth: Sequence[Truth], tiling: Tiling, least: float = 0.0) -> ImageAnswer:
    return merge_tiles(photograph(size), tiling, oracle_answers(size, truth, tiling, least))


def mosaic(seed: int, size: tuple[int, int], sides: tuple[int, int], count: int) -> list[Truth]:
    """Boxes of two names at random places, in whole pixels; two of one name do not touch."""
    rng = np.random.default_rng(seed)
    found: list[Truth] = []
    for _ in range(60 * count):
        w, h = (int(side) for side in rng.integers(*sides, 2))
        x, y = int(rng.integers(0, size[0] - w)), int(rng.integers(0, size[1] - h))
        name = ("cell", "plate")[int(rng.integers(2))]
        if all(other != name or x >= c + 4 or a >= x + w + 4 or y >= d + 4 or b >= y + h + 4
               for other, _, (a, b, c, d) in found):  # fmt: skip
            found.append((name, "bbox_2d", (x, y, x + w, y + h)))
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize(
    ("size", "tiling", "sides", "least"),
    [
        ((2000, 1500), Tiling(512, 512, 0.2), (6, 100), 0.0),  # each is whole in some tile
        ((2000, 1500), Tiling(512, 512, 0.2), (6, 100), 0.3),  # and small parts are not written
        ((2000, 1500), Tiling(512, 384, 0.3), (6, 60), 0.1),
        ((1500, 2000), Tiling(256, 256, 0.2), (20, 700), 0.0),  # larger than the overlap, and than a tile
        ((1501, 997), Tiling(256, 256, 0.05), (10, 300), 0.0),
        ((400, 300), Tiling(512, 512, 0.2), (6, 60), 0.0),  # smaller than a tile
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_a_mosaic_is_found_exactly_none_lost_none_doubled(
    size: tuple[int, int], tiling: Tiling, sides: tuple[int, int], least: float, seed: int
) -> None:
    truth = mosaic(seed, size, sides, 120)
    answer = merged(size, truth, tiling, least)
    found = [(obj.desc, pixel_box(obj, *size)) for obj in answer.pred]
    a_bin = max(tiling.width, tiling.height) / 999
    assert len(truth) > 30 or max(sides) > 200
    assert len(answer.pred) == len(truth)
    for name, _, box in truth:
        away = [max(abs(a - b) for a, b in zip(one, box, strict=True)) for desc, one in found if desc == name]
        assert sum(far <= a_bin for far in away) == 1, (name, box)


def test_without_overlap_objects_are_joined_at_the_border() -> None:
    truth: list[Truth] = [
        ("cell", "bbox_2d", (480, 100, 560, 160)),
        ("cell", "bbox_2d", (470, 300, 511, 340)),
        ("cell", "bbox_2d", (100, 500, 140, 530)),
        ("plate", "bbox_2d", (300, 200, 700, 900)),  # in all four tiles
    ]
    answer = merged((1024, 1024), truth, Tiling(512, 512, 0.0))
    boxes = [pixel_box(obj, 1024, 1024) for obj in answer.pred]
    assert sorted(boxes) == [pytest.approx(box, abs=512 / 999) for _, _, box in sorted(truth, key=lambda one: one[2])]


def test_neighbours_at_a_border_stay_two_objects() -> None:
    truth: list[Truth] = [("cell", "bbox_2d", (400, 100, 470, 160)), ("cell", "bbox_2d", (471, 100, 540, 160))]
    answer = merged((922, 512), truth, Tiling(512, 512, 0.2))
    assert len(answer.pred) == 2


def test_predictions_of_one_tile_are_not_joined() -> None:
    twice = (ScoredObject("cell", "bbox_2d", (10, 10, 50, 50)), ScoredObject("cell", "bbox_2d", (10, 10, 50, 50)))
    answers = [ImageAnswer("t", "t", 512, 512, None, twice)]
    assert len(merge_tiles(photograph((512, 512)), Tiling(512, 512), answers).pred) == 2


@pytest.mark.parametrize("of_tile", [1, 3])
def test_entries_of_tiles_are_counted_in_each_of_them(of_tile: int) -> None:
    """Half of the entries are bad; the object that both tiles see counted as one good entry of three."""
    truth: list[Truth] = [("cell", "bbox_2d", (450, 100, 500, 160))]
    tiles = oracle_answers((922, 512), truth, Tiling(512, 512, 0.2), 0.0)
    tiles = [merge_answers([replace(one, dropped={"bad": 1})] * of_tile) for one in tiles]
    answer = merge_tiles(photograph((922, 512)), Tiling(512, 512, 0.2), tiles)
    assert (len(answer.pred), answer.num_valid, answer.num_dropped) == (1, 2 * of_tile, 2 * of_tile)
    assert from_line(to_line(answer)).num_valid == 2 * of_tile


def test_a_polygon_cut_by_a_border_is_one_polygon_of_the_same_area() -> None:
    diamond = (512.0, 100.0, 700.0, 300.0, 512.0, 500.0, 324.0, 300.0)
    answer = merged((922, 512), [("leaf", "poly", diamond)], Tiling(512, 512, 0.2))
    (leaf,) = answer.pred
    ring = [x for point in pixel_ring(leaf, 922, 512) for x in point]
    assert leaf.kind == "poly" and shape_area("poly", ring) == pytest.approx(shape_area("poly", diamond), rel=0.005)


def test_a_polygon_that_some_tile_shows_whole_is_that_tiles() -> None:
    triangle = (440.0, 100.0, 500.0, 160.0, 430.0, 160.0)
    (leaf,) = merged((922, 512), [("leaf", "poly", triangle)], Tiling(512, 512, 0.2)).pred
    ring = [x for point in pixel_ring(leaf, 922, 512) for x in point]
    assert ring == pytest.approx(triangle, abs=512 / 999)


def test_counts_add_up_and_scores_are_the_highest() -> None:
    truth: list[Truth] = [("cell", "bbox_2d", (380, 100, 500, 160))]
    answer = merged((922, 512), truth, Tiling(512, 512, 0.2))
    assert (answer.num_tokens, answer.pred[0].score, answer.tiling) == (20, 1.0, Tiling(512, 512, 0.2))


def test_fractions_of_bins_survive_the_file() -> None:
    answer = merged((4000, 3000), mosaic(0, (4000, 3000), (6, 60), 20), Tiling(512, 512))
    assert from_line(to_line(answer)) == answer
    assert any(k != int(k) for obj in answer.pred for k in obj.bins)


def test_small_objects_of_a_large_photograph_are_evaluated_exactly() -> None:
    size = (9990, 9990)  # a bin is ten pixels, a pixel of the canvas of mask IoU 39
    truth: list[Truth] = [
        ("cell", "bbox_2d", (10.0 * x, 10.0 * y, 10.0 * x + 20, 10.0 * y + 20))
        for x in range(3, 900, 31)
        for y in range(5, 900, 311)
    ]
    annotated = [GTObject(name, "bbox_2d", tuple(round(x / 10) for x in box)) for name, _, box in truth]
    tiling = Tiling(512, 512, 0.2)
    record = photograph(size, *annotated)
    answer = merge_tiles(record, tiling, oracle_answers(size, truth, tiling, 0.1))
    counts = count_image(answer, 0.9).counts
    assert (counts["gt"], counts["pred"], counts["matched"], counts["duplicates"]) == (87, 87, 87, 0)
    assert average_precision([answer]).figures["AP"] == pytest.approx(1.0)


def test_mask_iou_of_fractions_of_bins_is_exact() -> None:
    square = ScoredObject("x", "poly", (0.25, 0.25, 0.75, 0.25, 0.75, 0.75, 0.25, 0.75))
    box = ScoredObject("x", "bbox_2d", (0.25, 0.25, 1.25, 0.75))
    assert mask_iou(square, box) == pytest.approx(0.5) and mask_iou(square, square) == 1.0
    assert mask_iou(box, GTObject("x", "bbox_2d", (0, 0, 1, 1))) == pytest.approx(1 / 3)


def test_the_problem_of_an_answer_counts_its_tiles() -> None:
    answers = [ImageAnswer("t", "t", 512, 512, None, (), truncated=cut, num_tokens=9) for cut in (False, True)]
    problem = merge_tiles(photograph((922, 512)), Tiling(512, 512), answers).problem
    assert problem is not None and "2 tiles" in problem and "cut off" in problem
