"""Average precision is pycocotools', number for number: every class, area range, threshold; and the files we write."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.evaluation.coco_results import (
    MAX_DETECTIONS,
    THRESHOLDS_T,
    AveragePrecision,
    IouType,
    average_precision,
    coco_shape,
    to_coco,
    with_constant_score,
    write_coco,
)
from coordexp.records import GTObject
from support.scored_answers import random_answers, with_soft

NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")
SQUARE = (100, 100, 400, 400)


def evaluated(truth: Any, found: Any, iou_type: Any, iou_thrs: Sequence[float]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(truth, found, iou_type)
        evaluation.params.iouThrs = np.array(iou_thrs)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def assert_pycocotools(
    answers: Sequence[ImageAnswer], iou_type: IouType = "bbox", iou_thrs: Sequence[float] = tuple(THRESHOLDS_T)
) -> AveragePrecision:
    data = copy.deepcopy(to_coco(answers, iou_type))
    with contextlib.redirect_stdout(io.StringIO()):
        truth: Any = COCO()
        found: Any = COCO()
        truth.dataset = data.ground_truth
        truth.createIndex()
        if data.results:
            found = truth.loadRes(data.results)
        else:  # loadRes takes no empty list
            found.dataset = {**truth.dataset, "annotations": []}
            found.createIndex()
    expected = evaluated(truth, found, iou_type, iou_thrs)
    precision_TRKA, recall_TKA = expected.eval["precision"][..., -1], expected.eval["recall"][..., -1]

    def mean(values: np.ndarray) -> float | None:
        return float(values[values > -1].mean()) if (values > -1).any() else None

    ours = average_precision(answers, iou_type, iou_thrs)
    assert ours.figures.get("AP") == pytest.approx(mean(precision_TRKA[..., 0]), abs=1e-9)
    assert ours.figures.get("AR100") == pytest.approx(mean(recall_TKA[..., 0]), abs=1e-9)
    for a, name in enumerate(expected.params.areaRngLbl[1:], start=1):
        assert ours.figures.get(f"AP_{name}") == pytest.approx(mean(precision_TRKA[..., a]), abs=1e-9), name
    for k, category in enumerate(data.ground_truth["categories"]):
        precision_TR = ours.precision_of.get(category["name"], np.full(precision_TRKA.shape[:2], -1.0))
        np.testing.assert_allclose(precision_TR, precision_TRKA[:, :, k, 0], atol=1e-9)
    return ours


def answered(
    truth: Sequence[tuple[str, tuple[int, ...]]],
    found: Sequence[tuple[str, tuple[int, ...], float | None]],
    name: str = "s",
    size: tuple[int, int] = (1000, 1000),
) -> ImageAnswer:
    def kind(bins: tuple[int, ...]) -> Any:
        return "bbox_2d" if len(bins) == 4 else "poly"

    return ImageAnswer(
        name, "a.png", *size,
        tuple(GTObject(desc, kind(bins), bins) for desc, bins in truth),
        tuple(ScoredObject(desc, kind(bins), bins, score) for desc, bins, score in found),
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


def test_only_the_hundred_highest_scores_count() -> None:
    (answer,) = CASES["more than a hundred of a class"]
    assert assert_pycocotools([answer], iou_thrs=[0.5]).figures["AR100"] == pytest.approx(MAX_DETECTIONS / 150)


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("seed", range(2))
def test_random_answers_in_all_area_ranges(iou_type: IouType, seed: int) -> None:
    figures = assert_pycocotools(random_answers(25, seed), iou_type).figures
    assert {*NAMES, "AR100"} == figures.keys() and 0.05 < figures["AP"] < 0.95
    assert_pycocotools(with_soft(random_answers(25, seed), seed), iou_type)


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
def test_metrics_equal_pycocotools_on_our_files(tmp_path: Path, iou_type: IouType, capsys) -> None:
    answers = random_answers(25, 1)
    truth_file, *_, results_file = write_coco(answers, tmp_path, segm=iou_type == "segm")
    truth: Any = COCO(str(truth_file))
    evaluation = evaluated(truth, truth.loadRes(str(results_file)), iou_type, THRESHOLDS_T.tolist())
    evaluation.summarize()
    expected = dict(zip(NAMES, evaluation.stats[:6].tolist(), strict=True)) | {"AR100": evaluation.stats[8]}
    capsys.readouterr()
    figures = average_precision(answers, iou_type).figures
    assert capsys.readouterr().out == ""
    assert figures == pytest.approx({k: v for k, v in expected.items() if v > -1}, abs=1e-9)


def test_soft_objects_are_crowds() -> None:
    (answer,) = CASES["a class that is annotated and never found"]
    assert answer.gt is not None
    a, b = answer.gt
    soft = replace(b, soft=0.3)
    alone = average_precision([replace(answer, gt=(a,))]).figures
    assert average_precision([replace(answer, gt=(a, soft))]).figures == alone != average_precision([answer]).figures
    twice = (*answer.pred, ScoredObject("b", "bbox_2d", SQUARE, 0.9), ScoredObject("b", "bbox_2d", shifted(9), 0.8))
    assert average_precision([replace(answer, gt=(a, soft), pred=twice)]).figures == alone
    data = to_coco([replace(answer, gt=(a, soft))])
    assert [annotation["iscrowd"] for annotation in data.ground_truth["annotations"]] == [0, 1]
    assert average_precision([replace(answer, gt=(soft,))]).figures == {}


@pytest.mark.parametrize(
    ("kind", "bins", "box", "area"),
    [
        ("bbox_2d", (100, 200, 400, 300), [100, 200, 300, 100], 30_000),
        ("poly", (100, 200, 400, 200, 100, 300), [100, 200, 300, 100], 15_000),
        ("bbox_2d", (100, 200, 100, 300), [100, 200, 0.5, 100], 50),  # COCO finds no box without area
        ("bbox_2d", (100, 0.5, 100.25, 4), [100, 0.5, 0.25, 3.5], 0.875),  # in answers of tiles it may be thinner
    ],
)
def test_shapes_in_pixels(kind: Any, bins: tuple[float, ...], box: list[float], area: float) -> None:
    answer = ImageAnswer("a", "a.png", 999, 999, None, ())
    shape = coco_shape(ScoredObject("cat", kind, bins), answer)
    assert shape["bbox"] == pytest.approx(box) and shape["area"] == pytest.approx(area)


def test_classes_are_those_of_the_annotations_and_each_has_one_number(tmp_path: Path) -> None:
    truth = (GTObject("dog", "bbox_2d", SQUARE), GTObject("cat", "bbox_2d", SQUARE))
    answers = [ImageAnswer("a", "a.png", 999, 999, truth, (ScoredObject("ant", "bbox_2d", SQUARE, 0.5, 0.5),))]
    names = [(one["id"], one["name"]) for one in to_coco(answers).ground_truth["categories"]]
    assert names == [(1, "cat"), (2, "dog"), (3, "(not in the class list)")]
    (file, _) = write_coco(answers, tmp_path, classes=("cat", "bee"))
    written = [(one["id"], one["name"]) for one in json.loads(file.read_text())["categories"]]
    assert written == [(1, "cat"), (2, "bee"), (3, "dog"), (4, "(not in the class list)")]


def test_masks_of_earlier_answers_are_removed_where_there_are_none_now(tmp_path: Path) -> None:
    answers = random_answers(3, 1)
    names = ["coco_ground_truth.json", "coco_results_bbox.json", "coco_results_segm.json"]
    assert [path.name for path in write_coco(answers, tmp_path, segm=True)] == names
    assert [path.name for path in write_coco(answers, tmp_path)] == names[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == names[:2]


def test_custom_thresholds() -> None:
    answers = random_answers(20, 4)
    assert_pycocotools(answers, iou_thrs=[0.3, 0.75, 1.0])
    figures = average_precision(answers, iou_thrs=[0.75, 0.3]).figures
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


@settings(max_examples=40)
@given(st.lists(ANSWERS, min_size=1, max_size=4), st.sampled_from(("bbox", "segm")), st.data())
def test_any_answers(answers: list[ImageAnswer], iou_type: IouType, data: st.DataObject) -> None:
    """Coarse bins and three scores: shapes coincide, compete and tie all the time; some are soft."""
    answers = [replace(a, gt=tuple(replace(o, soft=data.draw(SOFT)) for o in a.gt or ())) for a in answers]
    if any(answer.gt for answer in answers):
        assert_pycocotools(answers, iou_type)


def test_no_score_no_average_precision() -> None:
    unscored = answered([("a", SQUARE)], [("a", SQUARE, None)])
    with pytest.raises(DataError, match="--constant-score"):
        average_precision([unscored])
    assert average_precision(with_constant_score([unscored], 1.0)).figures["AP"] == pytest.approx(1)
