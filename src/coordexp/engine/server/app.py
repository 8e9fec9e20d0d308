"""The rollout endpoints of ``coordexp serve``: ms-swift's paths and payloads.

Unlike ms-swift: errors reach the client, ``/health/`` checks the engine, an update replies when its bytes have arrived,
and ``/process_weights_after_loading/`` commits a push. After a failed push, the server refuses requests until a push
succeeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from coordexp.config.rollout import MAX_PUSH_S
from coordexp.engine.server.admission import BODY_S, Admission, reply_to_error, reply_to_http, reply_to_invalid
from coordexp.engine.server.options import ServeOptions
from coordexp.engine.server.served_engine import Heartbeat, ServedEngine
from coordexp.engine.wire.arguments import FINGERPRINT, CommitRequest, JoinRequest, LeaveRequest, refusal_of_owner
from coordexp.engine.wire.engine_process import image_threads
from coordexp.engine.wire.protocol import (
    ENVELOPE,
    MAX_REQUESTS,
    InferRequest,
    PromptBuilder,
    RequestConfig,
    RequestRefused,
    envelope_of,
)
from coordexp.engine.wire.versions import versions
from coordexp.errors import CoordExpError
from coordexp.weight_sync import WeightVersion

Result = TypeVar("Result")
STALLED_S = 120.0  # after which /health/ reports a hung engine; trainers use their own server.timeout_s


@dataclass(slots=True)
class WeightLock:
    """Mutual exclusion of answers and pushes, within one event loop.

    States: ready → (first bucket) updating → (commit) ready. If a push fails, the state is ``broken`` until a push
    succeeds.
    """

    wait_s: float
    weights: WeightVersion = field(default_factory=WeightVersion)
    broken: str | None = None
    updating: bool = False
    num_answering: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[WeightVersion]:
        """Yields the version of the weights, fixed while inside. RequestRefused: a push is running, or has failed."""
        if self.updating:
            raise RequestRefused(409, "weights are being pushed; send the request again after the push")
        if self.broken is not None:
            raise RequestRefused(
                409, f"the last push of weights failed half-way ({self.broken}); push them again first"
            )
        self.num_answering += 1
        self._idle.clear()
        try:
            yield self.weights
        finally:
            self.num_answering -= 1
            if self.num_answering == 0:
                self._idle.set()

    async def begin(self) -> None:
        """Start a push, or continue the running one: refuse new answers and wait for running ones. Raises
        RequestRefused if answers are still running after ``wait_s``."""
        if self.updating:
            return
        self.updating = True
        try:
            if self.num_answering:
                await asyncio.wait_for(self._idle.wait(), self.wait_s)
        except TimeoutError as error:
            self.updating = False
            raise RequestRefused(
                409, f"{self.num_answering} requests were still being answered after {self.wait_s:g} s; push later"
            ) from error

    def commit(self, weights: WeightVersion) -> None:
        self.updating, self.broken, self.weights = False, None, weights

    def fail(self, why: str) -> None:
        """If a push is running, the weights are now neither the old nor the new ones."""
        if self.updating:
            self.updating, self.broken = False, why

    @contextmanager
    def broken_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise


class BucketRequest(BaseModel):
    metadatas: list[dict[str, Any]] = Field(min_length=1)


class AdapterRequest(BucketRequest):
    peft_config: dict[str, Any]


class TensorRequest(BaseModel):
    name: str
    dtype: str
    shape: list[int]


class RolloutServer:
    """State of a server, and its rollout endpoints: the methods that :meth:`app` lists."""

    def __init__(self, options: ServeOptions, engine: ServedEngine, prompts: PromptBuilder) -> None:
        self.options = options
        self.engine = engine
        self.lock = WeightLock(options.push_wait_s)
        self.heartbeat = Heartbeat(engine)
        self._prompts = prompts
        # Threads, because vLLM itself would process one image at a time.
        self._images = ThreadPoolExecutor(image_threads(options.data_parallel_size), thread_name_prefix="images")
        self._group_open = False
        self._group_lock = asyncio.Lock()  # one action on the weight group at a time
        self._timeout_s = options.push_wait_s
        self._push_is_adapter = False

    def app(self, body_s: float = BODY_S) -> FastAPI:
        """The application; the engine ends with it. ``body_s``: seconds for a small body to arrive."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            heartbeat = asyncio.create_task(self.heartbeat.run())
            try:
                yield
            finally:
                heartbeat.cancel()
                self._images.shutdown(wait=False, cancel_futures=True)
                self.engine.shutdown()

        app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(CoordExpError, reply_to_error)
        app.add_exception_handler(HTTPException, reply_to_http)
        app.add_exception_handler(RequestValidationError, reply_to_invalid)
        app.add_middleware(Admission, self.options.api_key, self.options.advertised_host, body_s)
        for methods, path, endpoint in (
            ("GET HEAD", "/health", self.health),
            ("GET HEAD", "/health/", self.health),
            ("GET", "/status/", self.status),
            ("GET", "/get_world_size/", self.get_world_size),
            ("GET", "/get_model_state_keys/", self.get_model_state_keys),
            ("POST", "/get_engine_type/", self.get_engine_type),
            ("POST", "/infer/", self.infer),
            ("POST", "/init_communicator/", self.init_communicator),
            ("POST", "/close_communicator/", self.close_communicator),
            ("POST", "/update_flattened_params/", self.update_flattened_params),
            ("POST", "/update_named_param/", self.update_named_param),
            ("POST", "/update_adapter_flattened_param/", self.update_adapter),
            ("POST", "/process_weights_after_loading/", self.process_weights_after_loading),
            ("POST", "/reset_{cache}_cache/", self.reset_cache),
        ):
            app.add_api_route(path, endpoint, methods=methods.split(), response_model=None)
        return app

    async def health(self) -> dict[str, Any] | JSONResponse:
        try:
            await self.engine.check_health()
        except Exception as error:  # a probe reports every error of vLLM
            return JSONResponse({"status": "dead", "error": f"{type(error).__name__}: {error}"}, 503)
        report = self.heartbeat.report()
        still_s = max(report["engine_silent_s"], report["engine_tokenless_s"])
        if still_s > STALLED_S and not self.lock.updating:
            problem = f"an engine has made no progress for {still_s:.0f} s"
            return JSONResponse({**report, "status": "stalled", "error": problem}, 503)
        return {"status": "ok", **report}

    async def status(self) -> dict[str, Any]:
        workers = await self.engine.workers("coordexp_status")
        return {
            "server": "coordexp serve",
            "engine_alive": True,
            "model": str(self.options.model),
            FINGERPRINT: self.options.fingerprint,
            "world_size": self.engine.world_size,
            "data_parallel_size": self.options.data_parallel_size,
            **self.lock.weights.payload(),
            "weight_checksum": workers[0]["checksum"],
            "push_open": self.lock.updating,
            "broken": self.lock.broken,
            **self.heartbeat.report(),
            "adapter": self.engine.adapted,
            "num_answering": self.lock.num_answering,
            "repeat_terminate": workers[0]["repeat_terminate"],
            "versions": versions(),
            "workers": workers,
        }

    async def get_world_size(self) -> dict[str, int]:
        return {"world_size": self.engine.world_size}

    async def get_model_state_keys(self) -> dict[str, list[str]]:
        return {"keys": (await self.engine.workers("get_state_keys"))[0]}

    async def get_engine_type(self) -> dict[str, Any]:
        return {
            "engine_type": "AsyncLLMEngine",
            "enable_multi_turn": False,
            "use_gym_env": False,
            "enable_lora": bool(self.options.engine.get("enable_lora")),
        }

    @with_cancellation
    async def infer(
        self,
        requests: Annotated[list[InferRequest], Body(alias="infer_requests")],
        config: Annotated[RequestConfig, Body(alias="request_config", default_factory=RequestConfig)],
        raw_request: Request,  # vLLM's decorator uses it to cancel this call if the client disconnects
    ) -> list[dict[str, Any]]:
        """Returns one answer per request, in order, all from the same weights; a push waits for them."""
        if len(requests) > MAX_REQUESTS:
            raise RequestRefused(413, f"{len(requests)} requests in one call; at most {MAX_REQUESTS}")
        class_names = [request.class_names() for request in requests]
        if any(class_names) and not self.engine.takes_class_names:
            raise RequestRefused(
                400,
                "this server does not accept a list of class names; start it with "
                "rollout_matching.vllm.server.closed_names: true",
            )
        async with self.lock.answering() as weights:
            prompts = await _gather(self._rendered(request) for request in requests)
            outputs = await _gather(
                self.engine.answer(prompt, config.sampling_arguments(index), class_names[index])
                for index, prompt in enumerate(prompts)
            )
            repeated = await self.engine.pop_triggers([output.request_id for output in outputs])
        replies = []
        for request, output in zip(requests, outputs, strict=True):
            (answer,) = output.outputs
            num_prompt, num_answer = len(output.prompt_token_ids), len(answer.token_ids)
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": answer.text},
                "finish_reason": str(answer.finish_reason),
                "token_ids": list(answer.token_ids) if config.return_details else None,
            }
            response = {
                "id": output.request_id,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": str(self.options.model),
                "choices": [choice],
                "prompt_token_ids": list(output.prompt_token_ids) if config.return_details else None,
                "usage": {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": num_answer,
                    "total_tokens": num_prompt + num_answer,
                },
            }
            envelope = envelope_of(weights, self.engine.guarded, output.request_id in repeated, request.uuid)
            replies.append({"response": response, ENVELOPE: envelope})
        return replies

    async def _rendered(self, request: InferRequest) -> Any:
        def render() -> Any:
            prompt = self._prompts.build(request)
            try:
                return self.engine.render(prompt)
            except ValueError as error:  # the processor's refusal, such as of an image of 1 x 201 pixels
                raise RequestRefused(400, f"the prompt cannot be rendered: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._images, render)

    async def init_communicator(self, request: JoinRequest) -> dict[str, str]:
        options, num_workers = self.options, self.engine.world_size
        if request.port != options.group_port:
            raise RequestRefused(400, f"this server's group_port is {options.group_port}, not {request.port}")
        if request.world_size != num_workers + 1:
            raise RequestRefused(
                400, f"this server's group has {num_workers} workers and a trainer, not {request.world_size} members"
            )
        async with self._group_lock:
            await self._check_owner(request.trainer)
            self.lock.fail("another trainer took over the server during a push")
            self._timeout_s = request.timeout_s
            self._group_open = False
            await self.engine.workers(
                "init_communicator",
                options.advertised_host,
                request.port,
                request.world_size,
                None,  # first_rank: each worker computes its own rank
                request.timeout_s,
                request.token,
                "" if options.host == options.advertised_host else options.host,
                request.trainer,
                timeout_s=request.timeout_s + 30,
            )
            self._group_open = True
        return {"message": "weight group open"}

    async def _check_owner(self, trainer: str) -> None:
        if (reason := refusal_of_owner(await self.engine.workers("coordexp_owner"), trainer)) is not None:
            raise RequestRefused(409, reason)

    async def close_communicator(self, request: LeaveRequest | None = None) -> dict[str, str]:
        async with self._group_lock:
            await self._check_owner((request or LeaveRequest()).trainer)
            self.lock.fail("the trainer disconnected during a push")
            self._group_open = False
            await self.engine.workers("close_communicator", timeout_s=self._timeout_s + 30)
        return {"message": "weight group closed"}

    async def update_flattened_params(self, request: BucketRequest) -> dict[str, str]:
        await self._update("update_flattened_params", request.metadatas)
        return {"message": f"{len(request.metadatas)} weights received"}

    async def update_named_param(self, request: TensorRequest) -> dict[str, str]:
        await self._update("update_named_param", request.name, request.dtype, request.shape)
        return {"message": f"{request.name} received"}

    async def update_adapter(self, request: AdapterRequest) -> dict[str, str]:
        await self._update("update_adapter_flattened_param", request.peft_config, request.metadatas, adapter=True)
        return {"message": "adapter received"}

    async def _update(self, method: str, *args: Any, adapter: bool = False) -> None:
        async with self._group_lock:
            if not self._group_open:
                raise RequestRefused(409, "no weight group is open; call /init_communicator/ first")
            if not self.lock.updating:
                self._push_is_adapter = False
            await self.lock.begin()
            self._push_is_adapter |= adapter
            with self.lock.broken_on_error():
                await self.engine.workers(method, *args, timeout_s=self._timeout_s + 30)

    async def process_weights_after_loading(self, request: CommitRequest | None = None) -> dict[str, Any]:
        request = request or CommitRequest()
        async with self._group_lock:
            if not self.lock.updating:
                cause = "" if self.lock.broken is None else f"; the last one failed: {self.lock.broken}"
                raise RequestRefused(409, f"no push is under way{cause}")
            version = self.lock.weights.version + 1 if request.weight_version is None else request.weight_version
            weights = WeightVersion(version, request.trainer_id)
            with self.lock.broken_on_error():
                reports = await self.engine.workers(
                    "process_weights_after_loading",
                    weights.version,
                    request.wants_checksum,
                    weights.trainer_id,
                    timeout_s=MAX_PUSH_S,
                )
                await self.engine.reset_caches()
            self.engine.adapted = self._push_is_adapter
            self.lock.commit(weights)
            return {"message": "weights committed", **weights.payload(), "reports": reports}

    async def reset_cache(self, cache: Literal["prefix", "encoder", "mm"]) -> dict[str, str]:
        await self.engine.reset_caches([cache])
        return {"message": f"{cache} cache reset"}


async def _gather(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:  # the first failure cancels the rest
        for task in tasks:
            task.cancel()
