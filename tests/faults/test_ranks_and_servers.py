"""Two ranks training on a real server's answers, when a process on either side stops or dies."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordexp.training.checkpoint import is_complete
from faults.runs import ended, strike, two_ranks
from support.rollout_servers import RunningServer, server_config, server_keys, serving, vllm_config

SERVER_S, RANK_S = 6, 12
SAVING_S = 40.0  # for a busy machine to save and to end two interpreters; the table has the measured time

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], RunningServer]]:
    folder = tmp_path_factory.mktemp("server")
    config = server_config(folder)
    config["rollout_matching"]["vllm"]["server"] |= {"timeout_s": float(SERVER_S), "infer_timeout_s": None}
    config["rollout_matching"]["vllm"]["sync"] |= {"timeout_s": float(SERVER_S)}
    with serving(folder, config) as running:
        yield config, running


@pytest.fixture
def run(server: tuple[dict[str, Any], RunningServer], tmp_path: Path) -> Path:
    keys = server_keys(server[0]) | {"training__max_steps": 4000, "training__ddp_timeout": RANK_S}
    vllm_config(tmp_path, "run", **keys)
    return tmp_path / "run.yaml"


def pids_of(running: RunningServer, whose: str) -> list[int]:
    client = running.client()
    status = client.status()
    client.close()
    assert status is not None
    workers = [worker["pid"] for worker in status["workers"]]
    return {"the process that answers": [running.process.pid], "the engine": workers}[whose]


@pytest.mark.parametrize("whose", ["the process that answers", "the engine"])
def test_a_stopped_server_ends_both_ranks_with_a_checkpoint(
    whose: str, server: tuple[dict[str, Any], RunningServer], run: Path, seen: Callable[[object], None]
) -> None:
    _, running = server
    pids = pids_of(running, whose)
    try:
        with two_ranks(run, 3) as ranks:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            struck = time.monotonic()
            assert ended(ranks, 120) == [2, 2]
            waited = time.monotonic() - struck
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    errors = [re.search(r"error: (.*)", (run.parent / f"err{rank}").read_text().replace("\n", " ")) for rank in (0, 1)]
    said = [error[1] for error in errors if error is not None]
    assert len(said) == 2 and all(one.startswith("rank ") and running.base_url in one for one in said), said
    gave_up = re.search(r"(?:within|for) (\d+) s", said[0])
    assert gave_up is not None and SERVER_S <= int(gave_up[1]) <= SERVER_S + 2, "the wait itself"
    assert waited < SERVER_S + 2 + SAVING_S
    assert any(is_complete(folder) for folder in (run.parent / "run").glob("checkpoint-*"))
    seen(f"{waited:.0f} s: {said[0]}")


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_other_and_the_server_stays_usable(
    lost: int,
    number: signal.Signals,
    server: tuple[dict[str, Any], RunningServer],
    run: Path,
    seen: Callable[[object], None],
) -> None:
    """Rank 0 pushes the weights, too; the next run pushes its own."""
    with two_ranks(run, 3) as ranks:
        strike(ranks[lost], number)
        struck = time.monotonic()
        assert ended(ranks[1 - lost : 2 - lost], 120) == [2]
        waited = time.monotonic() - struck
    err = (run.parent / f"err{1 - lost}").read_text()
    assert re.search(rf"error: rank {1 - lost}: another process of this run ended, or did not answer", err), err
    assert waited < RANK_S + 2 + SAVING_S
    (run.parent / "store").unlink()
    with two_ranks(run, 2) as ranks:
        strike(ranks[0], signal.SIGTERM)
        assert ended(ranks, 120) == [143, 143]
    seen(f"{waited:.0f} s; the next run used the server")
