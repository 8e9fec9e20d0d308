"""``swift rollout`` with our plugin: a worker that hangs is noticed though the HTTP process answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from coordexp.engine.server.swift_pipes import HEARTBEAT_PATH, SerializeRequests, SharedHeartbeat, with_heartbeat
from coordexp.errors import ServerTimeout

WORKER = """
import sys, time
from coordexp.engine.server.swift_pipes import with_heartbeat
step = with_heartbeat(lambda: time.sleep(0.05), 1)
for _ in range(10):
    step()
print("stepped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> SharedHeartbeat:
    monkeypatch.setenv(HEARTBEAT_PATH, "")
    return SharedHeartbeat.create(2)


def test_a_busy_worker_without_steps_is_reported_as_silent(page: SharedHeartbeat) -> None:
    """The worker is another process, which waits after its tenth step."""
    path = Path(os.environ[HEARTBEAT_PATH])
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    busy_since = {1: time.monotonic()}
    assert worker.stdout.readline() == b"stepped\n"
    page.forget_name()
    assert not path.exists() and page.num_steps() == 10
    before = page.silent_s(busy_since)
    time.sleep(0.5)
    assert page.silent_s(busy_since) >= before + 0.5
    assert page.silent_s({}) == 0.0, "idle workers do no steps"
    worker.kill()
    worker.communicate()


def test_a_new_call_is_not_reported_as_silent(page: SharedHeartbeat) -> None:
    assert page.silent_s({0: time.monotonic()}) < 1.0
    page.forget_name()


def test_without_a_heartbeat_path_an_engine_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_PATH, raising=False)
    step = object()
    assert with_heartbeat(step, 0) is step  # type: ignore[arg-type]


def test_probes_are_answered_between_sequential_requests() -> None:
    app = FastAPI()
    under_way: list[int] = []

    @app.post("/infer/")
    async def infer() -> int:
        under_way.append(1)
        most = len(under_way)
        await asyncio.sleep(0.5)
        under_way.pop()
        return most

    @app.get("/health/")
    async def health() -> int:
        return len(under_way)

    app.add_middleware(SerializeRequests)

    async def ask() -> tuple[list[int], int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            posts = [asyncio.create_task(client.post("/infer/")) for _ in range(3)]
            await asyncio.sleep(0.1)
            probe = (await client.get("/health/")).json()
            assert not any(post.done() for post in posts)
            return [(await post).json() for post in posts], probe

    assert asyncio.run(ask()) == ([1, 1, 1], 1)


def test_the_trainer_stops_when_the_heartbeat_shows_a_hung_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """And waits for a server without a heartbeat, as ms-swift without our plugin."""
    from coordexp.rollouts import RolloutRound, SeedContext
    from support.fake_servers import FakeRolloutServer
    from support.server_backends import backend_of, requests_

    monkeypatch.setattr("coordexp.engine.trainer.server_backend.WATCH_S", 0.1)
    waits: list[float] = []

    def answers_late(body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(waits[0])
        choice = {"message": {"content": ""}, "finish_reason": "length", "token_ids": [9]}
        return 200, [{"response": {"choices": [choice], "prompt_token_ids": [1, 2]}} for _ in body["infer_requests"]]

    class Hangs(FakeRolloutServer):
        def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return (200, {"engine_silent_s": 6.0}) if path == "/health/" else super().reply(path, body)

    for status, gives_up in (({"workers": []}, True), (None, False)):
        waits[:] = [5.0 if gives_up else 1.0]
        with Hangs(1, status) as fake:
            fake.infer = answers_late
            one = RolloutRound(requests_(1), SeedContext(0, 0, 0, 0))
            with backend_of([fake]) as backend:
                backend.sync_weights(1)
                if gives_up:
                    with pytest.raises(ServerTimeout, match=r"engine .* for 6 s"):
                        list(backend.generate_rounds([one]))
                else:
                    assert len(list(backend.generate_rounds([one]))) == 1
