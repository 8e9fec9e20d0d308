"""Average precision ranks by one score: in training's evaluation, of new and of saved answers, and in comparisons."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import parse_config, resolved_rollout
from coordexp.evaluation.answers import write_answers
from coordexp.evaluation.coco_results import average_precision
from support.cli_runs import Cli
from support.config_samples import set_keys, stage1, stage2
from support.scored_answers import random_answers

RM = "rollout_matching"
OFFLOAD = {"enabled": True, "offload_model": True}
COLOCATED = stage2(rollout_backend="vllm", vllm={"mode": "colocate"})


def test_a_constant_score_replaces_those_of_saved_answers(tmp_path: Path, cli: Cli) -> None:
    answers = random_answers(20, 1)
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    equal = [replace(one, pred=tuple(replace(o, score=1.0) for o in one.pred)) for one in answers]

    def ap(*options: object) -> float:
        done = cli("evaluate", tmp_path / "run", "--json", *options)
        return json.loads(done.out)["metrics"]["AP"]

    own, constant = ap(), ap("--constant-score", 1.0)
    assert own == pytest.approx(average_precision(answers).figures["AP"])
    assert constant == pytest.approx(average_precision(equal).figures["AP"]) and constant != pytest.approx(own)


def test_a_comparison_uses_the_constant_score(tmp_path: Path, cli: Cli) -> None:
    answers = random_answers(20, 1)
    equal = [replace(one, pred=tuple(replace(o, score=1.0) for o in one.pred)) for one in answers]
    write_answers(answers, tmp_path / "predictions.jsonl")
    for options, ranked in (((), answers), (("--constant-score", 1.0), equal)):
        done = cli("evaluate", "--compare", tmp_path, tmp_path, "--json", "--resamples", 10, *options)
        (ap,) = [one["a"] for one in json.loads(done.out)["figures"] if one["name"] == "AP"]
        assert ap == pytest.approx(average_precision(ranked).figures["AP"])


def test_a_picture_of_a_comparison_has_the_objects_own_scores(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = random_answers(20, 1)
    write_answers(answers, tmp_path / "a" / "predictions.jsonl")
    write_answers([replace(one, pred=()) for one in answers], tmp_path / "b" / "predictions.jsonl")
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr("coordexp.evaluation.drawing.draw_comparison", lambda runs, *_: drawn.append(runs))
    done = cli("evaluate", "--compare", tmp_path / "a", tmp_path / "b", "--resamples", 10, "--constant-score", 1.0,
               "--sheet", tmp_path / "sheet.png")  # fmt: skip
    assert done.code == 0, done.err
    assert len({obj.score for one in drawn[0]["a"] for obj in one.pred}) > 1


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (stage1(), "confidence"),
        (stage2(), "confidence"),
        (COLOCATED, "confidence"),
        (set_keys(COLOCATED, {f"{RM}.offload": OFFLOAD}), "constant"),
        (set_keys(stage2(), {f"{RM}.eval_detection": {"score_mode": "constant"}}), "constant"),
    ],
)
def test_training_scores_as_evaluate_does_unless_the_model_is_moved_away(config: dict[str, Any], mode: str) -> None:
    assert resolved_rollout(parse_config(config)).eval_detection.score_mode == mode
