"""Average precision: pycocotools' own, from the files we write, and on resamples of the images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coordexp.errors import DataError
from coordexp.evaluation import Detection, ImageAnswer
from coordexp.evaluation.coco import coco_figures, resampled_ap, to_coco
from coordexp.evaluation.summary import write_coco
from coordexp.records import GTObject
from support.answers import CAT, DOG, LEAF
from support.scored_answers import random_answers

NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


def answered(truth: list[GTObject], found: list[GTObject], score: float | None = 0.9, name: str = "s") -> ImageAnswer:
    pred = tuple(Detection(obj.desc, obj.kind, obj.bins, score) for obj in found)
    return ImageAnswer(name, "a.png", 640, 480, tuple(truth), pred)


@pytest.mark.parametrize("iou_type", ["bbox", "segm"])
@pytest.mark.parametrize("seed", [1, 2])
def test_figures_are_pycocotools_on_the_files_we_write(tmp_path: Path, iou_type, seed, capsys) -> None:
    answers = random_answers(25, seed)
    truth_file, results_file = write_coco(answers, tmp_path, iou_type, None)
    truth = COCO(str(truth_file))
    evaluation = COCOeval(truth, truth.loadRes(str(results_file)), iou_type)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    expected = dict(zip(NAMES, evaluation.stats[:6].tolist(), strict=True)) | {"AR100": evaluation.stats[8]}
    capsys.readouterr()
    figures = coco_figures(answers, iou_type)
    assert capsys.readouterr().out == ""
    assert figures.figures == pytest.approx({k: v for k, v in expected.items() if v > -1}, abs=1e-6)
    assert 0.05 < figures.figures["AP"] < 0.95
    assert resampled_ap(figures.curves, np.ones(25, dtype=int)) == pytest.approx(figures.figures["AP"], abs=1e-9)


def test_a_resample_is_the_evaluation_of_those_images() -> None:
    answers = random_answers(12, 5)
    weights = np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12))
    drawn = [replace(a, sample_id=f"{i}-{k}") for i, a in enumerate(answers) for k in range(weights[i])]
    whole = coco_figures(answers)
    # Equal scores of one image stand together in a resample, so copies of an image may come in another order.
    assert resampled_ap(whole.curves, weights) == pytest.approx(coco_figures(drawn).figures["AP"], abs=0.01)


@pytest.mark.parametrize(
    ("truth", "found", "ap"),
    [
        ([CAT, DOG, LEAF], [CAT, DOG, LEAF], 1.0),
        ([CAT], [DOG], 0.0),
        ([CAT], [], 0.0),
        ([CAT, DOG], [CAT], 0.5),  # a class that is never found counts as 0
        ([CAT, CAT], [CAT], 0.5049504950495049),  # recall 0.5: 51 of 101 points
        ([GTObject("dot", "bbox_2d", (5, 5, 5, 9))], [GTObject("dot", "bbox_2d", (5, 5, 5, 9))], 1.0),  # thin, equal
    ],
)
def test_known_cases(truth, found, ap) -> None:
    assert coco_figures([answered(truth, found)]).figures["AP"] == pytest.approx(ap)


def test_scores_order_the_detections() -> None:
    wrong = GTObject("black cat", "bbox_2d", (700, 700, 900, 900))
    sure = answered([CAT], [], name="a"), answered([CAT], [CAT], 0.9, "b")
    good = [replace(sure[0], pred=(Detection(wrong.desc, wrong.kind, wrong.bins, 0.1),)), sure[1]]
    bad = [replace(sure[0], pred=(Detection(wrong.desc, wrong.kind, wrong.bins, 0.99),)), sure[1]]
    assert coco_figures(good).figures["AP"] > coco_figures(bad).figures["AP"]


def test_no_score_no_average_precision() -> None:
    with pytest.raises(DataError, match=r"'black cat' has no score.*--constant-score"):
        coco_figures([answered([CAT], [CAT], None)])
    assert coco_figures([answered([CAT], [CAT], None)], constant_score=1.0).figures["AP"] == pytest.approx(1)


def test_nothing_annotated_has_no_average_precision() -> None:
    assert coco_figures([answered([], [CAT])]).figures == {}


def test_results_are_json_that_other_tools_read() -> None:
    data = to_coco([answered([CAT, LEAF], [CAT, LEAF])], "segm")
    assert json.loads(json.dumps(data.results))[1]["segmentation"]["size"] == [480, 640]
    box = to_coco([answered([CAT], [CAT])]).results[0]["bbox"]
    x1, y1, x2, y2 = CAT.bins
    assert box == pytest.approx([x1 * 639 / 999, y1 * 479 / 999, (x2 - x1) * 639 / 999, (y2 - y1) * 479 / 999])
