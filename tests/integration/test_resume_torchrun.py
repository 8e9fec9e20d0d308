"""Two processes whose run ends before its time: what is left can be gone on from exactly, or is not taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from coordexp.config import RunConfig
from coordexp.training.checkpoint import is_complete, resolve_resume
from coordexp.training.seal import SEAL
from support.tiny_run import run_config
from support.torchrun import Finished, torchrun

HERE = Path(__file__).parent

# Rows of 150 tokens: segments wait on both ranks. Six steps of two micro-steps, three steps to a log line.
KEYS: dict[str, Any] = {
    "global_max_length": 150,
    "training__max_steps": 6,
    "training__gradient_accumulation_steps": 2,
    "training__per_device_train_batch_size": 3,
    "training__logging_steps": 3,
}


def two_ranks(config: RunConfig, worker: str, *arguments: str) -> Finished:
    folder = Path(config.training.output_dir)
    return torchrun(HERE / worker, folder.with_name(f"{folder.name}.yaml"), *arguments)


def lines(folder: Path) -> list[dict[str, float]]:
    logged = json.loads((folder / "rank0.json").read_text())["steps"]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in logged]


def test_a_step_that_fails_on_one_rank_leaves_a_checkpoint_from_which_the_run_is_the_same(tmp_path: Path) -> None:
    """In the second micro-step of step 5: the first has already taken rows from the buffers, in the midst of a line."""
    whole = run_config(tmp_path, 1, "whole", **KEYS)
    done = two_ranks(whole, "train_worker.py")
    assert done.returncode == 0, done.output[-3000:]
    config = run_config(tmp_path, 1, "failed", training__resume_from_checkpoint=True, **KEYS)
    folder = Path(config.training.output_dir)
    failed = two_ranks(config, "fault_worker.py", "overflow", "10")
    assert failed.returncode != 0 and "targets of step 5" in failed.output, failed.output[-3000:]
    assert f"training.resume_from_checkpoint: {folder / 'checkpoint-4'}" in failed.output
    waiting = [json.loads((folder / "checkpoint-4" / f"carry_buffer_rank{rank}.json").read_text()) for rank in (0, 1)]
    assert all(waiting), "nothing waited, so the buffers were not tested"
    resumed = two_ranks(config, "train_worker.py")
    assert resumed.returncode == 0, resumed.output[-3000:]
    assert lines(folder) == lines(tmp_path / "whole") and [line["step"] for line in lines(folder)] == [3, 6]
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "whole"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_a_checkpoint_without_one_ranks_files_is_not_resumed_from(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1, training__save_strategy="steps", training__save_steps=1, **KEYS)
    folder = Path(config.training.output_dir)
    killed = two_ranks(config, "fault_worker.py", "kill", "2")
    assert killed.returncode != 0
    left = {path.name for path in (folder / "checkpoint-2").iterdir()}
    assert {"trainer_state.json", "rng_state_0.pth"} <= left and SEAL not in left, left
    assert is_complete(folder / "checkpoint-1")
    assert resolve_resume(folder, True) == folder / "checkpoint-1"
