"""Average precision is pycocotools', number for number: every class, area range, threshold and recall."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coordexp.evaluation import Detection, ImageAnswer
from coordexp.evaluation.average_precision import AREAS, MAX_DETECTIONS, THRESHOLDS_T, class_curves
from coordexp.evaluation.coco import CocoData, coco_figures, to_coco
from coordexp.records import GTObject
from support.scored_answers import random_answers, with_soft

IouType = Literal["bbox", "segm"]

SQUARE = (100, 100, 400, 400)


def pycocotools(data: CocoData, iou_type: IouType, iou_thrs: Sequence[float]) -> Any:
    """Its evaluation, from scratch."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth: Any = COCO()
        truth.dataset = copy.deepcopy(data.ground_truth)
        truth.createIndex()
        if data.results:
            found: Any = truth.loadRes(copy.deepcopy(data.results))
        else:  # loadRes takes no empty list
            found: Any = COCO()
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
        evaluation = COCOeval(truth, found, iou_type)
        evaluation.params.iouThrs = np.array(iou_thrs)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def assert_pycocotools(answers: Sequence[ImageAnswer], iou_type: IouType = "bbox", iou_thrs: Any = THRESHOLDS_T) -> Any:
    data = to_coco(answers, "segm" if iou_type == "segm" else "bbox")
    expected = pycocotools(data, iou_type, iou_thrs)
    precision_TRKA = expected.eval["precision"][..., -1]
    recall_TKA = expected.eval["recall"][..., -1]
    curves = class_curves(data.ground_truth, data.results, iou_type, np.array(iou_thrs))
    assert list(curves) == list(AREAS) == expected.params.areaRngLbl
    for a, area in enumerate(curves):
        for k, curve in enumerate(curves[area]):
            precision_TR, recall_T = curve.precision_TR(), curve.recall_T()
            if precision_TR is None or recall_T is None:  # pycocotools writes -1 where there is no object
                assert (precision_TRKA[:, :, k, a] == -1).all() and (recall_TKA[:, k, a] == -1).all()
                continue
            np.testing.assert_array_equal(precision_TR, precision_TRKA[:, :, k, a], f"{area}, class {k}")
            np.testing.assert_array_equal(recall_T, recall_TKA[:, k, a], f"{area}, class {k}")
    return expected


def answered(
    truth: Sequence[tuple[str, tuple[int, ...]]],
    found: Sequence[tuple[str, tuple[int, ...], float]],
    name: str = "s",
    size: tuple[int, int] = (1000, 1000),
) -> ImageAnswer:
    def kind(bins: tuple[int, ...]) -> Any:
        return "bbox_2d" if len(bins) == 4 else "poly"

    return ImageAnswer(
        name, "a.png", *size,
        tuple(GTObject(desc, kind(bins), bins) for desc, bins in truth),
        tuple(Detection(desc, kind(bins), bins, score) for desc, bins, score in found),
    )  # fmt: skip


def shifted(by: int, bins: tuple[int, ...] = SQUARE) -> tuple[int, ...]:
    return tuple(k + by for k in bins)


CASES = {
    "nothing found": [answered([("a", SQUARE)], [])],
    "nothing there in one image": [answered([("a", SQUARE)], [("a", SQUARE, 0.5)]), answered([], [("a", SQUARE, 0.9)])],
    "a class that is annotated and never found": [answered([("a", SQUARE), ("b", SQUARE)], [("a", SQUARE, 0.5)])],
    "a class that is found and never annotated": [answered([("a", SQUARE)], [("b", SQUARE, 0.9), ("a", SQUARE, 0.5)])],
    "equal scores in several images": [
        answered([("a", SQUARE)], [("a", shifted(40 * i), 0.5), ("a", shifted(-30), 0.5)], f"s{i}") for i in range(5)
    ],
    "three detections compete for two objects": [
        answered(
            [("a", SQUARE), ("a", shifted(40))],
            [("a", shifted(20), 0.9), ("a", shifted(10), 0.8), ("a", shifted(45), 0.7)],
        )
    ],
    "equally good objects": [answered([("a", SQUARE), ("a", SQUARE)], [("a", SQUARE, 0.9), ("a", shifted(3), 0.9)])],
    "overlaps exactly at thresholds": [  # 300 x 300 within 300 x 600, 400 and so on
        answered([("a", (0, 0, 300, side))], [("a", (0, 0, 300, 300), 0.5)], f"s{side}")
        for side in (600, 500, 400, 375)
    ],
    "more than a hundred of a class": [
        answered(
            [("a", shifted(5 * i, (0, 0, 30, 30))) for i in range(150)],
            [("a", shifted(5 * i, (0, 0, 30, 30)), round(1 - i / 150, 2)) for i in range(150)],
        )
    ],
    "small, medium and large, some across the line": [  # pixels: 1 bin is 0.4 or 0.2 pixels of 400 or 200
        answered(
            [("a", shifted(100, (0, 0, side, side))) for side in (40, 79, 80, 81, 239, 240, 241, 600)],
            [
                ("a", shifted(100 + side // 20, (0, 0, side, side)), side / 1000)
                for side in (41, 78, 82, 90, 238, 250, 620)
            ],
            f"s{size}",
            (size, size),
        )
        for size in (200, 400, 1000)
    ],
    "an object within the area range goes before a better one outside": [
        answered(
            [("a", (0, 0, 320, 100)), ("a", (0, 0, 330, 98))],
            [("a", (0, 0, 328, 98), 0.9), ("a", (0, 0, 320, 100), 0.3)],
            size=(320, 1000),
        )
    ],
    "no area at all": [answered([("a", (5, 5, 5, 9))], [("a", (5, 5, 5, 9), 0.5), ("a", (5, 5, 5, 5), 0.4)])],
}  # fmt: skip


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("name", CASES)
def test_rules_of_the_evaluation(name: str, iou_type: IouType) -> None:
    assert_pycocotools(CASES[name], iou_type)


def test_only_the_hundred_surest_count() -> None:
    (answer,) = CASES["more than a hundred of a class"]
    evaluation = assert_pycocotools([answer])
    assert evaluation.eval["recall"][0, 0, 0, -1] == pytest.approx(MAX_DETECTIONS / 150)


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(3))
def test_random_answers_in_all_area_ranges(iou_type: IouType, seed: int) -> None:
    evaluation = assert_pycocotools(random_answers(25, seed), iou_type)
    assert (evaluation.eval["precision"][:, :, :, :, -1] > 0).any(axis=(0, 1, 2)).all(), "every area range has a say"
    assert_pycocotools(with_soft(random_answers(25, seed), seed), iou_type)


def test_soft_objects_are_crowds() -> None:
    (answer,) = CASES["a class that is annotated and never found"]
    assert answer.gt is not None
    a, b = answer.gt
    soft = replace(b, soft=0.3)
    alone = coco_figures([replace(answer, gt=(a,))]).figures
    assert coco_figures([replace(answer, gt=(a, soft))]).figures == alone != coco_figures([answer]).figures
    twice = (*answer.pred, Detection("b", "bbox_2d", SQUARE, 0.9), Detection("b", "bbox_2d", shifted(9), 0.8))
    assert coco_figures([replace(answer, gt=(a, soft), pred=twice)]).figures == alone
    data = to_coco([replace(answer, gt=(a, soft))])
    assert [annotation["iscrowd"] for annotation in data.ground_truth["annotations"]] == [0, 1]
    assert coco_figures([replace(answer, gt=(soft,))]).figures == {}


def test_thresholds_of_ones_own() -> None:
    answers = random_answers(20, 4)
    assert_pycocotools(answers, iou_thrs=[0.3, 0.75, 1.0])
    figures = coco_figures(answers, iou_thrs=[0.75, 0.3]).figures
    assert "AP75" in figures and "AP50" not in figures


BINS = st.integers(0, 12).map(lambda k: 60 * k)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[int, ...]:
    (x1, x2), (y1, y2) = (sorted((draw(BINS), draw(BINS))) for _ in "xy")
    return x1, y1, x2, y2


SOFT = st.sampled_from((None, None, 0.5))
OBJECTS = st.tuples(st.sampled_from("ab"), st.one_of(boxes(), st.lists(BINS, min_size=6, max_size=6).map(tuple)))
FOUND = st.tuples(OBJECTS, st.sampled_from((0.1, 0.5, 0.9))).map(lambda pair: (*pair[0], pair[1]))
SIDES = st.sampled_from((1, 30, 150, 800))
ANSWERS = st.builds(answered, st.lists(OBJECTS, max_size=6), st.lists(FOUND, max_size=9), size=st.tuples(SIDES, SIDES))


@settings(max_examples=150, deadline=None)
@given(st.lists(ANSWERS, min_size=1, max_size=4), st.sampled_from(("bbox", "segm")), st.data())
def test_any_answers(answers: list[ImageAnswer], iou_type: IouType, data: st.DataObject) -> None:
    """Coarse bins and three scores: shapes coincide, compete and tie all the time; some are soft."""
    answers = [replace(a, gt=tuple(replace(o, soft=data.draw(SOFT)) for o in a.gt or ())) for a in answers]
    if any(answer.gt for answer in answers):
        assert_pycocotools(answers, iou_type)
