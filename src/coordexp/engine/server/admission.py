"""Limits on clients of ``coordexp serve``: access control, error replies, and limits on connections, the time that a
request's head and body may take, and the lines of the log that clients cause."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import secrets
import socket
import time
from typing import Any

import uvicorn
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from coordexp.addresses import split_url
from coordexp.engine.wire.protocol import RequestRefused
from coordexp.errors import ConfigError, CoordExpError
from coordexp.printable import printable

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 2 << 30
MAX_BODIES_BYTES = 4 << 30  # of all requests that are read or answered
# A body may take this long, plus its size at the slowest accepted speed.
BODY_S = 30.0
SLOWEST_BYTES_S = 1 << 20
HEAD_S = 20.0  # for the request line and headers; a connection without either is closed
MOST_CONNECTIONS = 1024
_OTHER_FILES = 128  # that the process needs next to connections
OPEN_PATHS = {"/health", "/health/"}  # GET and HEAD need no token: probes have none


class Admission:
    """ASGI middleware: checks the token, and that bodies have a Content-Length, are not too large and arrive in time.

    Without a token it refuses requests that a web page can make a browser send: those with an Origin header, and those
    to another host name, which the page's own name server could resolve to this machine.
    """

    def __init__(self, app: Any, api_key: str | None, host: str, body_s: float) -> None:
        self._app = app
        self._api_key = api_key
        self._host = host.lower()
        self._body_s = body_s
        self._held_bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, held = Request(scope, receive), 0
        try:
            _check_address(request)
            if scope["path"] not in OPEN_PATHS or request.method not in ("GET", "HEAD"):
                self._check_sender(request)
            if request.method == "POST":
                size = _size_of_body(request)
                if self._held_bytes + size > MAX_BODIES_BYTES:
                    busy = f"requests with {self._held_bytes >> 20} MiB are being answered; try again"
                    raise RequestRefused(503, busy)
                held = size  # until the request is answered
                self._held_bytes += held
                receive = await self._whole_body(request, size)
        except RequestRefused as error:
            reply = refusal(error.status, str(error))
            reply.headers["Connection"] = "close"  # the body may still arrive
            await reply(scope, receive, send)
        else:
            await self._answer(scope, receive, send)
        finally:
            self._held_bytes -= held

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        # Errors end here: Starlette would raise them once more after its reply, on which uvicorn logs them again and
        # closes the connection, often under the client's next request.
        last: Any = None

        async def sending(message: Any) -> None:
            nonlocal last
            last = message
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if last is not None and (last["type"] != "http.response.body" or last.get("more_body")):
                raise  # half a reply
            reply = await reply_to_error(Request(scope), error)
            if last is None:
                await reply(scope, receive, send)

    def _check_sender(self, request: Request) -> None:
        if self._api_key is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not secrets.compare_digest(token.encode(), self._api_key.encode()):
                raise RequestRefused(401, "a bearer token is required: Authorization: Bearer …")
            return
        advice = "set rollout_matching.vllm.server.api_key_env"
        if "Origin" in request.headers:
            raise RequestRefused(403, f"requests of web pages (Origin) are refused without a token; {advice}")
        name = split_url(f"//{request.headers.get('Host', '')}").hostname or ""
        if name in {"localhost", self._host, socket.gethostname().lower(), socket.getfqdn().lower()}:
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            raise RequestRefused(
                403, f"this server has no token and is not called {name!r}: name it as in base_url, or {advice}"
            ) from None

    async def _whole_body(self, request: Request, num_bytes: int) -> Any:
        # Read the body. Returns a ``receive`` that replays it.
        messages: list[Any] = []
        try:
            async with asyncio.timeout(self._body_s + num_bytes / SLOWEST_BYTES_S):
                while not messages or messages[-1].get("more_body"):
                    messages.append(await request.receive())
        except TimeoutError as error:
            raise RequestRefused(408, f"the body of {num_bytes} bytes did not arrive in time") from error
        messages.reverse()

        async def replay() -> Any:
            return messages.pop() if messages else await request.receive()

        return replay


def _check_address(request: Request) -> None:
    # Starlette and FastAPI parse both again, with errors of their own.
    host = request.headers.get("Host", "")
    try:
        sound = split_url(f"//{host}").netloc == host and "@" not in host
    except ConfigError:
        sound = False
    if not sound or not request.scope["query_string"].isascii():
        raise RequestRefused(400, "the Host header or the address is malformed")


def _size_of_body(request: Request) -> int:
    length = request.headers.get("Content-Length", "")
    if not (length.isascii() and length.isdigit()):
        raise RequestRefused(411, "Content-Length is required")
    num_bytes = int(length[:20])
    if num_bytes > MAX_BODY_BYTES:
        raise RequestRefused(413, f"more than {MAX_BODY_BYTES >> 20} MiB in one request")
    return num_bytes


def refusal(status: int, message: str) -> JSONResponse:
    # Lone surrogates, which UTF-8 cannot encode, are escaped.
    return JSONResponse({"error": message.encode("utf-8", "backslashreplace").decode()}, status)


async def reply_to_invalid(request: Request, error: Exception) -> JSONResponse:
    # FastAPI's own reply repeats the input, which may not be valid JSON (NaN).
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):  # FastAPI would call each field missing
        return refusal(415, "send JSON, with the header Content-Type: application/json")
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return refusal(422, f"{place}: {first['msg']}{more}"[:1000])


async def reply_to_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    reply = refusal(error.status_code, str(error.detail))
    reply.headers.update(error.headers or {})
    return reply


async def reply_to_error(request: Request, error: Exception) -> JSONResponse:
    ours = isinstance(error, CoordExpError)
    if isinstance(error, RequestRefused):
        status = error.status
    elif isinstance(error, VLLMValidationError):
        status = 400  # so that the trainer does not retry
    else:
        status = 503 if isinstance(error, EngineDeadError) else 500
    path, message = printable(request.scope["path"])[:200], printable(error)[:1000]
    trace = None if ours or status == 400 else error  # of a client's mistake the message says all
    logger.warning("%s: %s: %s", path, type(error).__name__, message, exc_info=trace)
    return refusal(status, str(error) if ours else f"{type(error).__name__}: {error}")


# -- connections


class FewLines(logging.Filter):
    """Lets at most ``most`` lines of a kind pass in ``every_s`` seconds, so that clients cannot fill the disk; the next
    one that passes counts the others. A kind is a message before its arguments are inserted."""

    def __init__(self, most: int = 20, every_s: float = 60.0) -> None:
        super().__init__()
        self._most = most
        self._every_s = every_s
        self._since: dict[str, tuple[float, int]] = {}  # by kind: when the count began, and the count

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), time.monotonic()
        began, count = self._since.get(kind, (now, 0))
        if now - began >= self._every_s:
            if (left_out := count - self._most) > 0:
                record.msg, record.args = f"{record.getMessage()} ({left_out} such lines were left out)", None
            began, count = now, 0
        self._since[kind] = began, count + 1
        return count < self._most


_FEW_LINES = FewLines()


def bounded_config(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration of ``app`` with these limits; ``options``: uvicorn's own."""
    for name in ("uvicorn.error", __name__):
        logging.getLogger(name).addFilter(_FEW_LINES)
    protocol: Any = type("Bounded", (BoundedProtocol,), {"most": most_connections()})
    return uvicorn.Config(app, http=protocol, log_config=None, access_log=False, **options)


def most_connections() -> int:
    """Connections at a time, fewer than the files that this process may open: one more must not stop `accept`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(16, min(MOST_CONNECTIONS, soft - _OTHER_FILES))


_Protocol: Any = AutoHTTPProtocol  # httptools' or h11's, whichever is installed


class BoundedProtocol(_Protocol):
    """uvicorn's HTTP protocol with a deadline for each request's head, and a limit of connections. uvicorn itself waits
    for ever for the rest of a head, and counts connections only once they have sent one."""

    head_s = HEAD_S
    most = MOST_CONNECTIONS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            logger.warning("a connection was closed: %d are open", self.most)
            transport.abort()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()  # the head is there; the body has a deadline of its own
        elif self._deadline is None:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
