"""On a GPU: every shipped YAML runs to its end by its own command, with nothing replaced but places and sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from as_shipped.starting import RowRun
from as_shipped.table import ROWS, Row

pytestmark = pytest.mark.gpu

# Differences between GPU and CPU first: a run that is cut off has shown the most.
FIRST = (
    "stage1/sft", "stage2_rollout_aligned/rewritten_colocate", "stage2_rollout_aligned/rewritten", "stage1/lora",
    "stage2_rollout_aligned/lora", "stage2_two_channel/base", "stage2_rollout_aligned/colocate",
)  # fmt: skip
IN_ORDER = sorted(ROWS, key=lambda row: FIRST.index(row.name) if row.name in FIRST else len(FIRST))
# By `pytest -n`, one after the other: an engine takes a large part of the GPU's memory.
ENGINES = pytest.mark.xdist_group("engines")


def reason_to_skip(row: Row, gpus: int) -> str | None:
    if not gpus:
        return "needs a CUDA device"
    if row.same_as is not None:
        return f"the same run as {row.same_as}"
    if gpus < row.gpus:
        return f"needs {row.gpus} GPUs, and there are {gpus}"
    if row.uses_vllm and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    return None


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[ENGINES] if row.uses_vllm else []) for row in IN_ORDER]
)
def test_a_shipped_file_runs_to_its_end(row: Row, tmp_path: Path) -> None:
    if (reason := reason_to_skip(row, torch.cuda.device_count())) is not None:
        pytest.skip(reason)
    run = RowRun(row, tmp_path, on_gpu=True)
    if run.resolved().training.use_cpu:
        pytest.skip("its file trains on the CPU")
    run.to_the_end()
    history = json.loads((run.run / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    steps = [line for line in history if "memory/allocated_peak_gb" in line]
    assert steps and all(line["memory/allocated_peak_gb"] > 0 for line in steps), "on the GPU"
    assert any(run.run.glob("*.safetensors"))


def test_rows_are_skipped_with_their_reason() -> None:
    found = {row.name: reason_to_skip(row, 1) for row in ROWS}
    assert found["stage1/sft"] is None
    assert found["stage2_rollout_aligned/base"] == "the same run as stage2_rollout_aligned/hf"
    assert found["stage2_rollout_aligned/server_3v1"] == "needs 4 GPUs, and there are 1"
    assert {reason_to_skip(row, 0) for row in ROWS} == {"needs a CUDA device"}
