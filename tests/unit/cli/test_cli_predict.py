"""``coordexp predict`` and ``coordexp evaluate`` on what it wrote: streaming, resuming, scores, comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from cli_runs import run_cli, small_checkpoint, write_run
from coordexp.data import read_jsonl
from coordexp.evaluation import read_answers
from coordexp.evaluation.answers import write_answers
from scored_answers import random_answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model")


def test_an_interrupted_prediction_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    run, data = write_run(tmp_path, 1, model), tmp_path / "scenes.jsonl"
    whole = run_cli(capsys, "predict", run, data, "--output", tmp_path / "whole", "--json")
    assert whole.code == 0 and json.loads(whole.out)["images"] == 4
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("prediction.json", "predictions.jsonl"):
        (broken / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    lines = (broken / "predictions.jsonl").read_bytes().splitlines(keepends=True)
    (broken / "predictions.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])  # killed while writing
    again = run_cli(capsys, "predict", run, data, "--output", broken, "--json")
    assert json.loads(again.out)["resumed"] == 2
    assert read_answers(broken) == read_answers(tmp_path / "whole")
    assert [answer.sample_id for answer in read_answers(broken)] == [r.sample_id for r in read_jsonl(data)]
    assert (broken / "coco_results_bbox.json").is_file() and (broken / "coco_ground_truth.json").is_file()
    other = run_cli(capsys, "predict", run, data, "--output", broken, "--constant-score", "1.0")
    assert other.code == 2 and "another score" in other.err


def test_a_folder_of_images_has_no_annotations(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    run = write_run(tmp_path, 1, model)
    photos = tmp_path / "photos" / "deep"
    photos.mkdir(parents=True)
    for name in ("b.png", "a.jpg"):
        Image.new("RGB", (64, 48), "gray").save(photos / name)
    (photos / "notes.txt").write_text("no image")
    outcome = run_cli(capsys, "predict", run, tmp_path / "photos", "--output", tmp_path / "out")
    assert outcome.code == 0 and "2 images answered" in outcome.out
    answers = read_answers(tmp_path / "out")
    assert [(a.sample_id, a.width, a.height, a.gt) for a in answers] == [
        ("deep/a.jpg", 64, 48, None), ("deep/b.png", 64, 48, None)
    ]  # fmt: skip
    measured = run_cli(capsys, "evaluate", tmp_path / "out")
    assert measured.code == 2 and "has no annotations" in measured.err
    assert run_cli(capsys, "predict", run, tmp_path / "out", "--output", tmp_path / "o2").code == 2  # no image there


def test_a_filled_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: Path) -> None:
    run = write_run(tmp_path, 1, model)
    outcome = run_cli(capsys, "predict", run, tmp_path / "scenes.jsonl", "--output", tmp_path)
    assert outcome.code == 2 and "not empty" in outcome.err


def test_saved_predictions_are_evaluated_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_answers(random_answers(12, 1), tmp_path / "predictions.jsonl")
    outcome = run_cli(capsys, "evaluate", tmp_path, "--segm", "--output", tmp_path / "figures")
    assert outcome.code == 0 and "by class" in outcome.out and "segm_AP" in outcome.out and "手提包" in outcome.out
    found = json.loads(run_cli(capsys, "evaluate", tmp_path / "predictions.jsonl", "--json").out)
    written = json.loads((tmp_path / "figures" / "metrics.json").read_text(encoding="utf-8"))
    assert found["metrics"]["AP"] == written["metrics"]["AP"] and found["by_class"] == written["by_class"]


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = random_answers(20, 1)
    write_answers(answers, tmp_path / "a" / "predictions.jsonl")
    write_answers(random_answers(20, 1)[::-1], tmp_path / "b" / "evaluation" / "predictions.jsonl")
    outcome = run_cli(capsys, "evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--resamples", 20, "--json")
    figures = {row["name"]: row for row in json.loads(outcome.out)["figures"]}
    assert figures["AP"]["difference"] == 0 and not figures["f1"]["clear"]
    assert "b − a" in run_cli(capsys, "evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--resamples", 10).out
    assert run_cli(capsys, "evaluate").code == 2
