"""After many answers and pushes, a rollout server has no more memory, files or threads than before."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest

from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.push import ServerPusher
from coordexp.errors import RolloutError
from coordexp.modeling.trainer_weights import TrainerWeights
from support.rollout_servers import RunningServer, load_served, payload, requests_of, server_config, serving

MINUTES = float(os.environ.get("COORDEXP_LONG_LIFE_MINUTES", "4"))
CALLS_A_PUSH = 10
# A server of a tiny model answers as many calls in an hour as one of a large model in days. Leftovers of each call
# would add up; memory that allocators keep once does not.
GROWTH_A_CALL = 16 << 10
KEPT_ONCE = 24 << 20

pytestmark = pytest.mark.campaign


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of all processes of a server, the engine included."""

    calls: int
    memory: int
    files: int
    threads: int


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, server_config(folder)) as running:
        yield running


def held(server: RunningServer, calls: int) -> Held:
    processes = [psutil.Process(pid) for pid in (server.process.pid, *server.children())]
    return Held(
        calls,
        sum(one.memory_full_info().uss for one in processes),
        sum(one.num_fds() for one in processes),
        sum(one.num_threads() for one in processes),
    )


def test_many_calls_and_pushes_leak_nothing(server: RunningServer, seen: Callable[[object], None]) -> None:
    """Answers, pushes, and requests that are refused; the first third is for caches and allocators to settle."""
    trainer, client = load_served(), server.client()
    requests = requests_of(trainer, 6)
    sync = ServerPusher([client], TrainerWeights(trainer.model), SyncConfig(bucket_mb=1, timeout_s=60.0))
    begun, calls, marks = time.monotonic(), 0, []
    while (passed := time.monotonic() - begun) < 60 * MINUTES or len(marks) < 3:
        if calls % CALLS_A_PUSH == 0:
            sync.push(1 + calls // CALLS_A_PUSH)
        assert len(client.infer(payload(requests, 2))) == len(requests)
        with pytest.raises(RolloutError):
            client.infer(payload(requests[:1], -1))
        calls += 1
        if passed > 60 * MINUTES * (len(marks) + 1) / 4:
            marks.append(held(server, calls))
    first, last = marks[0], held(server, calls)
    sync.close()
    client.close()
    grown, more = last.memory - first.memory, last.calls - first.calls
    seen(
        f"{last.calls} calls, {last.calls // CALLS_A_PUSH} pushes: {last.memory >> 20} MiB; since call {first.calls} "
        f"{grown / 1024 / more:.1f} KiB a call more, {last.files - first.files} files, "
        f"{last.threads - first.threads} threads"
    )
    assert grown < KEPT_ONCE + GROWTH_A_CALL * more, marks
    assert last.files <= first.files + 4 and last.threads <= first.threads + 4, marks
