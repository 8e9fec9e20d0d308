"""The HTTP face of ``coordexp serve``: ms-swift's rollout endpoints and payloads, plus ``/status/``.

What differs from ms-swift on purpose: errors reach the caller, ``/health/`` asks the engines, an update answers when
its bytes have arrived, and a push is committed (layouts, caches, version) by ``/process_weights_after_loading/``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from coordexp.errors import CoordExpError
from coordexp.rollouts.engine.compatibility import versions
from coordexp.serving.engines import Completion, EngineGroup
from coordexp.serving.gate import RequestRefused, WeightGate
from coordexp.serving.options import ServeOptions
from coordexp.serving.requests import MAX_REQUESTS, InferRequest, PromptBuilder, RequestConfig

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
MAX_BODY_BYTES = 2 << 30
MAX_WAIT_S = 3600.0
DISCONNECT_POLL_S = 0.5
OPEN_PATHS = {"/health", "/health/"}  # for probes that hold no token


class GroupRequest(BaseModel):
    """Where to meet a learner. ``host`` is ms-swift's; this server listens on its own address."""

    host: str = ""
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    first_rank: int = 0
    timeout_s: float = Field(default=120.0, gt=0, le=MAX_WAIT_S)


class BucketRequest(BaseModel):
    """One bucket of weights; see ``coordexp.rollouts.engine.buckets``."""

    metadatas: list[dict[str, Any]] = Field(min_length=1)


class AdapterRequest(BucketRequest):
    """A LoRA adapter with PEFT's configuration."""

    peft_config: dict[str, Any]


class TensorRequest(BaseModel):
    """One tensor."""

    name: str
    dtype: str
    shape: list[int]


class CommitRequest(BaseModel):
    """End of a push; ms-swift's clients send nothing."""

    weight_version: int | None = None
    wants_checksum: bool = False


class RolloutServer:
    """State and actions behind the endpoints."""

    def __init__(self, options: ServeOptions, engines: EngineGroup, prompts: PromptBuilder) -> None:
        self.options = options
        self.engines = engines
        self.gate = WeightGate(options.push_wait_s)
        self._prompts = prompts
        self._group_lock = asyncio.Lock()  # one action on the weight group at a time
        self._timeout_s = options.push_wait_s
        self._adapted = False
        self._push_is_adapter = False

    async def infer(self, requests: list[InferRequest], config: RequestConfig) -> list[dict[str, Any]]:
        if len(requests) > MAX_REQUESTS:
            raise RequestRefused(413, f"{len(requests)} requests in one call; at most {MAX_REQUESTS}")
        async with self.gate.answering() as version:
            prompts = await asyncio.to_thread(lambda: [self._prompts.build(request) for request in requests])
            completions = await _together(
                self.engines.answer(prompt, config.sampling_arguments(index), self._adapted)
                for index, prompt in enumerate(prompts)
            )
            triggers = await self.engines.pop_triggers([one.request_id for one in completions])
        return [
            {
                "response": self._response(one, config.return_details),
                "coordexp": {
                    "weight_version": version,
                    "repeat_terminate_active": int(self.engines.guarded),
                    "repeat_terminate_triggered": int(one.request_id in triggers),
                },
            }
            for one in completions
        ]

    async def open_group(self, request: GroupRequest) -> None:
        if request.port != self.options.group_port:
            raise RequestRefused(400, f"this server's group_port is {self.options.group_port}, not {request.port}")
        if request.world_size != self.engines.world_size + 1:
            raise RequestRefused(
                400,
                f"this server's group has {self.engines.world_size} workers and a learner, not {request.world_size}",
            )
        async with self._group_lock:
            self.gate.fail("another learner took the server over in the middle of a push")
            self._timeout_s = request.timeout_s
            await self.engines.workers(
                "init_communicator",
                args_of=lambda index: (
                    self.options.host,
                    request.port,
                    request.world_size,
                    index * self.engines.tensor_parallel_size,
                    request.timeout_s,
                ),
                timeout_s=request.timeout_s + 30,
            )

    async def close_group(self) -> None:
        async with self._group_lock:
            self.gate.fail("the learner left in the middle of a push")
            await self.engines.workers("close_communicator", timeout_s=self._timeout_s + 30)

    async def update(self, method: str, *args: Any, adapter: bool = False) -> None:
        """Take one bucket; the first one opens a push."""
        async with self._group_lock:
            if not self.gate.updating:
                self._push_is_adapter = False
            await self.gate.begin()
            self._push_is_adapter |= adapter
            await self._or_broken(self.engines.workers(method, args, timeout_s=self._timeout_s + 30))

    async def commit(self, request: CommitRequest) -> list[dict[str, Any]]:
        async with self._group_lock:
            if not self.gate.updating:
                raise RequestRefused(409, f"no push is under way{self._broken_clause()}")
            version = self.gate.version + 1 if request.weight_version is None else request.weight_version
            reports = await self._or_broken(
                self.engines.workers(
                    "process_weights_after_loading", [version, request.wants_checksum], timeout_s=MAX_WAIT_S
                )
            )
            await self._or_broken(self.engines.reset_caches())
            self._adapted = self._push_is_adapter
            self.gate.commit(version)
            return reports

    async def status(self) -> dict[str, Any]:
        workers = await self.engines.workers("coordexp_status")
        return {
            "server": "coordexp serve",
            "engine_alive": True,
            "model": str(self.options.model),
            "world_size": self.engines.world_size,
            "data_parallel_size": len(self.engines.engines),
            "weight_version": self.gate.version,
            "weight_checksum": workers[0]["checksum"],
            "push_open": self.gate.updating,
            "broken": self.gate.broken,
            "adapter": self._adapted,
            "num_answering": self.gate.num_answering,
            "repeat_terminate": workers[0]["repeat_terminate"],
            "versions": versions(),
            "workers": workers,
        }

    async def _or_broken(self, action: Awaitable[Result]) -> Result:
        try:
            return await action
        except BaseException as error:
            self.gate.fail(f"{type(error).__name__}: {error}")
            raise

    def _broken_clause(self) -> str:
        return "" if self.gate.broken is None else f"; the last one failed: {self.gate.broken}"

    def _response(self, one: Completion, details: bool) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": one.text},
            "finish_reason": one.finish_reason,
            "token_ids": list(one.token_ids) if details else None,
        }
        return {
            "id": one.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": str(self.options.model),
            "choices": [choice],
            "prompt_token_ids": list(one.prompt_token_ids) if details else None,
            "usage": {
                "prompt_tokens": len(one.prompt_token_ids),
                "completion_tokens": len(one.token_ids),
                "total_tokens": len(one.prompt_token_ids) + len(one.token_ids),
            },
        }


def build_app(server: RolloutServer) -> FastAPI:
    """The application; its engines end with it."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            server.engines.shutdown()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(Exception, _reply_to_error)
    app.add_exception_handler(CoordExpError, _reply_to_error)
    app.middleware("http")(_admission(server.options.api_key))
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
        return {"status": "ok"}

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
        return {"message": "weights committed", "weight_version": server.gate.version, "reports": reports}


def _admission(api_key: str | None) -> Callable[..., Awaitable[Any]]:
    """Middleware: who may call, and how much they may send."""

    async def admit(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:
        if api_key is not None and request.url.path not in OPEN_PATHS:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme != "Bearer" or not secrets.compare_digest(token.encode(), api_key.encode()):
                return _error(401, "a bearer token is required: Authorization: Bearer …")
        if request.method == "POST":
            length = request.headers.get("Content-Length", "")
            if not length.isdigit():
                return _error(411, "Content-Length is required")
            if int(length) > MAX_BODY_BYTES:
                return _error(413, f"more than {MAX_BODY_BYTES >> 20} MiB in one request")
        return await call_next(request)

    return admit


async def _reply_to_error(request: Request, error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RequestRefused) else 503 if _is_engine_death(error) else 500
    known = isinstance(error, CoordExpError)
    logger.warning("%s: %s: %s", request.url.path, type(error).__name__, error, exc_info=None if known else error)
    return _error(status, str(error) if known else f"{type(error).__name__}: {error}")


def _is_engine_death(error: Exception) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


async def _together(calls: Any) -> list[Any]:
    """All results in order; the first failure cancels the rest."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


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
