"""After SIGKILL at any moment, the resumed run has the weights and logs of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from faults.runs import Death, run_all
from support.tiny_run import run_config

# Without the campaign: one of stage 1, one of stage 2, one of two ranks where the first seals a checkpoint.
KILLS = range(int(os.environ["COORDEXP_KILLS"])) if "COORDEXP_KILLS" in os.environ else (3, 9, 34)
IN_A_STEP = ("accumulate", "to", "backward", "update")
IN_A_SAVE = ("save_checkpoint", "random_states", "has_adapter", "save_carry_buffer", "seal_checkpoint", "checksums",
             "write_atomically", "flush_file", "delete_old")  # fmt: skip
ON_EVERY_RANK = ("accumulate", "to", "random_states", "write_atomically", "seal_checkpoint")
KEYS: dict[str, Any] = {
    "global_max_length": 150,
    "training__per_device_train_batch_size": 3,
    "training__max_steps": 4,
    "training__logging_steps": 3,
    "training__save_strategy": "steps",
    "training__save_steps": 1,
    "training__save_total_limit": 2,
    "training__resume_from_checkpoint": True,
    "training__ddp_timeout": 60,
}


def plan(number: int) -> tuple[int, int, Death]:
    """Stage, number of ranks and death: every aim in turn, each tenth in stage 2, each seventh with two ranks."""
    draw = random.Random(number)
    ranks = 2 if number % 7 == 6 else 1
    aims = ON_EVERY_RANK if ranks == 2 else (*IN_A_STEP, *IN_A_SAVE)
    aim = aims[number % len(aims)]
    return 2 if number % 10 == 9 else 1, ranks, Death(aim, draw.randint(1, 3), draw.choice(["before", "after"]))


def name_of(number: int) -> str:
    stage, ranks, death = plan(number)
    return f"SIGKILL {death}, stage {stage}, {ranks} rank{'s' * (ranks > 1)} ({number})"


def lines(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    kept = ("time/", "train_runtime", "train_s")  # of the last process alone
    return [{name: value for name, value in line.items() if not name.startswith(kept)} for line in history]


def assert_same_run(folder: Path, other: Path) -> None:
    after, before = (load_file(one / "run" / "model.safetensors") for one in (folder, other))
    assert after.keys() == before.keys() and all((after[name] == before[name]).all() for name in before)
    assert lines(folder) == lines(other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    known: dict[tuple[int, int], Path] = {}

    def made(stage: int, ranks: int) -> Path:
        if (stage, ranks) not in known:
            folder = known[stage, ranks] = tmp_path_factory.mktemp("whole")
            run_config(folder, stage, **KEYS)  # type: ignore[arg-type]
            assert run_all(folder, ranks) == [0] * ranks, (folder / "log0").read_text()[-3000:]
        return known[stage, ranks]

    return made


@pytest.mark.parametrize("number", KILLS, ids=name_of)
def test_a_killed_run_resumes_bit_for_bit(
    number: int, whole: Callable[[int, int], Path], tmp_path: Path, seen: Callable[[str], None]
) -> None:
    stage, ranks, death = plan(number)
    theirs = whole(stage, ranks)
    run_config(tmp_path, stage, **KEYS)  # type: ignore[arg-type]
    killed = run_all(tmp_path, ranks, death, dies=number % ranks)
    # Another rank may have ended already, with one line on the process that it lost.
    assert -signal.SIGKILL in killed and set(killed) <= {-signal.SIGKILL, 2}, (tmp_path / "log0").read_text()[-3000:]
    left = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert run_all(tmp_path, ranks) == [0] * ranks, (tmp_path / "log0").read_text()[-3000:]
    assert_same_run(tmp_path, theirs)
    seen(f"resumed bit-equal; the kill left {', '.join(left) or 'nothing'}")
