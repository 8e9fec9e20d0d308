"""A trained model's own answers: our average precision is what pycocotools says of the files that we wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coordexp.data.files import asset
from coordexp.data.scenes import SPARSE, write_scenes
from support.cli_runs import run_cli, write_run

STATS = {"AP": 0, "AP50": 1, "AP75": 2, "AP_small": 3, "AP_medium": 4, "AP_large": 5, "AR100": 8}


def test_figures_of_the_demo_model_are_pycocotools_on_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scenes(tmp_path, 4, SPARSE, 77)
    keys = {"template__prompt": "Detect every object.", "rollout_matching__max_new_tokens": 128,
            "rollout_matching__decode_batch_size": 4}  # fmt: skip
    run = write_run(tmp_path, 1, asset("checkpoints/demo-stage1"), **keys)
    answered = run_cli(capsys, "predict", run, tmp_path / "scenes.jsonl", "--output", tmp_path / "answers")
    assert answered.code == 0
    measured = run_cli(capsys, "evaluate", tmp_path / "answers", "--segm", "--json")
    metrics = json.loads(measured.out)["metrics"]
    assert metrics["pred_objects"] > 0 and 0.02 < metrics["AP"] < 1, "neither perfect nor useless, or it shows nothing"
    kinds: tuple[tuple[Literal["bbox", "segm"], str], ...] = (("bbox", ""), ("segm", "segm_"))
    for iou_type, prefix in kinds:
        truth = COCO(str(tmp_path / "answers" / "coco_ground_truth.json"))
        found = truth.loadRes(str(tmp_path / "answers" / f"coco_results_{iou_type}.json"))
        independent = COCOeval(truth, found, iou_type)
        independent.evaluate()
        independent.accumulate()
        independent.summarize()
        for name, index in STATS.items():
            expected = independent.stats[index]
            assert metrics.get(prefix + name, -1) == pytest.approx(expected, abs=1e-6), (iou_type, name)
