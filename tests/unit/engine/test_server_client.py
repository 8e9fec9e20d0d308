"""The HTTP client against a small real HTTP server with scripted answers: every error names its cause and the fix."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordexp.engine.trainer.client import IDLE_S, ServerClient
from coordexp.engine.wire.engine_process import api_key_from_environment
from coordexp.errors import ConfigError, RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from support.fake_servers import JsonServer, Reply
from support.ports import free_ports
from support.settings import client_to

TOKEN = "not-to-be-shown"


class FakeServer(JsonServer):
    """Answers each endpoint with a function and records the requests."""

    def __init__(self) -> None:
        self.replies: dict[str, Callable[[], Reply]] = {}
        self.asked: list[tuple[str, Any]] = []
        super().__init__()

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        self.asked.append((path, body))
        return self.replies[path]()

    def answer(self, path: str, status: int, content: Any) -> None:
        self.replies[path] = lambda: (status, content)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def client_of(fake: FakeServer, **keys: Any) -> ServerClient:
    return client_to(fake.url + "/", 1234, **{"timeout_s": 2.0, "api_key": TOKEN, **keys})


CALL = {"infer_requests": [{"messages": []}, {"messages": []}], "request_config": {"seed": 3}}


def test_a_call_sends_the_payload_and_the_token(fake: FakeServer) -> None:
    fake.answer("/infer/", 200, [{"response": 1}, {"response": 2}])
    assert client_of(fake).infer(CALL) == [{"response": 1}, {"response": 2}]
    method, headers = fake.received
    assert (method, fake.asked) == ("POST", [("/infer/", CALL)])
    assert headers["Authorization"] == f"Bearer {TOKEN}"


def test_the_world_size_is_requested_once(fake: FakeServer) -> None:
    fake.answer("/get_world_size/", 200, {"world_size": 3})
    client = client_of(fake)
    assert (client.world_size(), client.world_size(), len(fake.asked)) == (3, 3, 1)


@pytest.mark.parametrize("reply", [{}, {"world_size": 0}, {"world_size": "3"}, {"world_size": True}, [3]])
def test_an_invalid_world_size_is_refused(fake: FakeServer, reply: Any) -> None:
    fake.answer("/get_world_size/", 200, reply)
    with pytest.raises(ServerRefused, match="is this a rollout server"):
        client_of(fake).world_size()


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (500, {"error": "worker died"}, r"status 500.*worker died.*server's log"),
        (401, b"", "api_key_env"),
        (404, b"nothing here", "is this a rollout server"),
        (307, b"", "status 307"),
        (200, b"<html>", "JSON is malformed.*<html>"),
        (200, {"detail": "x"}, "Expected `array`, got `object`"),
        (200, [{}], "1 answers to 2 requests"),
        (200, [{}, None], r"got `null` - at `\$\[1\]`"),
    ],
    ids=["error", "token", "no endpoint", "redirect", "not json", "object", "too few", "no object"],
)
def test_invalid_replies_are_refused(fake: FakeServer, status: int, content: Any, message: str) -> None:
    fake.answer("/infer/", status, content)
    with pytest.raises(ServerRefused, match=f"(?s)POST {fake.url}/infer/.*{message}") as refused:
        client_of(fake).infer(CALL)
    assert TOKEN not in str(refused.value)


def test_a_long_body_is_quoted_partly(fake: FakeServer) -> None:
    fake.answer("/infer/", 500, b"x" * 100_000)
    with pytest.raises(ServerRefused) as refused:
        client_of(fake).infer(CALL)
    assert len(str(refused.value)) < 1000


def test_a_refused_connection_is_a_clear_error() -> None:
    (port,) = free_ports(1)
    client = client_to(f"http://127.0.0.1:{port}", 1, timeout_s=2.0)
    with pytest.raises(ServerUnreachable, match=r"coordexp serve.*mode: colocate.*rollout_backend: hf"):
        client.infer(CALL)
    started = time.monotonic()
    with pytest.raises(RolloutError):
        client.wait_until_healthy(1.0)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("infer_timeout_s", [None, 0, -1.0], ids=str)
def test_without_a_timeout_answers_may_take_any_time(fake: FakeServer, infer_timeout_s: float | None) -> None:
    def slowly() -> Reply:
        time.sleep(1.0)
        return 200, b"[{}, {}]"

    fake.replies["/infer/"] = fake.replies["/health/"] = slowly
    client = client_of(fake, timeout_s=0.3, infer_timeout_s=infer_timeout_s)
    assert client.infer(CALL) == [{}, {}]
    with pytest.raises(ServerTimeout, match=r"within 0\.3 s"):
        client.health()


def test_a_starting_server_is_waited_for(fake: FakeServer) -> None:
    replies = iter([(503, b""), (503, b""), (200, b"ok")])
    fake.replies["/health/"] = lambda: next(replies)
    client_of(fake, timeout_s=10.0).wait_until_healthy()
    assert len(fake.asked) == 3


def test_a_refused_token_fails_at_once(fake: FakeServer) -> None:
    fake.answer("/health/", 401, {})
    with pytest.raises(ServerRefused, match="api_key_env"):
        client_of(fake, timeout_s=60.0).wait_until_healthy()
    assert len(fake.asked) == 1


def test_the_status_is_empty_without_a_status_endpoint(fake: FakeServer) -> None:
    fake.answer("/status/", 404, {"detail": "Not Found"})
    assert client_of(fake).status() == {}
    fake.answer("/status/", 500, {})
    with pytest.raises(ServerRefused):
        client_of(fake).status()


@pytest.mark.parametrize("reply", [[], {"status": "ok"}, {"workers": {}}, {"workers": ["ok"]}])
def test_the_status_of_another_program_is_refused(fake: FakeServer, reply: Any) -> None:
    fake.answer("/status/", 200, reply)
    with pytest.raises(ServerRefused, match=f"{fake.url}/status/.*is this a rollout server"):
        client_of(fake).status()


def test_environment_proxies_are_not_used(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    fake.answer("/health/", 200, {})
    client_of(fake).health()


def test_the_token_is_in_no_log(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    fake.answer("/infer/", 500, {})
    with caplog.at_level(logging.DEBUG), pytest.raises(ServerRefused):
        client_of(fake).infer(CALL)
    assert TOKEN not in caplog.text


def test_the_token_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key_from_environment(None) is None
    monkeypatch.delenv("SERVERS_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="SERVERS_TOKEN is not set"):
        api_key_from_environment("SERVERS_TOKEN")
    monkeypatch.setenv("SERVERS_TOKEN", f" {TOKEN}\n")
    assert api_key_from_environment("SERVERS_TOKEN") == TOKEN
    monkeypatch.setenv("SERVERS_TOKEN", "secret\x07value")
    with pytest.raises(ConfigError, match="printable") as refused:
        api_key_from_environment("SERVERS_TOKEN")
    assert "secret" not in str(refused.value)


def test_idle_connections_are_not_used_for_as_long_as_servers_keep_them() -> None:
    """A push would end where a server closes a connection while the next call is on its way."""
    uvicorn = pytest.importorskip("uvicorn")
    assert uvicorn.Config("server:app").timeout_keep_alive - IDLE_S >= 2
