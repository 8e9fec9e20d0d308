"""Memory that runs out, in any phase, is one line with phase, sizes, cures and what is saved."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.objective import RowTensors
from coordexp.rollouts.hf import HFBackend
from coordexp.training import run as training_run
from coordexp.training import saving
from coordexp.training.checkpoint import is_complete
from support.cli_runs import run_cli
from support.forked import by_file, forked
from support.tiny_run import run_config, tiny_checkpoint, tiny_scenes

# As torch writes it for a GPU.
ON_GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 79.10 GiB of which 15.06 MiB is "
    "free. Including non-PyTorch memory, this process has 78.9 GiB memory in use."
)
KEYS: dict[str, Any] = {
    "training__max_steps": 3,
    "training__eval_strategy": "steps",
    "training__eval_steps": 2,
    "training__resume_from_checkpoint": True,
}
# Phase: the call that runs out, which one of them, the words for it, what is saved, the first thing that helps.
NOTHING, TWO = "Nothing of this run is saved", "Saved are the first 2 steps, in "
BATCH = "(1) lower rollout_matching.decode_batch_size (now 3)"
PHASES: dict[str, tuple[Any, str, int, str, str, str]] = {
    "loading": (training_run, "load_model", 1, "loading the model", NOTHING, "(1) model.dtype: bfloat16"),
    "rollouts": (HFBackend, "_generate_batch", 5, "the rollouts of step 3", TWO, BATCH),
    "forward": (RowTensors, "to", 3, "forward and backward of step 3", TWO,
                "(1) training.gradient_checkpointing: true; (2) lower global_max_length (now 512)"),
    "backward": (torch.Tensor, "backward", 3, "forward and backward of step 3", TWO,
                 "(1) training.gradient_checkpointing: true"),
    "optimizer": (torch.optim.AdamW, "step", 1, "the optimizer of step 1", NOTHING, "(1) fsdp.enabled: true"),
    "evaluation": (HFBackend, "_generate_batch", 3, "the evaluation after step 2", TWO, BATCH),
    "saving": (saving, "save_model", 1, "saving a checkpoint", NOTHING, "(1) tuner.train_type: lora"),
}  # fmt: skip


def failing(act: Callable[..., Any], call: int, error: BaseException) -> Callable[..., Any]:
    made = 0

    def fail_or_act(*arguments: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == call:
            raise error
        return act(*arguments, **options)

    return fail_or_act


@pytest.mark.parametrize("where", PHASES)
def test_memory_that_runs_out_is_one_line_with_its_phase_sizes_and_cures(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seen: Callable[[object], None],
) -> None:
    owner, name, call, phase, saved, first = PHASES[where]
    keys = KEYS | ({"training__save_strategy": "steps", "training__save_steps": 1} if where == "saving" else {})
    run_config(tmp_path, 2, **keys)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), call, torch.OutOfMemoryError(ON_GPU)))
    ended = run_cli(capsys, "train", tmp_path / "run.yaml")
    (line,) = [one for one in ended.err.splitlines() if one.startswith("error: ")]
    assert ended.code == 2 and "Traceback" not in ended.err
    sizes = "2.50 GiB were needed, and GPU 1 has 15.06 MiB of 79.10 GiB free"
    assert line.startswith(f"error: out of memory in {phase}: {sizes}. {saved}"), line
    assert f"What helps, in this order: {first}" in line
    assert is_complete(tmp_path / "run" / "checkpoint-2") == (saved is TWO)
    seen(line)


def train_with_little_memory(yaml: str) -> None:
    """``coordexp train`` whose address space ends shortly above what it has at the forward of step 2."""
    from coordexp.cli import main

    to, calls = RowTensors.to, 0

    def to_with_little_memory(self: RowTensors, device: Any) -> RowTensors:
        nonlocal calls
        calls += 1
        if calls == 2:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
            torch.empty(512 << 20, dtype=torch.uint8)
        return to(self, device)

    RowTensors.to = to_with_little_memory
    main(["train", yaml])


def test_main_memory_that_runs_out_in_a_step_is_one_line(tmp_path: Path, seen: Callable[[object], None]) -> None:
    """The kernel refuses it."""
    run_config(tmp_path, 1, training__resume_from_checkpoint=True)
    target, *arguments = by_file(train_with_little_memory, str(tmp_path / "run.yaml"))
    process = forked(target, *arguments, log=tmp_path / "out", err=tmp_path / "err")
    process.join(120)
    err = (tmp_path / "err").read_text()
    assert process.exitcode == 2, err
    (line,) = [one for one in err.splitlines() if one.startswith("error: ")]
    assert "out of memory in forward and backward of step 2: 0.50 GiB were needed, and " in line
    assert " of the process's (ulimit -v) " in line and "Saved are the first 1 steps" in line, line
    seen(line)


@pytest.mark.parametrize("limit_kb", [250_000, 300_000, 600_000, 800_000, 1_200_000])
def test_a_process_that_cannot_even_load_its_libraries_says_so(
    limit_kb: int, tmp_path: Path, seen: Callable[[object], None]
) -> None:
    """``ulimit -v`` below what torch's libraries map. At 300,000 and 1,200,000 KB OpenBLAS waited for ever, at 800,000
    C++ aborted."""
    run_config(tmp_path, 1)
    command = f"ulimit -v {limit_kb}; exec {sys.executable} -m coordexp train {tmp_path / 'run.yaml'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "error: out of memory in this command" in done.stderr and "(ulimit -v)" in done.stderr, done.stderr[-3000:]
    seen(done.stderr.strip().splitlines()[-1])


def test_answering_images_names_the_keys_that_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = torch.OutOfMemoryError(ON_GPU)
    monkeypatch.setattr(HFBackend, "_generate_batch", failing(HFBackend._generate_batch, 1, failure))
    images = tiny_scenes().parent / "images"
    ended = run_cli(capsys, "predict", images, "--model", tiny_checkpoint(), "--out", tmp_path / "out")
    assert ended.code == 2
    assert "error: out of memory in answering: 2.50 GiB were needed" in ended.err
    assert "What helps, in this order: (1) lower rollout_matching.decode_batch_size (now 8)" in ended.err
