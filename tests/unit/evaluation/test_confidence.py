"""Confidences: calibration, thresholds, and their way from ``evaluate --calibrate`` to predictions and exports."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordexp.checkpoints.card import CARD, Calibration, read_card
from coordexp.config.rollout import EvalDetectionConfig
from coordexp.data.files import asset
from coordexp.data.scenes import SPECS, write_scenes
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, read_answers, write_answers
from coordexp.evaluation.confidence import ALL, at_least, best_thresholds, calibrated, fit, reliability
from coordexp.evaluation.detection import count_image, detection_metrics, sum_counts
from coordexp.evaluation.summary import COUNTS_ONLY, summarise, summary_tables
from coordexp.records import GTObject
from support.cli_runs import Cli
from support.scored_answers import random_answers, with_soft

BOX, ELSEWHERE = (100, 100, 300, 300), (600, 600, 900, 900)


def answer(number: int, raw: float, is_right: bool) -> ImageAnswer:
    pred = ScoredObject("cat", "bbox_2d", BOX if is_right else ELSEWHERE, raw, raw)
    return ImageAnswer(f"s{number}", "a.png", 10, 10, (GTObject("cat", "bbox_2d", BOX),), (pred,))


def with_confidences(answers: list[ImageAnswer]) -> list[ImageAnswer]:
    return [replace(one, pred=tuple(replace(o, confidence=o.score) for o in one.pred)) for one in answers]


def test_a_fitted_confidence_is_the_share_of_right_predictions() -> None:
    """Raw confidences are far too low, as those of a model trained with blurred targets."""
    rng = np.random.default_rng(0)
    raw_N, truth = rng.uniform(0.02, 0.5, 1500), Calibration(1.5, 2.0)
    answers = [answer(n, float(raw), bool(rng.random() < truth(float(raw)))) for n, raw in enumerate(raw_N)]
    found = fit(answers, "val.jsonl")
    assert (found.slope, found.intercept) == pytest.approx((truth.slope, truth.intercept), abs=0.3)
    assert (found.objects, found.data) == (1500, "val.jsonl")
    before, after = reliability(answers), reliability(calibrated(answers, found))
    assert max(abs(row.confidence - row.right) for row in after) < 0.1
    assert max(abs(row.confidence - row.right) for row in before) > 0.3


@pytest.mark.parametrize("answers", [[answer(n, 0.5, True) for n in range(50)], [answer(0, 0.5, False)]])
def test_a_calibration_needs_right_and_wrong_predictions(answers: list[ImageAnswer]) -> None:
    with pytest.raises(DataError, match=r"val\.jsonl"):
        fit(answers, "val.jsonl")


def test_thresholds_have_the_best_f1_of_all() -> None:
    """Against every threshold tried; a class's figures are those of its objects."""
    answers = with_confidences(with_soft(random_answers(8, 3), 1))
    rows = {row.name: row for row in best_thresholds(answers)}
    f1_of: dict[str, dict[float, float]] = {name: {} for name in rows}
    for least in {obj.confidence or 0.0 for one in answers for obj in one.pred}:
        counted = [count_image(one) for one in at_least(answers, least)[0]]
        for name, f1 in f1_of.items():
            parts = [one.counts if name == ALL else one.by_desc.get(name, {}) for one in counted]
            f1[least] = detection_metrics(sum_counts(parts))["f1"]
    for name, row in rows.items():
        assert row.f1 == pytest.approx(f1_of[name][row.confidence]), name
        assert row.f1 > max(f1_of[name].values()) - 0.02, name
    assert next(iter(rows)) == ALL and len(rows) == 5
    assert best_thresholds(random_answers(5, 3)) == [], "without confidences there is nothing to say"


def test_thresholds_are_of_the_iou_that_figures_are_of() -> None:
    near = ScoredObject("cat", "bbox_2d", (100, 100, 300, 250), 0.4, 0.4)  # IoU 0.75
    answers = [answer(0, 0.9, True), replace(answer(1, 0.4, True), pred=(near,))]
    for iou, threshold, f1 in ((0.5, 0.4, 1.0), (0.9, 0.9, 2 / 3)):
        options = EvalDetectionConfig(metrics="f1ish", f1ish_iou_thrs=(iou,))
        found = summarise(answers, options, with_confidences=True).thresholds[0]
        assert (found.confidence, found.f1) == (threshold, pytest.approx(f1))


def test_a_threshold_as_it_is_shown_has_its_figures() -> None:
    """Rounded up, it left out its own object."""
    answers = [answer(0, 0.45678, True), answer(1, 0.12345, False)]
    row = best_thresholds(answers)[0]
    assert (row.confidence, row.precision, row.recall) == (0.4567, 1.0, 0.5)
    assert [len(one.pred) for one in at_least(answers, row.confidence)[0]] == [1, 0]
    shown = list(summary_tables(summarise(answers, COUNTS_ONLY, with_confidences=True), "figures"))[-1]
    assert list(shown.columns[1].cells) == ["0.4567", "0.4567"]


def test_from_evaluate_to_predictions_and_exports(tmp_path: Path, cli: Cli) -> None:
    model, data = tmp_path / "model", write_scenes(tmp_path / "data", 9, SPECS["moderate"], 5)
    shutil.copytree(asset("checkpoints/demo-stage1"), model)
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({
        "model": {"model": str(model), "dtype": "float32"},
        "template": {"prompt": "Detect every object."},
        "custom": {"train_jsonl": str(data), "val_jsonl": str(data)},
        "training": {"output_dir": str(tmp_path / "out"), "max_steps": 1, "use_cpu": True},
        "global_max_length": 2048,
    }))  # fmt: skip
    (tmp_path / "aliases.yaml").write_text("red circle: [red square]\n")
    aliases = ("--aliases", tmp_path / "aliases.yaml")
    done = cli("evaluate", run, "--calibrate", *aliases, "--out", tmp_path / "figures")
    assert done.code == 0 and "the calibration counts them by their new names" in " ".join(done.out.split()), done.out
    assert str(model / CARD) in done.out and "confidence ≥" in done.out
    evaluated = read_answers(tmp_path / "figures")
    calibration = read_card(model).calibration
    assert calibration is not None and calibration.objects >= 20
    figures = json.loads((tmp_path / "figures" / "metrics.json").read_text())
    best = figures["thresholds"][0]
    assert best["name"] == ALL and best["f1"] >= figures["metrics"]["f1"] - 0.02

    least = f"{best['confidence'] + 0.001:.4f}"
    done = cli("predict", data, "--model", model, "--out", tmp_path / "p", "--min-confidence", least)
    assert done.code == 0, done.err
    predicted = read_answers(tmp_path / "p")
    objects, others = ([obj for one in some for obj in one.pred] for some in (predicted, evaluated))
    assert [obj.bins for obj in objects] == [obj.bins for obj in others], "the file has all objects"
    assert [obj.confidence for obj in objects] == pytest.approx([obj.confidence for obj in others], abs=1e-4)
    kept, left_out = at_least(predicted, float(least))
    assert left_out and f"{left_out} objects" in done.out
    assert len(json.loads((tmp_path / "p" / "coco_results_bbox.json").read_text())) == sum(len(a.pred) for a in kept)

    done = cli("export", "csv", tmp_path / "p", "--out", tmp_path / "csv", "--min-confidence", least)
    assert done.code == 0, done.err
    with (tmp_path / "csv" / "objects.csv").open() as file:
        scores = [float(row["score"]) for row in csv.DictReader(file)]
    assert scores == pytest.approx([obj.confidence for one in kept for obj in one.pred], abs=1e-5)

    write_answers(
        [replace(a, pred=tuple(replace(o, confidence=None) for o in a.pred)) for a in kept], tmp_path / "old.jsonl"
    )
    done = cli("export", "csv", tmp_path / "old.jsonl", "--out", tmp_path / "x", "--min-confidence", "0.5")
    assert done.code == 2 and "no confidence" in done.err
