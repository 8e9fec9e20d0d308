"""Changed requests to ``coordexp serve`` are answered or refused, without a traceback in its log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from coordexp.engine.server.app import RolloutServer
from fuzz.campaign import spend
from fuzz.served import Engine, served_requests
from support.settings import serve_options_of

SECONDS = 2.0


def test_changed_requests_are_answered_or_refused(tmp_path: Path) -> None:
    with served_requests() as requests:
        tally = spend("HTTP", requests, SECONDS, tmp_path / "failed")
    assert tally.inputs > 10 and not tally.failures, tally.failures[0]


def test_an_unchanged_request_is_answered() -> None:
    engine: Any = Engine(world_size=1, guarded=False, takes_class_names=False, adapted=False)
    prompts: Any = SimpleNamespace(build=lambda request: {"prompt": "p"})
    server = RolloutServer(serve_options_of("127.0.0.1", group_port=5, push_wait_s=0.2), engine, prompts)
    request = {"messages": [{"role": "user", "content": "a"}], "data_dict": {"coordexp_names": []}}

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answered = await client.post("/infer/", json={"infer_requests": [request]})
            return answered, await client.post("/process_weights_after_loading/", json={})

    answered, refused = asyncio.run(ask())
    assert answered.json()[0]["response"]["choices"][0]["message"]["content"] == "a"
    assert refused.status_code == 409 and "no push is under way" in refused.text
