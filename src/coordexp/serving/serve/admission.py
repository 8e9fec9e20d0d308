"""Who may call ``coordexp serve``, and how much and how slowly they may send."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.responses import JSONResponse

MAX_BODY_BYTES = 2 << 30
OPEN_PATHS = {"/health", "/health/"}  # for probes that hold no token
BODY_S = 30.0
SLOWEST_BYTES_S = 1 << 20


def admission(api_key: str | None, host: str) -> Callable[..., Awaitable[Any]]:
    """Middleware. Without ``api_key``, requests that a web page can make a browser send are refused: those that name
    an origin, and those for a name that is not this server's (``host``), which a page can let point here."""

    async def admit(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        if request.url.path not in OPEN_PATHS:
            if api_key is not None:
                scheme, _, token = request.headers.get("Authorization", "").partition(" ")
                if scheme != "Bearer" or not secrets.compare_digest(token.encode(), api_key.encode()):
                    return refusal(401, "a bearer token is required: Authorization: Bearer …")
            elif problem := _sent_by_a_page(request, host):
                return refusal(403, problem)
        if request.method == "POST":
            length = request.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit()):
                return refusal(411, "Content-Length is required")
            if int(length[:20]) > MAX_BODY_BYTES:
                return refusal(413, f"more than {MAX_BODY_BYTES >> 20} MiB in one request")
        return await call_next(request)

    return admit


def refusal(status: int, message: str) -> JSONResponse:
    """The one form of errors. What cannot be written in UTF-8 is shown escaped."""
    return JSONResponse({"error": message.encode("utf-8", "backslashreplace").decode()}, status)


def _sent_by_a_page(request: Request, host: str) -> str | None:
    if "Origin" in request.headers:
        return "a web page asks (Origin), and this server has no token; set rollout_matching.vllm.server.api_key_env"
    name = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
    if name in {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}:
        return None
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return (
            f"this server has no token and is not called {name!r}: name it as in base_url, or set "
            "rollout_matching.vllm.server.api_key_env"
        )
    return None


class WholeBodyInTime:
    """ASGI middleware: a body is there within half a minute and a second for each MiB it announces, or is refused."""

    def __init__(self, app: Any, body_s: float = BODY_S) -> None:
        self._app = app
        self._body_s = body_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        announced = int(dict(scope["headers"]).get(b"content-length", b"0") or 0)
        try:
            messages = await asyncio.wait_for(_whole(receive), self._body_s + announced / SLOWEST_BYTES_S)
        except TimeoutError:
            answer = refusal(408, f"of {announced} bytes that were announced not all came in time")
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        waiting = iter(messages)

        async def replay() -> Any:
            for message in waiting:
                return message
            return await receive()

        await self._app(scope, replay, send)


async def _whole(receive: Any) -> list[Any]:
    messages = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body"):
            return messages
