"""The HTTP face of ``coordexp serve``: ms-swift's rollout endpoints and payloads, plus ``/status/``; who may call them,
and how much and how slowly they may send.

What differs from ms-swift on purpose: errors reach the caller, ``/health/`` asks the engines, an update answers when
its bytes have arrived, and a push is committed (layouts, caches, version) by ``/process_weights_after_loading/``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from coordexp.errors import CoordExpError
from coordexp.serving.serve.engines import EngineGroup
from coordexp.serving.serve.requests import InferRequest, RequestConfig
from coordexp.serving.serve.service import CommitRequest, GroupRequest, RolloutServer
from coordexp.serving.serve.weight_lock import RequestRefused

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


logger = logging.getLogger(__name__)
Result = TypeVar("Result")
DISCONNECT_POLL_S = 0.5
STALLED_S = 120.0  # what a probe takes for a hung engine; a learner goes by its own server.timeout_s


class BucketRequest(BaseModel):
    """One bucket of weights; see ``coordexp.weight_sync.buckets``."""

    metadatas: list[dict[str, Any]] = Field(min_length=1)


class AdapterRequest(BucketRequest):
    """A LoRA adapter with PEFT's configuration."""

    peft_config: dict[str, Any]


class TensorRequest(BaseModel):
    """One tensor."""

    name: str
    dtype: str
    shape: list[int]


def build_app(server: RolloutServer) -> FastAPI:
    """The application; its engines end with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        beating = asyncio.create_task(server.heartbeat.run())
        try:
            yield
        finally:
            beating.cancel()
            server.engines.shutdown()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(Exception, _reply_to_error)
    app.add_exception_handler(CoordExpError, _reply_to_error)
    app.add_exception_handler(RequestValidationError, _reply_to_invalid)
    app.add_middleware(WholeBodyInTime)
    app.middleware("http")(admission(server.options.api_key, server.options.advertised_host))
    _add_generation(app, server)
    _add_weights(app, server)
    return app


def _add_generation(app: FastAPI, server: RolloutServer) -> None:
    @app.get("/health")
    @app.get("/health/")
    async def health() -> Any:
        try:
            await server.engines.check_health()
        except Exception as error:  # whatever vLLM raises, the probe gets to know it
            return JSONResponse({"status": "dead", "error": f"{type(error).__name__}: {error}"}, 503)
        heartbeat = server.heartbeat
        said = {"status": "ok", **heartbeat.report()}
        still_s = max(heartbeat.silent_s, heartbeat.tokenless_s)
        if still_s > STALLED_S and not server.lock.updating:
            return JSONResponse(
                {**said, "status": "stalled", "error": f"an engine has not got on for {still_s:.0f} s"}, 503
            )
        return said

    @app.get("/status/")
    async def status() -> dict[str, Any]:
        return await server.status()

    @app.get("/get_world_size/")
    async def get_world_size() -> dict[str, int]:
        return {"world_size": server.engines.world_size}

    @app.post("/get_engine_type/")
    async def get_engine_type() -> dict[str, Any]:
        return {
            "engine_type": "AsyncLLMEngine",
            "enable_multi_turn": False,
            "use_gym_env": False,
            "enable_lora": bool(server.options.engine.get("enable_lora")),
        }

    @app.post("/infer/")
    async def infer(
        request: Request,
        infer_requests: list[InferRequest] = Body(),  # noqa: B008
        request_config: RequestConfig | None = Body(default=None),  # noqa: B008
    ) -> list[dict[str, Any]]:
        return await _unless_gone(request, server.infer(infer_requests, request_config or RequestConfig()))

    for cache in ("prefix", "encoder", "mm"):
        app.post(f"/reset_{cache}_cache/")(_reset(server.engines, cache))


def _reset(engines: EngineGroup, cache: str) -> Callable[[], Awaitable[dict[str, str]]]:
    async def reset() -> dict[str, str]:
        await engines.reset_caches([cache])
        return {"message": f"{cache} cache reset"}

    return reset


def _add_weights(app: FastAPI, server: RolloutServer) -> None:
    @app.get("/get_model_state_keys/")
    async def get_model_state_keys() -> dict[str, list[str]]:
        return {"keys": (await server.engines.workers("get_state_keys"))[0]}

    @app.post("/init_communicator/")
    async def init_communicator(request: GroupRequest) -> dict[str, str]:
        await server.open_group(request)
        return {"message": "weight group open"}

    @app.post("/close_communicator/")
    async def close_communicator() -> dict[str, str]:
        await server.close_group()
        return {"message": "weight group closed"}

    @app.post("/update_flattened_params/")
    async def update_flattened_params(request: BucketRequest) -> dict[str, str]:
        await server.update("update_flattened_params", request.metadatas)
        return {"message": f"{len(request.metadatas)} weights received"}

    @app.post("/update_named_param/")
    async def update_named_param(request: TensorRequest) -> dict[str, str]:
        await server.update("update_named_param", request.name, request.dtype, request.shape)
        return {"message": f"{request.name} received"}

    @app.post("/update_adapter_flattened_param/")
    async def update_adapter(request: AdapterRequest) -> dict[str, str]:
        await server.update("update_adapter_flattened_param", request.peft_config, request.metadatas, adapter=True)
        return {"message": "adapter received"}

    @app.post("/process_weights_after_loading/")
    async def process_weights_after_loading(request: CommitRequest | None = None) -> dict[str, Any]:
        reports = await server.commit(request or CommitRequest())
        return {"message": "weights committed", **server.lock.stamp.payload(), "reports": reports}


async def _reply_to_invalid(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's own account repeats what was sent, which JSON may not be able to hold (NaN)."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return refusal(422, f"{where}: {first['msg']}{more}"[:1000])


async def _reply_to_error(request: Request, error: Exception) -> JSONResponse:
    known = isinstance(error, CoordExpError)
    logger.warning("%s: %s: %s", request.url.path, type(error).__name__, error, exc_info=None if known else error)
    return refusal(_status_of(error), str(error) if known else f"{type(error).__name__}: {error}")


def _status_of(error: Exception) -> int:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(error, RequestRefused):
        return error.status
    if isinstance(error, VLLMValidationError):
        return 400  # asked again it stays wrong: a learner must not take it for an accident
    return 503 if isinstance(error, EngineDeadError) else 500


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """``work``'s result; cancelled when the client hangs up, so that nobody waits for answers that nobody reads."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=DISCONNECT_POLL_S)
            if not task.done() and await request.is_disconnected():
                raise RequestRefused(499, "the client hung up")
        return task.result()
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        task.cancel()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
