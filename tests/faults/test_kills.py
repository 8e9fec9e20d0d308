"""SIGKILL at any moment: started again, the run ends with the weights and figures of the run that nobody killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from coordexp.distributed import RENDEZVOUS
from coordexp.training.checkpoint import is_complete
from faults.forked_runs import Death, Process, run_all
from support.tiny_run import run_config

# Without the campaign: one kill of stage 1, one of two ranks, one of stage 2.
KILLS = range(int(os.environ["COORDEXP_KILLS"])) if "COORDEXP_KILLS" in os.environ else (3, 6, 9)
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
    """Stage, processes and death of a kill: every aim in turn, each tenth in stage 2, each seventh with two ranks."""
    draw = random.Random(number)
    ranks = 2 if number % 7 == 6 else 1
    aims = ON_EVERY_RANK if ranks == 2 else (*IN_A_STEP, *IN_A_SAVE)
    aim = aims[number % len(aims)]
    return 2 if number % 10 == 9 else 1, ranks, Death(aim, draw.randint(1, 3), draw.choice(["before", "behind"]))


def of(number: int) -> str:
    stage, ranks, death = plan(number)
    return f"SIGKILL {death}, stage {stage}, {ranks} rank{'s' * (ranks > 1)} ({number})"


def run(folder: Path, ranks: int, death: Death = Death(), dies: int = 0) -> list[int]:  # noqa: B008
    (folder / "store").unlink(missing_ok=True)
    of_rank: Callable[[int], dict[str, str]] = lambda rank: (  # noqa: E731
        {}
        if ranks == 1
        else {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
              RENDEZVOUS: str(folder / "store"), "GLOO_SOCKET_IFNAME": "lo"}
    )  # fmt: skip
    processes = [
        Process(folder / f"log{rank}", death if rank == dies else Death(), of_rank(rank)) for rank in range(ranks)
    ]
    return run_all(folder / "run.yaml", processes)


def lines(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    kept = ("time/", "train_runtime", "train_s", "train_loss")  # of the last process alone
    return [{name: value for name, value in line.items() if not name.startswith(kept)} for line in history]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """The run that nobody killed, by stage and number of ranks."""
    known: dict[tuple[int, int], Path] = {}

    def made(stage: int, ranks: int) -> Path:
        if (stage, ranks) not in known:
            folder = known[stage, ranks] = tmp_path_factory.mktemp("whole")
            run_config(folder, stage, **KEYS)  # type: ignore[arg-type]
            assert run(folder, ranks) == [0] * ranks, (folder / "log0").read_text()[-3000:]
        return known[stage, ranks]

    return made


@pytest.mark.parametrize("number", KILLS, ids=of)
def test_killed_and_started_again_is_never_killed(
    number: int, whole: Callable[[int, int], Path], tmp_path: Path, seen: Callable[[str], None]
) -> None:
    stage, ranks, death = plan(number)
    theirs = whole(stage, ranks)
    run_config(tmp_path, stage, **KEYS)  # type: ignore[arg-type]
    killed = run(tmp_path, ranks, death, dies=number % ranks)
    # Another rank may have ended already, with one line on the process that it lost.
    assert -signal.SIGKILL in killed and set(killed) <= {-signal.SIGKILL, 2}, (tmp_path / "log0").read_text()[-3000:]
    left = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert run(tmp_path, ranks) == [0] * ranks, (tmp_path / "log0").read_text()[-3000:]
    after, before = (load_file(folder / "run" / "model.safetensors") for folder in (tmp_path, theirs))
    assert after.keys() == before.keys() and all((after[name] == before[name]).all() for name in before)
    assert lines(tmp_path) == lines(theirs)
    seen(f"resumed bit-equal; the kill left {', '.join(left) or 'nothing'}")


@pytest.mark.campaign
@pytest.mark.parametrize("aim", ["to", "backward"])
def test_an_error_on_one_rank_of_two_saves_and_the_resumed_run_is_the_run_without_it(
    aim: str, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    """In the first micro-step of step 3, whose backward exchanges nothing yet."""
    keys = KEYS | {"training__gradient_accumulation_steps": 2, "training__save_strategy": "no"}
    for name in ("whole", "failed"):
        run_config(tmp_path / name, 1, **keys)
    assert run(tmp_path / "whole", 2) == [0, 0]
    death = Death(aim, 5, "before", "no memory is left")
    statuses = run(tmp_path / "failed", 2, death, dies=1)
    said = [(tmp_path / "failed" / f"log{rank}").read_text() for rank in (0, 1)]
    assert all(status > 0 for status in statuses), said
    assert all("rank 1, step 3: no memory is left" in one or "no memory is left" in one for one in said), said
    assert is_complete(tmp_path / "failed" / "run" / "checkpoint-2"), said[0][-3000:]
    assert run(tmp_path / "failed", 2) == [0, 0]
    after, before = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("failed", "whole"))
    assert all((after[name] == before[name]).all() for name in before)
    seen("both ranks ended with rank 1's words, checkpoint-2 saved, resumed bit-equal")


@pytest.mark.campaign
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_where_gradients_are_exchanged_ends_both_ranks_and_the_periodic_checkpoint_counts(
    failing: int, tmp_path: Path, seen: Callable[[str], None]
) -> None:
    """In the last micro-step of step 3: the other rank waits for gradients that never come, for ``ddp_timeout``."""
    keys = KEYS | {"training__gradient_accumulation_steps": 2, "training__ddp_timeout": 8}
    for name in ("whole", "failed"):
        run_config(tmp_path / name, 1, **keys)
    assert run(tmp_path / "whole", 2) == [0, 0]
    death = Death("backward", 6, "before", "no memory is left")
    begun = time.monotonic()
    statuses = run(tmp_path / "failed", 2, death, dies=failing)
    waited = time.monotonic() - begun
    said = [(tmp_path / "failed" / f"log{rank}").read_text() for rank in (0, 1)]
    assert all(status > 0 for status in statuses), said
    assert "no memory is left" in said[failing] and "another process of this run ended" in said[1 - failing], said
    assert is_complete(tmp_path / "failed" / "run" / "checkpoint-2"), said[0][-3000:]
    assert run(tmp_path / "failed", 2) == [0, 0]
    after, before = (load_file(tmp_path / name / "run" / "model.safetensors") for name in ("failed", "whole"))
    assert all((after[name] == before[name]).all() for name in before)
    seen(f"both ranks ended within {waited:.0f} s of the start, resumed bit-equal from checkpoint-2")
