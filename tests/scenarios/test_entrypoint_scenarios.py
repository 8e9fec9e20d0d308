"""``python -m src.sft --config X.yaml``: the YAML alone decides what is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli_runs import logged, run_cli, small_checkpoint, write_run

ROOT = Path(__file__).parents[2]


@pytest.mark.scenario("Rollout-matching enabled via trainer_variant")
def test_trainer_variant_selects_the_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_checkpoint(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", "src.sft", "--config", write_run(tmp_path, 2, model)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    stage2 = logged(tmp_path / "out2")
    assert stage2["rollout/samples_total"] == 2
    assert stage2["rollout/gen_new_tokens_total"] > 0
    assert stage2["rollout/gt_objects_total"] == stage2["rollout/matched_total"] + stage2["rollout/fn_appended_total"]
    assert any(name.startswith("loss/bbox_geo/") for name in stage2), (
        "the pipeline of rollout_matching.pipeline is used"
    )

    assert run_cli(capsys, "train", write_run(tmp_path, 1, model)).code == 0
    assert [name for name in logged(tmp_path / "out1") if name.startswith(("rollout/", "loss/bbox_geo/"))] == []


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config", "missing.yaml"]])
def test_without_a_configuration_nothing_starts(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "src.sft", *argv], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "--config" in done.stderr or "missing.yaml: no such file" in done.stderr
    assert "Traceback" not in done.stderr
