"""Requests to ``coordexp serve`` that it must refuse, over a real uvicorn and without an engine."""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from PIL import Image, ImageFile
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from coordexp.engine.server import admission, served_engine
from coordexp.engine.server.admission import Admission
from coordexp.engine.server.app import RolloutServer
from coordexp.engine.server.served_engine import Heartbeat
from coordexp.engine.wire.engine_process import MEDIA_CONNECTOR, image_threads
from coordexp.engine.wire.protocol import RequestRefused, open_image
from coordexp.errors import RolloutError, ServerTimeout
from support.settings import client_to, serve_options_of


class Engine:
    """Answers heartbeats unless ``hangs``; samples a token between two of them unless it stalls."""

    world_size = 1
    guarded = takes_class_names = adapted = False

    def __init__(self) -> None:
        self.hangs = self.stalls = self.answers = False
        self.num_tokens = self.num_running = 0

    def render(self, prompt: Any) -> Any:
        return prompt

    async def num_sampled(self) -> list[int]:
        while self.hangs:
            await asyncio.sleep(0.01)
        self.num_tokens += not self.stalls
        return [self.num_tokens]

    def is_answering(self, rank: int) -> bool:
        return self.answers

    async def answer(self, *_: Any) -> None:
        self.num_running += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.num_running -= 1

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    options = serve_options_of("trainer.example", group_port=1, push_wait_s=5.0)
    served: Any = engine
    prompts: Any = SimpleNamespace(build=lambda request: {"prompt": "p"})
    server = RolloutServer(options, served, prompts)
    server.heartbeat = Heartbeat(served, every_s=0.05)
    app = server.app(body_s=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "most_connections", lambda: 12)
        patch.setattr(admission.BoundedProtocol, "head_s", 1.0)
        yield from running_at(admission.bounded_config(app))


def running_at(config: uvicorn.Config) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[listener])), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    running.should_exit = True
    thread.join(10)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:80"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "trainer.example:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        *[({"Host": host}, 400) for host in ("[", "[::1", "[1]", "]", "a:b", "a:99999", "::1", "a/b", "u@localhost")],
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_without_a_token_web_pages_are_refused(headers: dict[str, str], status: int, url: str) -> None:
    assert httpx.get(f"{url}/get_world_size/", headers=headers, trust_env=False).status_code == status


def test_probes_may_send_head(url: str) -> None:
    for path in ("/health", "/health/"):
        reply = httpx.head(f"{url}{path}", trust_env=False)
        assert (reply.status_code, reply.content) == (200, b"")


def test_a_client_cannot_fill_the_log() -> None:
    lines: list[str] = []
    logger = logging.Logger("flooded")
    logger.addFilter(admission.FewLines(most=3, every_s=0.2))
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    for attempt in range(50):
        logger.warning("refused %d", attempt)
        logger.warning("another kind")
    assert lines == ["refused 0", "another kind", "refused 1", "another kind", "refused 2", "another kind"]
    time.sleep(0.25)
    logger.warning("refused %d", 50)
    assert lines[6:] == ["refused 50 (47 such lines were left out)"]


def test_malformed_requests_are_logged_in_few_lines(url: str, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    for _ in range(60):
        with socket.create_connection((host, int(port)), timeout=30) as client:
            client.sendall(b"\x00\xff nothing\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 400")
    assert 1 <= sum("Invalid HTTP request" in line for line in caplog.messages) <= 20


@pytest.mark.parametrize(
    "config",
    ['{"seed": 18446744073709551616}', '{"seed": -1}', '{"max_tokens": 1' + "0" * 30 + "}", '{"temperature": NaN}',
     '{"top_p": Infinity}', '{"repetition_penalty": NaN}', '{"top_k": 1' + "0" * 30 + "}"],
)  # fmt: skip
def test_invalid_numbers_are_refused_with_422(config: str, url: str) -> None:
    body = '{"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}], "request_config": ' + config + "}"
    reply = httpx.post(f"{url}/infer/", content=body, headers={"Content-Type": "application/json"}, trust_env=False)
    assert reply.status_code == 422 and "request_config" in reply.json()["error"], reply.text


@pytest.mark.parametrize("body", ["", "{", "[" * 100_000, '"\\ud800"', '{"infer_requests": [{"messages": 3}]}'])
def test_invalid_bodies_are_refused(body: str, url: str) -> None:
    reply = httpx.post(f"{url}/infer/", content=body, headers={"Content-Type": "application/json"}, trust_env=False)
    assert 400 <= reply.status_code < 500, reply.text


def test_a_server_without_class_names_refuses_them(url: str) -> None:
    request = {"messages": [{"role": "user", "content": "a"}], "data_dict": {"coordexp_names": ["cat"]}}
    reply = httpx.post(f"{url}/infer/", json={"infer_requests": [request]}, trust_env=False)
    assert reply.status_code == 400 and "names" in reply.text


@pytest.mark.parametrize(
    ("method", "path", "kind", "status", "error"),
    [
        ("POST", "/infer/", "application/x-www-form-urlencoded", 415, "Content-Type: application/json"),
        ("POST", "/infer/", "application/json", 400, "parsing the body"),
        ("GET", "/infer/", "application/json", 405, "Method Not Allowed"),
        ("GET", "/nothing/", "application/json", 404, "Not Found"),
    ],
)
def test_every_refusal_has_the_documented_form(
    method: str, path: str, kind: str, status: int, error: str, url: str
) -> None:
    headers = {"Content-Type": kind}
    reply = httpx.request(method, f"{url}{path}", content="[" * 100_000, headers=headers, trust_env=False)
    assert reply.status_code == status and error in reply.json()["error"], reply.text


@pytest.mark.parametrize("replies", [False, True], ids=["no reply yet", "vLLM's own reply"])
def test_an_internal_error_is_logged_once_and_keeps_the_connection(
    replies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if replies:
            await send({"type": "http.response.start", "status": 500, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        raise OSError("a mistake")

    admitted, addresses = Admission(app, None, "localhost", 1.0), set()
    for url in running_at(admission.bounded_config(admitted, lifespan="off")):
        with httpx.Client(trust_env=False) as client:
            for _ in range(3):
                reply = client.get(f"{url}/get_world_size/")
                assert reply.status_code == 500 and replies != ("a mistake" in reply.text)
                addresses.add(reply.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(addresses) == 1
    assert [record.name for record in caplog.records if record.exc_info] == ["coordexp.engine.server.admission"] * 3


def test_a_body_that_is_never_sent_times_out(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"POST /infer/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_a_head_that_does_not_arrive_closes_its_connection(sent: bytes, url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(sent)
        began = time.monotonic()
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""
        assert 0.5 < time.monotonic() - began < 8


def test_silent_connections_do_not_keep_others_out(url: str) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        for _ in range(60):
            with suppress(OSError):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        deadline = time.monotonic() + 10
        while True:  # until the first of them have been closed
            with suppress(httpx.TransportError):
                assert httpx.get(f"{url}/health/", trust_env=False).status_code == 200
                return
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("path", ["/health", "/health/", "/infer/"])
def test_a_body_is_not_read_before_its_token(path: str) -> None:
    async def no_app(*_: Any) -> None:
        raise AssertionError("the request was let in")

    async def no_body() -> Any:
        raise AssertionError("the body was read")

    replies: list[Any] = []

    async def send(message: Any) -> None:
        replies.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"content-length", b"2000000000")],
             "query_string": b"", "server": ("127.0.0.1", 80), "scheme": "http"}  # fmt: skip
    asyncio.run(Admission(no_app, "secret", "localhost", 30.0)(scope, no_body, send))
    assert replies[0]["status"] == 401


@pytest.mark.parametrize(
    ("authorization", "status"),
    [("Bearer secret", 200), ("bearer secret", 200), ("Bearer Secret", 401), ("Basic secret", 401), ("secret", 401)],
)
def test_the_scheme_of_a_token_is_read_in_any_case(authorization: str, status: int) -> None:
    """RFC 9110, 11.1."""
    replies: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        replies.append(message)

    scope = {"type": "http", "method": "GET", "path": "/get_world_size/", "query_string": b"", "scheme": "http",
             "headers": [(b"authorization", authorization.encode())], "server": ("127.0.0.1", 80)}  # fmt: skip
    asyncio.run(Admission(app, "secret", "localhost", 30.0)(scope, None, send))
    assert replies[0]["status"] == status


def test_bodies_of_all_connections_share_one_budget() -> None:
    """Two of 2 GiB fit; the third is refused until one is answered."""
    statuses: list[int] = []

    async def call(admission: Admission, answer: asyncio.Event) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "method": "POST", "path": "/infer/", "query_string": b"", "scheme": "http",
                 "headers": [(b"content-length", b"2147483648"), (b"host", b"localhost")],
                 "server": ("127.0.0.1", 80), "answer": answer}  # fmt: skip
        await admission(scope, receive, send)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await scope["answer"].wait()

    async def run() -> None:
        admission, answer, at_once = Admission(app, None, "localhost", 30.0), asyncio.Event(), asyncio.Event()
        at_once.set()
        waiting = [asyncio.create_task(call(admission, answer)) for _ in range(2)]
        await asyncio.sleep(0.05)
        await call(admission, at_once)
        assert statuses[0] == 503
        answer.set()
        await asyncio.gather(*waiting)
        statuses.clear()
        await call(admission, at_once)
        assert statuses == []  # let in

    asyncio.run(run())


@pytest.mark.parametrize("image", ["/" + "a/" * 2500 + "b.png", "/tmp/\x00.png", "/proc/self/mem"])
def test_a_path_that_is_no_image_is_the_clients_mistake(image: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        open_image(image)
    assert refused.value.status == 400


def test_an_abandoned_request_is_cancelled(url: str, engine: Engine) -> None:
    call = {"infer_requests": [{"messages": [{"role": "user", "content": "a"}]}] * 2}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/infer/", json=call, timeout=0.5, trust_env=False)
    deadline = time.monotonic() + 10
    while engine.num_running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.num_running == 0


def test_a_bucket_without_a_group_is_refused(url: str) -> None:
    reply = httpx.post(f"{url}/update_flattened_params/", json={"metadatas": [{"name": "a"}]}, trust_env=False)
    assert reply.status_code == 409 and "no weight group is open" in reply.json()["error"]


def test_a_hung_engine_in_a_live_process_is_reported(url: str, engine: Engine) -> None:
    client = client_to(url, 1, timeout_s=5.0)
    assert client.engine_stall_seconds() < 1.0
    engine.hangs = True
    time.sleep(1.2)
    assert client.engine_stall_seconds() > 1.0
    engine.hangs = False
    time.sleep(0.3)
    assert client.engine_stall_seconds() < 1.0


def test_an_engine_that_samples_no_token_is_reported(url: str, engine: Engine) -> None:
    """Only while requests are pending: an idle engine samples nothing."""
    client = client_to(url, 1, timeout_s=5.0)
    before = httpx.get(f"{url}/health/", trust_env=False).json()["num_tokens"]
    engine.answers = True
    time.sleep(1.2)
    assert client.engine_stall_seconds() < 1.0
    assert httpx.get(f"{url}/health/", trust_env=False).json()["num_tokens"] > before
    engine.stalls = True
    time.sleep(1.2)
    said = httpx.get(f"{url}/health/", trust_env=False).json()
    assert client.engine_stall_seconds() > 1.0 > said["engine_silent_s"] and said["engine_tokenless_s"] > 1.0
    engine.answers = False
    time.sleep(0.3)
    assert client.engine_stall_seconds() < 1.0


@pytest.mark.parametrize(
    ("dies", "timeout_s", "error"), [(True, 60.0, EngineDeadError), (False, 0.1, RolloutError)], ids=["dies", "hangs"]
)
def test_a_call_ends_when_its_engine_dies(
    dies: bool, timeout_s: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_engine, "ALIVE_S", 0.02)
    begun = time.monotonic()

    async def never(*_: Any) -> None:
        await asyncio.sleep(600)

    async def check_health() -> None:
        if dies and time.monotonic() > begun + 0.2:
            raise EngineDeadError

    llm = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=never), check_health=check_health)
    with pytest.raises(error):
        asyncio.run(served_engine.ServedEngine(llm, 1, False).workers("coordexp_status", timeout_s=timeout_s))
    assert time.monotonic() - begun < 20


def data_url(image: Image.Image, kind: str, **options: Any) -> str:
    packed = io.BytesIO()
    image.save(packed, format=kind, **options)
    return f"DATA:image/{kind};base64,{base64.b64encode(packed.getvalue()).decode()}"


SMALL = Image.new("RGB", (4, 2), "red")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        (data_url(Image.new("I;16", (4, 2), 40_000), "png"), "not 8-bit"),
        (data_url(SMALL, "gif", save_all=True, append_images=[Image.new("RGB", (4, 2), "blue")]), "2 frames"),
        ("file:///etc/passwd", "send images as data URLs"),
        ("http://127.0.0.1:1/a.png", "send images as data URLs"),
        (data_url(SMALL, "png"), None),
    ],
    ids=["16 bits", "animation", "file", "address", "fine"],
)
def test_images_of_openai_requests_are_opened_as_those_of_the_trainer(address: str, problem: str | None) -> None:
    importlib.import_module("coordexp.engine.server.openai")
    connector = MEDIA_CONNECTOR_REGISTRY.load(MEDIA_CONNECTOR)
    if problem is None:
        assert asyncio.run(connector.fetch_image_async(address)).tobytes() == SMALL.tobytes()
        return
    with pytest.raises(ValueError, match=problem):  # of which vLLM makes a 400
        asyncio.run(connector.fetch_image_async(address))


def test_an_image_with_too_many_pixels_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = io.BytesIO()
    Image.new("1", (13_000, 13_000)).save(packed, format="PNG")
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(RequestRefused, match="13000x13000 pixels, and at most 36,000,000"):
        open_image(base64.b64encode(packed.getvalue()).decode())


@pytest.mark.parametrize("sign", ["engine_silent_s", "engine_tokenless_s"])
def test_the_trainer_stops_when_the_servers_engine_stalls(sign: str) -> None:
    from coordexp.engine.trainer.server_backend import LivenessWatch
    from support.fake_servers import FakeRolloutServer

    with FakeRolloutServer(1) as fake:
        fake.reply = lambda path, body: (200, {"status": "ok", "engine_silent_s": 0.1, sign: 7.5})  # type: ignore[method-assign]
        LivenessWatch({0: client_to(fake.url, 1)}, 8.0).check({0})
        with pytest.raises(ServerTimeout, match="its engine has made no progress for 8 s"):
            LivenessWatch({0: client_to(fake.url, 1)}, 7.0).check({0, 1})


def test_a_server_decodes_at_most_eight_images_per_engine_and_no_more_than_it_has_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for cores, engines, threads in ((2, 1, 2), (64, 1, 8), (64, 3, 24)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, count=cores: set(range(count)))
        assert image_threads(engines) == threads
