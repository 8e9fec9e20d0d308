"""``coordexp doctor`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordexp.doctor import CHECKS


def doctor(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    report = folder / "doctor.json"
    command = [sys.executable, "-m", "coordexp", "doctor", "--json", str(report), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    rows = json.loads(report.read_text())["rows"] if report.is_file() else []
    return done.returncode, {row["check"]: row for row in rows}, done.stdout + done.stderr


def test_everything_that_a_cpu_can_check_is_ok(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    code, rows, output = doctor(tmp_path, "--gpus", "0")
    assert code == 0, output
    assert list(rows) == [name for check in CHECKS for name in check.rows]
    assert [name for name, row in rows.items() if row["result"] == "failed"] == []
    assert all(row["figure"] for row in rows.values()), "a figure, or why there is none"
    for name in ("language head, scores", "DDP, untied head", "FSDP2, tied head", "DDP after offload", "scores, FSDP2",
                 "ten pushes, full", "ten pushes, LoRA merged", "vLLM = transformers", "training"):  # fmt: skip
        assert rows[name]["result"] == "ok", name
        assert name in output
    assert rows["vLLM = transformers"]["numbers"]["equal"] == rows["skipping = transformers"]["numbers"]["equal"] == 1
    assert rows["pixels, first layer"]["numbers"]["error"] < 1e-5
    assert rows["decoding, 8 at once"]["numbers"]["boxes"] == rows["skipping, 8 at once"]["numbers"]["boxes"] > 0
    assert rows["skip_forced_tokens"]["numbers"].keys() == {"at_1", "at_8"}
    assert rows["loader processes"]["numbers"]["workers"] == 4, "as shipped"
    answers = rows["parts of a stage 2 step"]["numbers"]["answers"]
    assert rows["stage 2"]["numbers"]["step_s"] > answers > 0 == rows["parts of a step"]["numbers"]["answers"]
