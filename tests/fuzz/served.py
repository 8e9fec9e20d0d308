"""Requests to ``coordexp serve`` by its own OpenAPI schema, over a socket, with changes of bodies, heads and bytes."""

from __future__ import annotations

import base64
import io
import json
import logging
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image

from coordexp.engine.server import admission
from coordexp.engine.server.app import RolloutServer
from coordexp.engine.wire.protocol import PromptBuilder
from faults.test_admission import running_at
from fuzz.mutations import ODD, change_bytes, change_words, mutate
from support.settings import serve_options_of

TOKEN = "a-secret-token"
WAIT_S = 0.3  # of the server for the rest of a request
ANSWER_S = 20.0
HOSTS = ("127.0.0.1", "127.0.0.1:80", "localhost", "evil.example", "", "[", "]", "[::1", "[1]", "[::1]:99999", "::1",
         "a:b", "a/health?", "u@localhost", "\u2100", "é", "a\\b", "[v1.a]", "%5b", "0x7f.1", "a" * 3000)  # fmt: skip


class Schema:
    """Random values by a JSON schema, and some that it forbids."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def value(self, draw: random.Random, schema: Mapping[str, Any], depth: int = 0) -> Any:
        if depth > 6 or draw.random() < 0.04:
            return draw.choice(ODD)
        if "$ref" in schema:
            return self.value(draw, self._definitions[schema["$ref"].rpartition("/")[2]], depth)
        for key in ("anyOf", "allOf", "oneOf"):
            if key in schema:
                return self.value(draw, draw.choice(schema[key]), depth)
        if "const" in schema or "enum" in schema:
            return draw.choice(schema.get("enum", [schema.get("const")]))
        match schema.get("type"):
            case "object":
                needed, made = schema.get("required", ()), {}
                for name, inner in schema.get("properties", {}).items():
                    if draw.random() < (0.95 if name in needed else 0.3):
                        made[name] = self.value(draw, inner, depth + 1)
                if schema.get("additionalProperties") is not False and draw.random() < 0.3:
                    made[draw.choice(("role", "content", "type", "a", ""))] = draw.choice(ODD)
                return made
            case "array":
                count = draw.choice((0, 1, 1, 2, 3))
                return [self.value(draw, schema.get("items", {}), depth + 1) for _ in range(count)]
            case "integer" | "number" as kind:
                low, high = (schema.get(key, default) for key, default in (("minimum", 0), ("maximum", 1 << 31)))
                number = draw.choice((low, high, low - 1, high + 1, draw.uniform(0, 9), 1))
                return int(number) if kind == "integer" else number
            case "string":
                return draw.choice(("a", "", "user", "float32", "<image>", "/etc/passwd", "\ud800", "é" * 300))
            case "boolean":
                return draw.random() < 0.5
            case _:
                return draw.choice(ODD)


class Engine(SimpleNamespace):
    """Answers at once; its worker takes nothing."""

    def render(self, prompt: Any) -> Any:
        return prompt

    async def answer(self, prompt: Any, sampling: Any, names: Any) -> Any:
        answer = SimpleNamespace(token_ids=[3], text="a", finish_reason="stop")
        return SimpleNamespace(request_id="id", prompt_token_ids=[1, 2], outputs=[answer])

    async def pop_triggers(self, ids: Any) -> set[str]:
        return set()

    async def workers(self, method: str, *_: Any, **__: Any) -> list[Any]:
        if method == "coordexp_status":
            return [{"checksum": None, "repeat_terminate": {"active": False, "config": None}}]
        return [["a"]]

    async def reset_caches(self, *_: Any) -> None: ...

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


class Processor:
    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return str(messages)


class Listener(logging.Handler):
    """Notes tracebacks in the server's log."""

    def __init__(self) -> None:
        super().__init__()
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        if "Traceback" in text:
            self.tracebacks.append(text)


class Requests:
    """A server without an engine that answers the requests of :meth:`change`."""

    def __init__(self, application: Any, ports: tuple[int, int], log: Listener) -> None:
        schema = application.openapi()
        self._schema = Schema(schema["components"]["schemas"])
        self._routes = [
            (method.upper(), path, operation)
            for path, operations in schema["paths"].items()
            for method, operation in operations.items()
        ]
        self._port, self._open_port = ports  # of a server with a token, and of one without
        self._log = log
        picture = io.BytesIO()
        Image.new("RGB", (30, 20)).save(picture, "PNG")
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}
        infer = {"messages": [message], "images": [base64.b64encode(picture.getvalue()).decode()]}
        self._sound = json.dumps({"infer_requests": [infer], "request_config": {"max_tokens": 3}}).encode()

    def change(self, draw: random.Random) -> tuple[Path, bytes]:
        """A name for a request, and its bytes."""
        method, path, operation = draw.choice(self._routes)
        body = b""
        if draw.random() < 0.4:
            method, path, body = "POST", "/infer/", mutate(draw, self._sound)
        elif content := operation.get("requestBody"):
            schema = content["content"]["application/json"]["schema"]
            body = json.dumps(self._schema.value(draw, schema)).encode()
            body = mutate(draw, body) if draw.random() < 0.3 else body
        head = self._head(draw, method, path.replace("{cache}", draw.choice(("prefix", "mm", "x", ""))), len(body))
        return Path("request.http"), head + body

    def _head(self, draw: random.Random, method: str, path: str, size: int) -> bytes:
        method = draw.choice(("GET", "HEAD", "PUT", "OPTIONS", "BREW", "")) if draw.random() < 0.1 else method
        key = TOKEN if draw.random() < 0.9 else draw.choice(("", "wrong", "é"))
        headers = {"Host": "127.0.0.1", "Authorization": f"Bearer {key}", "Content-Type": "application/json",
                   "Content-Length": str(size), "Connection": "close"}  # fmt: skip
        if draw.random() < 0.2:
            del headers["Authorization"]
        if "Authorization" not in headers or draw.random() < 0.1:
            headers["Host"] = draw.choice(HOSTS)
        if draw.random() < 0.3:
            headers |= draw.choice((
                {"Content-Length": str(draw.choice((-1, 0, size + 5, 1 << 64, "1e3", "")))},
                {"Transfer-Encoding": "chunked"}, {"Expect": "100-continue"}, {"Upgrade": "websocket"},
                {"Origin": "null"}, {"Content-Type": "text/plain; charset=\xff"}, {"Cookie": "a" * 5000},
                {"Accept-Encoding": "\x00"}, {"X\u2028": "a"}, {"Content-Encoding": "gzip"},
            ))  # fmt: skip
        if draw.random() < 0.05:
            path += draw.choice(("?\xff", "?a=%ff", "//x", "?[", "/%00", "#"))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join(lines).encode() + b"\r\n\r\n"
        if draw.random() < 0.2:
            head = draw.choice((change_bytes, change_words))(draw, head)
        return head

    def read(self, _: Path, request: bytes) -> str | None:
        """The server's status if it refuses ``request``. AssertionError: 5xx, a traceback in its log, or an answer
        without the token that is due."""
        reply = b""
        has_key = b"Authorization" in request
        port = self._port if has_key else self._open_port
        client = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        with client, suppress(ConnectionError):
            client.sendall(request)
            while part := client.recv(1 << 16):
                reply += part
        tracebacks, self._log.tracebacks = self._log.tracebacks, []
        assert not tracebacks, tracebacks[0]
        if not reply:
            return "closed"
        status = reply.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").split(b"\r\n", 1)[0].split()
        assert len(status) > 1 and status[0] == b"HTTP/1.1" and 200 <= int(status[1]) < 500, reply[:2000]
        assert b"Traceback" not in reply and TOKEN.encode() not in reply, reply[:2000]
        if int(status[1]) >= 400:
            return status[1].decode()
        assert not has_key or TOKEN.encode() in request or b"/health" in request, reply[:2000]
        return None


@contextmanager
def served_requests() -> Iterator[Requests]:
    """Requests to ``coordexp serve``'s own application in a thread."""
    applications = []
    for api_key in (TOKEN, None):
        options = serve_options_of("127.0.0.1", group_port=5, push_wait_s=0.2, api_key=api_key)
        engine: Any = Engine(world_size=1, guarded=False, takes_class_names=False, adapted=False)
        server = RolloutServer(options, engine, PromptBuilder(Processor()))
        applications.append(server.app(body_s=WAIT_S))
    head_s = admission.BoundedProtocol.head_s
    log = Listener()
    logging.getLogger().addHandler(log)
    admission.BoundedProtocol.head_s = WAIT_S
    serving = [running_at(admission.bounded_config(application)) for application in applications]
    try:
        ports = [int(next(one).rpartition(":")[2]) for one in serving]
        yield Requests(applications[0], (ports[0], ports[1]), log)
    finally:
        admission.BoundedProtocol.head_s = head_s
        for one in serving:
            for _ in one:
                pass
        logging.getLogger().removeHandler(log)
