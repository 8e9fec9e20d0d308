"""SIGKILL at any moment: started again, the run ends with the weights and figures of the run that nobody killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from support.tiny_run import run_config

KILLS = int(os.environ.get("COORDEXP_KILLS", "0"))
# Where to aim: each is a call of the run, in which the process kills itself the given time.
AIMS = ("compute_loss", "get_batch_samples", "save_model", "_save_optimizer_and_scheduler", "_save_rng_state",
        "_save_log_line", "seal_checkpoint", "delete_old", "write_atomically", "checksums")  # fmt: skip
RUN = """
import os, signal, sys
import coordexp.files, coordexp.training.saving as saving, coordexp.training.seal as seal
from coordexp.training.trainer import CoordExpTrainer
aim, times, when = sys.argv[2], int(sys.argv[3]), sys.argv[4]
owner = next(one for one in (CoordExpTrainer, saving, seal) if hasattr(one, aim)) if aim else None
if owner is not None:
    act = getattr(owner, aim)
    def act_or_die(*arguments, **options):
        global times
        times -= 1
        if times == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = act(*arguments, **options)
        if times == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, aim, act_or_die)
from coordexp.cli import main
main(["train", sys.argv[1]])
"""
KEYS: dict[str, Any] = {
    "global_max_length": 150,
    "training__per_device_train_batch_size": 3,
    "training__max_steps": 4,
    "training__logging_steps": 3,
    "training__save_strategy": "steps",
    "training__save_steps": 1,
    "training__save_total_limit": 2,
    "training__resume_from_checkpoint": True,
}


def run(folder: Path, aim: str = "", times: int = 0, when: str = "before") -> int:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder / "run.yaml"), aim, str(times), when],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def lines(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    kept = ("time/", "train_runtime", "train_s", "train_loss")  # of the last process alone
    return [{name: value for name, value in line.items() if not name.startswith(kept)} for line in history]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_config(folder, 1, **KEYS)
    assert run(folder) == 0
    return folder


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_and_started_again_is_never_killed(number: int, whole: Path, tmp_path: Path) -> None:
    draw = random.Random(number)
    aim, times, when = AIMS[number % len(AIMS)], draw.randint(1, 3), draw.choice(["before", "behind"])
    run_config(tmp_path, 1, **KEYS)
    assert run(tmp_path, aim, times, when) == -signal.SIGKILL, f"{aim} was not called {times} times"
    assert run(tmp_path) == 0
    ours, theirs = (load_file(folder / "run" / "model.safetensors") for folder in (tmp_path, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs), (aim, times, when)
    assert lines(tmp_path) == lines(whole)
