"""The studies' tables while not everything has run, and with a results file that an ended run left."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[2] / "studies"


def table(folder: Path, study: str, results: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """`study.py table` in a copy of a study with these results; None: without any."""
    shutil.copytree(STUDIES / study, folder / study, ignore=shutil.ignore_patterns("results*", "answers", "starts"))
    shutil.copy(STUDIES / "rows.py", folder)
    if results is not None:
        (folder / study / "results.jsonl").write_text(results)
    command = [sys.executable, "study.py", "table", *words]
    return subprocess.run(command, cwd=folder / study, capture_output=True, text=True)


def row(**keys: object) -> str:
    names = ("f1", "AP", "AP50", "f1@0.75", "segm_AP", "segm_AP50", "segm_AP75", "precision", "recall")
    return json.dumps(keys | dict.fromkeys((*names, "mean_matched_iou", "pred_per_image"), 0.5)) + "\n"


def two_orders(*seeds: int) -> str:
    return "".join(row(order=order, seed=seed, steps=2) for seed in seeds for order in ("sorted", "sorted_x"))


@pytest.mark.parametrize(
    ("study", "results", "line"),
    [
        ("object_order", two_orders(0), "| f1 | 0.500 (0.500) | 0.500 (0.500) | +0.000 (+0.000) |  |"),
        ("object_order", two_orders(0, 1, 2, 3, 4, 5).replace("0.5", "0.25", 1), "+0.000) | -0.065 to +0.149 |"),
        ("object_order", row(order="sorted", seed=0, steps=2), "| f1 |  |  |  |  |"),
        ("small_polygons", row(variant="start", seed=0, scale=1.0), "| f1 | 0.500 |  |  |  |"),
    ],
)
def test_a_table_shows_what_has_run(tmp_path: Path, study: str, results: str, line: str) -> None:
    shown = table(tmp_path, study, results)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert line in shown.stdout


def test_a_table_without_results_says_what_writes_them(tmp_path: Path) -> None:
    shown = table(tmp_path, "object_order", None)
    assert shown.returncode == 1
    assert shown.stderr.endswith("results.jsonl: no results yet; `python study.py run` writes them\n")


@pytest.mark.parametrize("study", ["object_order", "small_polygons", "real_omissions"])
def test_a_row_that_was_not_written_to_its_end_is_named(tmp_path: Path, study: str) -> None:
    shown = table(tmp_path, study, two_orders(0) + '{"order": "sor')
    assert shown.returncode == 1
    assert "results.jsonl:3: no whole line of JSON" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_an_unknown_regime_is_refused_with_those_there_are(tmp_path: Path) -> None:
    shown = table(tmp_path, "when_stage2_helps", None, "incomplet", "--against", "start")
    assert shown.returncode == 2
    assert "invalid choice: 'incomplet' (choose from 'incomplete', 'uneven'" in shown.stderr


def test_an_arm_that_was_interrupted_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that a stop signal left does not end it; its CPU seconds are those of a whole training."""
    from coordexp.config import RunConfig

    trained: list[RunConfig] = []
    monkeypatch.setattr("coordexp.training.run.run_training", lambda config, *_: trained.append(config))
    monkeypatch.syspath_prepend(str(STUDIES / "when_stage2_helps"))
    study = importlib.import_module("study")
    (tmp_path / "arm" / "checkpoint-2").mkdir(parents=True)
    arm = {"steps": 5, "lr": 1e-4, "set": {"training.warmup_steps": 2}}
    study.train("sft", tmp_path / "train.jsonl", tmp_path / "start", tmp_path / "arm", 0, arm)
    (config,) = trained
    assert config.training.overwrite_output_dir and config.training.resume_from_checkpoint is None
