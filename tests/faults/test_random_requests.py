"""Random requests to ``coordexp serve``'s own application: each is answered or refused, never an internal error."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from coordexp.engine.server.app import RolloutServer
from support.settings import serve_options_of

REQUESTS = 100
TOKEN = "a-secret-token"
PATHS = (
    *("/infer/", "/infer/", "/infer/", "/health/", "/status/", "/get_world_size/", "/init_communicator/"),
    *("/close_communicator/", "/update_flattened_params/", "/update_named_param/", "/update_adapter_flattened_param/"),
    *("/process_weights_after_loading/", "/reset_prefix_cache/", "/get_engine_type/", "/nothing/", "/../etc", "/%00"),
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1 << 31, 1 << 62, 1 << 64, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "",
    "a", "\ud800", "<image>", "\0", "é" * 100, [], [1], [[[]]], {}, {"a": {}}, "data:image/png;base64,AAAA",
    "/etc/passwd", "http://127.0.0.1/x.png",
)  # fmt: skip
NAMES = (
    *("infer_requests", "request_config", "messages", "images", "role", "content", "seed", "max_tokens", "temperature"),
    *("top_k", "stop", "uuid", "host", "port", "world_size", "first_rank", "timeout_s", "token", "metadatas", "name"),
    *("dtype", "shape", "peft_config", "weight_version", "trainer_id", "wants_checksum", "data_dict", "x"),
)


class Engine(SimpleNamespace):
    """Answers at once; its worker takes nothing."""

    def render(self, prompt: Any) -> Any:
        return prompt

    async def answer(self, prompt: Any, sampling: Any, names: Any) -> Any:
        answer = SimpleNamespace(token_ids=[3], text="a", finish_reason="stop")
        return SimpleNamespace(request_id="id", prompt_token_ids=[1, 2], outputs=[answer])

    async def pop_triggers(self, ids: Any) -> dict[str, Any]:
        return {}

    async def workers(self, method: str, *_: Any, **__: Any) -> list[Any]:
        if method == "coordexp_status":
            return [{"checksum": None, "repeat_terminate": {"active": False, "config": None}}]
        return [["a"]]

    async def reset_caches(self, *_: Any) -> None: ...

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def application() -> Any:
    options = serve_options_of("127.0.0.1", group_port=5, push_wait_s=0.2, api_key=TOKEN)
    engine: Any = Engine(world_size=1, guarded=False, takes_class_names=False, adapted=False)
    prompts: Any = SimpleNamespace(build=lambda request: {"prompt": "p"})
    return RolloutServer(options, engine, prompts).app()


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 3 or kind < 0.5:
        return draw.choice(VALUES)
    if kind < 0.7:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {draw.choice(NAMES): value(draw, depth + 1) for _ in range(draw.randint(0, 4))}


def body(draw: random.Random) -> bytes:
    """Almost a request, or random bytes."""
    kind = draw.random()
    if kind < 0.1:
        return draw.randbytes(draw.randint(0, 200))
    request = {"messages": [{"role": "user", "content": "a"}]}
    whole: Any = {"infer_requests": [request], "request_config": {"max_tokens": 3}} if kind < 0.6 else value(draw)
    if kind < 0.5:
        place = draw.choice([whole, whole["request_config"], request, request["messages"][0]])
        place[draw.choice(NAMES)] = value(draw)
    encoded = json.dumps(whole).encode()
    return encoded[: draw.randint(0, len(encoded))] if draw.random() < 0.1 else encoded


@pytest.mark.parametrize(("names", "status"), [(["cat"], 400), (["cat", ""], 400), ([], 200)])
def test_a_server_without_class_names_refuses_them(names: list[str], status: int) -> None:
    request = {"messages": [{"role": "user", "content": "a"}], "data_dict": {"coordexp_names": names}}
    headers = {"Authorization": f"Bearer {TOKEN}"}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(application())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/infer/", headers=headers, json={"infer_requests": [request]})

    reply = asyncio.run(ask())
    assert reply.status_code == status and (status == 200 or "names" in reply.text)


@pytest.mark.parametrize("seed", range(12), ids=lambda seed: f"{REQUESTS} requests, seed {seed}")
def test_every_request_is_answered_or_refused(seed: int, seen: Callable[[str], None]) -> None:
    draw, statuses = random.Random(seed), dict[int, int]()

    async def ask() -> None:
        transport = httpx.ASGITransport(application(), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for _ in range(REQUESTS):
                token = draw.choice([TOKEN] * 8 + ["wrong", ""])
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                method = draw.choice(["POST"] * 6 + ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"])
                content = body(draw)
                path = draw.choice(PATHS)
                reply = await client.request(method, path, headers=headers, content=content)
                statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
                assert reply.status_code < 500, (method, path, content, reply.text)
                assert "Traceback" not in reply.text and TOKEN not in reply.text, reply.text
                assert token == TOKEN or reply.status_code == 401 or path == "/health/", (method, path, reply.text)

    asyncio.run(ask())
    seen(", ".join(f"{count} of {status}" for status, count in sorted(statuses.items())))
