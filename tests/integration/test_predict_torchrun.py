"""``coordexp predict`` under torchrun: each of two processes answers its share, and the files are those of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import run_cli, small_checkpoint, write_run
from coordexp.evaluation import read_answers


def test_two_processes_write_what_one_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = write_run(tmp_path, 1, small_checkpoint(tmp_path / "model")), tmp_path / "scenes.jsonl"
    assert run_cli(capsys, "predict", run, data, "--output", tmp_path / "one").code == 0
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "coordexp",
         "predict", str(run), str(data), "--output", str(tmp_path / "two")],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_answers(tmp_path / "two") == read_answers(tmp_path / "one")
    assert not list((tmp_path / "two").glob("predictions.rank*.jsonl"))
