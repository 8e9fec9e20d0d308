"""If a process of a run is lost, the others end within ``training.ddp_timeout`` with one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import load_config
from coordexp.distributed import RENDEZVOUS
from coordexp.launch.plan import plan_launch
from coordexp.training.checkpoint import is_complete
from faults.runs import ended, strike, two_ranks
from support.ports import listening
from support.rollout_servers import descendants
from support.tiny_run import run_config

TIMEOUT_S = 6


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[BaseProcess]]:
    run_config(tmp_path, 1, training__max_steps=4000, training__ddp_timeout=TIMEOUT_S,
               training__save_strategy="steps", training__save_steps=2)  # fmt: skip
    with two_ranks(tmp_path / "run.yaml", 4) as started:
        yield started


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_rank_ends_the_other_with_one_line(
    number: signal.Signals, ranks: list[BaseProcess], tmp_path: Path
) -> None:
    strike(ranks[1], number)
    struck = time.monotonic()
    codes = ended(ranks[:1], 120)
    waited = time.monotonic() - struck
    err = (tmp_path / "err0").read_text()
    assert codes == [2], err
    assert re.search(r"error: rank 0: another process of this run ended, or did not answer within 6 s", err), err
    assert "Traceback" not in err
    assert waited < 60, "waited for Gloo's own timeout"
    assert is_complete(tmp_path / "run" / "checkpoint-2")


def test_a_signal_to_one_rank_saves_and_ends_both(ranks: list[BaseProcess], tmp_path: Path) -> None:
    strike(ranks[1], signal.SIGTERM)
    assert ended(ranks, 120) == [143, 143], (tmp_path / "err0").read_text()
    said = re.search(r"stopped by SIGTERM after step (\d+)", (tmp_path / "err0").read_text())
    assert said is not None and is_complete(tmp_path / "run" / f"checkpoint-{said[1]}")


def test_a_launched_trainer_listens_on_loopback_only(tmp_path: Path) -> None:
    """torchrun as ``coordexp launch`` starts it, with two processes."""
    keys: dict[str, Any] = {"training__max_steps": 4000}
    run_config(tmp_path, 1, **keys)
    yaml = tmp_path / "run.yaml"
    trainer = plan_launch(load_config(yaml), yaml, local=()).trainer
    command = [word.replace("--nproc-per-node=1", "--nproc-per-node=2") for word in trainer.command]
    log = tmp_path / "log"
    environment = os.environ | dict(trainer.environment) | {RENDEZVOUS: str(tmp_path / "store")}
    process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment)

    def addresses(pid: int) -> set[tuple[str, int]]:
        return set().union(*map(listening, (pid, *descendants(pid))))

    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "run.lock").exists() or len(addresses(process.pid)) < 2:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.2)
        time.sleep(2)
        heard = addresses(process.pid)
        assert heard and all(address.startswith("127.") for address, _ in heard), heard
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
