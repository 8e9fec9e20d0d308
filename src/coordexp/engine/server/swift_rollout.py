"""CoordExp inside ``swift rollout``. Replaces ms-swift's engine class by a subclass (repeat guard, trigger flags, our
worker extension), and those of its HTTP endpoints that would reply 200 after an error."""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import swift.arguments.deploy_args
import swift.utils
from fastapi import Depends, HTTPException
from pydantic import Field
from swift.infer_engine import GRPOVllmEngine
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.pipelines.infer import rollout as swift_rollout

from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.engine.server.swift_pipes import SerializeRequests, SharedHeartbeat, seeded_by_place, with_heartbeat
from coordexp.engine.wire.arguments import (
    ADAPTER_ID,
    CLASS_NAMES_ENABLE,
    CLASS_NAMES_KEY,
    FINGERPRINT,
    CommitRequest,
    JoinRequest,
    LeaveRequest,
    activated_config,
    cache_kept_by,
    check_processors,
    end_at_turn_end,
    executor_on_cpu,
    extra_args,
    pushed_adapter,
    refusal_of_owner,
    with_image_size,
    with_processors,
)
from coordexp.engine.wire.engine_process import (
    DIE_WITH_PARENT,
    SERVER_API_KEY,
    complete_environment,
    die_with_parent,
    engines_import_quickly,
    has_gpu,
    set_engine_owner,
    skip_main_reimport,
)
from coordexp.engine.wire.protocol import envelope_of
from coordexp.engine.wire.versions import versions
from coordexp.errors import RolloutError
from coordexp.rollouts.class_names import are_class_names
from coordexp.weight_sync import WeightVersion

logger = logging.getLogger(__name__)

CPU_DEVICES = 64  # ms-swift counts GPUs; a CPU machine runs as many workers as configured


class CoordExpRolloutOutput(RolloutOutput):
    """ms-swift's answer plus our envelope in a second key."""

    coordexp: dict[str, Any] = Field(default_factory=dict)


class CoordExpVllmEngine(GRPOVllmEngine):
    """ms-swift's engine of one data-parallel worker, guarded."""

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if kwargs.get("use_async_engine"):
            raise RolloutError(
                "the CoordExp plugin needs ms-swift's synchronous engine (--vllm_use_async_engine false): the "
                "asynchronous one reports only its first engine's triggers and failures"
            )
        self._guard = activated_config(os.environ)
        self._weights = WeightVersion()
        self._takes_class_names = os.environ.get(CLASS_NAMES_ENABLE) == "1"
        self._class_names: list[str] = []  # of the current call
        engine_kwargs = with_processors(engine_kwargs or {}, self._guard is not None, self._takes_class_names)
        model, limits = kwargs["model_id_or_path"], kwargs.get("limit_mm_per_prompt") or {}
        if isinstance(limits.get("image"), int) and kwargs.get("max_model_len") and os.path.isdir(model):
            sized = {"model": model, "max_model_len": kwargs["max_model_len"], "limit_mm_per_prompt": limits}
            kwargs["limit_mm_per_prompt"] = with_image_size(sized)["limit_mm_per_prompt"]
        if not has_gpu():
            kwargs["distributed_executor_backend"] = executor_on_cpu(kwargs.get("tensor_parallel_size", 1))
        super().__init__(*args, engine_kwargs=engine_kwargs, **kwargs)
        engine: Any = self.engine
        end_at_turn_end(engine)
        engine.step = with_heartbeat(engine.step, int(os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0")))
        try:
            check_processors(self._workers("coordexp_status"), self._guard, self._takes_class_names)
        except BaseException:
            engine.engine_core.shutdown()  # otherwise its process, and swift's, which waits for it, would not end
            raise

    def infer(self, infer_requests: list[Any], *args: Any, **kwargs: Any) -> list[RolloutOutput]:
        """ms-swift's answers, each with our envelope."""
        # The class names, the same in all requests of a call; empty for any.
        lists = [(_field(request, "data_dict") or {}).get(CLASS_NAMES_KEY) or [] for request in infer_requests]
        class_names = lists[0] if lists else []
        if not are_class_names(class_names) or any(one != class_names for one in lists):
            raise RolloutError(
                f"data_dict.{CLASS_NAMES_KEY} must be a list of class names, none empty, the same in all requests"
            )
        if class_names and not self._takes_class_names:
            raise RolloutError(
                f"this server does not accept a list of class names; start it with {CLASS_NAMES_ENABLE}=1"
            )
        self._class_names = list(class_names)
        problem = next((one for one in self._workers("coordexp_problem") if one is not None), None)
        if problem is not None:
            raise RolloutError(f"the last push of weights failed half-way ({problem}); push them again first")
        outputs = super().infer(infer_requests, *args, **kwargs)
        ids = [str(one.response.id) for one in outputs]
        popped = self._workers("coordexp_pop_triggers", ids) if self._guard is not None else []
        repeated = set(chain.from_iterable(popped))
        enveloped = []
        for request, output, request_id in zip(infer_requests, outputs, ids, strict=True):
            uuid = _field(request, "uuid")
            envelope = envelope_of(self._weights, self._guard is not None, request_id in repeated, uuid)
            enveloped.append(CoordExpRolloutOutput(**dict(output), coordexp=envelope))
        return enveloped

    def _add_stop_words(self, generation_config: Any, request_config: Any) -> None:
        # ms-swift adds those of its template, <|endoftext|> among them, at which answers of transformers go on.
        generation_config.stop = list(request_config.stop or [])

    # The HTTP process calls the next three methods by name, through ms-swift's pipe (:func:`_call_workers`).

    def coordexp_infer(self, **arguments: Any) -> dict[str, Any]:
        return _outcome(lambda: self.infer(**arguments))

    def coordexp_call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return _outcome(lambda: self._workers(method, **arguments))

    def coordexp_commit(self, **commit: Any) -> dict[str, Any]:
        return _outcome(lambda: self._commit(**commit))

    def _commit(self, **commit: Any) -> list[dict[str, Any]]:
        reports = self._workers("process_weights_after_loading", **commit)
        if (kept := cache_kept_by(self.engine)) is not None:
            raise RolloutError(f"a request is still running, so the engine kept its {kept} cache; restart the server")
        self._weights = WeightVersion(reports[0]["weight_version"], reports[0]["trainer_id"])
        return reports

    def _add_request(self, inputs: Any, generation_config: Any, request_id: str, adapter_request: Any = None) -> Any:
        ours = extra_args(str(request_id), self._class_names)
        generation_config.extra_args = {**(generation_config.extra_args or {}), **ours}
        return super()._add_request(inputs, generation_config, request_id, adapter_request=adapter_request)

    def _get_grpo_lora_request(self, adapter_request: Any = None) -> Any:
        # The adapter that was pushed last; ms-swift would look for an id of its own.
        engine: Any = self.engine
        if adapter_request is not None or not self.enable_lora or ADAPTER_ID not in engine.list_loras():
            return adapter_request
        return pushed_adapter()

    def _workers(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        engine: Any = self.engine  # the synchronous one of ms-swift's two kinds
        return engine.collective_rpc(method, args=args, kwargs=kwargs)


def _field(request: Any, name: str) -> Any:
    # ms-swift passes requests as dicts or objects. None if the field is missing.
    return request.get(name) if isinstance(request, dict) else getattr(request, name, None)


def _outcome(act: Callable[[], Any]) -> dict[str, Any]:
    # ms-swift's loop would log an error and return None.
    try:
        return {"result": act()}
    except Exception as error:  # reported by the HTTP process, with status 500
        logger.exception("a request to this rollout worker failed")
        return {"error": f"{type(error).__name__}: {error}"}


class CoordExpEndpoints:
    """Methods that replace those of :class:`SwiftRolloutDeploy`, or are added to it; ``self`` is an instance of it."""

    args: Any
    connections: list[Any]
    processes: list[Any]
    coordexp_heartbeat: SharedHeartbeat
    coordexp_fingerprint: str | None
    coordexp_busy: dict[int, float]  # worker with open requests → time of their call

    async def health(self) -> dict[str, Any]:
        dead = [index for index, process in enumerate(self.processes) if not process.is_alive()]
        if dead:
            raise HTTPException(503, f"rollout workers {dead} have died; see the server's log")
        return {"status": "ok", **_heartbeat(self)}

    async def status(self) -> dict[str, Any]:
        workers = await _on_workers(self.connections, "coordexp_status")
        return {
            "server": "swift rollout",
            "model": str(self.args.model),
            FINGERPRINT: self.coordexp_fingerprint,
            "world_size": len(workers),
            "data_parallel_size": len(self.connections),
            **{key: workers[0][key] for key in WeightVersion().payload()},
            "weight_checksum": workers[0]["checksum"],
            "push_open": any(one["push_open"] for one in workers),
            "broken": next((one["failure"] for one in workers if one["failure"] is not None), None),
            **_heartbeat(self),
            "repeat_terminate": workers[0]["repeat_terminate"],
            "versions": versions(),
            "workers": workers,
        }

    async def infer(
        self,
        infer_requests: list[dict[str, Any] | RolloutInferRequest],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RolloutOutput]:
        """Like ms-swift's own, with four differences: a worker's error reaches the client; a worker without requests is
        not called (ms-swift makes it generate a full-length answer to a placeholder); request i has the call's seed
        + i on any worker; ``/health/`` reports the workers' progress meanwhile."""
        chunks = swift_rollout.chunk_list(infer_requests, len(self.connections))
        busy = [(connection, chunk) for connection, chunk in zip(self.connections, chunks, strict=True) if chunk]
        configs = seeded_by_place(request_config, [len(chunk) for _, chunk in busy])
        arguments = [
            {"infer_requests": chunk, "request_config": config, "use_tqdm": use_tqdm}
            for (_, chunk), config in zip(busy, configs, strict=True)
        ]
        self.coordexp_busy = dict.fromkeys(range(len(busy)), time.monotonic())  # chunk_list fills the first workers
        try:
            connections = [connection for connection, _ in busy]
            answers = await _call_workers(connections, "coordexp_infer", arguments)
        finally:
            self.coordexp_busy = {}
        return [output for part in answers for output in part]

    async def init_communicator(self, request: JoinRequest) -> dict[str, str]:
        # Returns after every worker has joined; the trainer joins at the same time.
        await _check_owner(self.connections, request.trainer)
        per_engine = self.args.vllm_tensor_parallel_size
        world_size = request.world_size if request.first_rank is not None else per_engine * len(self.connections) + 1
        first = request.first_rank or 0
        arguments = [
            {
                "method": "init_communicator",
                **request.model_dump(),
                "world_size": world_size,
                "first_rank": first + index * per_engine,
                "listen_host": "" if self.args.host == request.host else self.args.host,
            }
            for index in range(len(self.connections))
        ]
        await _call_workers(self.connections, "coordexp_call", arguments)
        return {"message": "communicator open"}

    async def close_communicator(self, request: LeaveRequest | None = None) -> dict[str, str]:
        await _check_owner(self.connections, (request or LeaveRequest()).trainer)
        await _on_workers(self.connections, "close_communicator")
        return {"message": "communicator closed"}

    async def process_weights_after_loading(self, request: CommitRequest | None = None) -> dict[str, Any]:
        commit = (request or CommitRequest()).model_dump()
        reports = await _call_workers(self.connections, "coordexp_commit", [commit] * len(self.connections))
        return {"message": "weights committed", "reports": [one for of_engine in reports for one in of_engine]}


def install() -> None:
    """Patch this process, ms-swift's HTTP process or one of its workers. Raises RolloutError."""
    activated_config(os.environ)
    gpu = has_gpu()
    complete_environment(gpu=gpu)
    # ms-swift enlarges images of fewer tokens. The trainer sends images that already have the model's size.
    os.environ.setdefault("IMAGE_MIN_TOKEN_NUM", "1")
    if not gpu:
        for module in (swift.arguments.deploy_args, swift.utils, swift_rollout):
            for name in ("get_device_count", "get_physical_device_count"):
                if hasattr(module, name):
                    setattr(module, name, lambda *_: CPU_DEVICES)
    if multiprocessing.parent_process() is not None:  # a rollout worker, which owns its engine
        set_engine_owner()
        skip_main_reimport()
        engines_import_quickly()
        if os.environ.get(DIE_WITH_PARENT) == "1":
            die_with_parent()
    swift_rollout.GRPOVllmEngine = CoordExpVllmEngine
    server: Any = swift_rollout.SwiftRolloutDeploy
    if getattr(server, "coordexp_installed", False):
        return
    register, lifespan = server._register_rl_rollout_app, server.lifespan

    def register_ours(self: Any) -> None:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--port", type=int, default=self.args.port)
        port = parser.parse_known_args(sys.argv[1:])[0].port
        if port != self.args.port:
            raise RolloutError(f"port {port} is taken; ms-swift would silently use {self.args.port}. Choose another")
        self.args.api_key = self.args.api_key or os.environ.get(SERVER_API_KEY)
        self.coordexp_heartbeat = SharedHeartbeat.create(self.num_connections)
        self.coordexp_busy = {}
        model = Path(self.args.model)
        self.coordexp_fingerprint = fingerprint(model) if self.args.vllm_enable_lora and model.is_dir() else None
        register(self)
        self.app.add_middleware(SerializeRequests)
        self.app.get("/status/", dependencies=[Depends(self._require_api_key())])(self.status)

    @asynccontextmanager
    async def lifespan_ours(self: Any, app: Any) -> AsyncIterator[None]:
        async with lifespan(self, app):
            self.coordexp_heartbeat.forget_name()
            yield
            for connection, process in zip(self.connections, self.processes, strict=True):
                if process.is_alive():
                    connection.send({"type": "shutdown"})  # ms-swift waits for this message, but never sends it

    for name in (
        *("health", "status", "infer"),
        *("init_communicator", "close_communicator", "process_weights_after_loading"),
    ):
        setattr(server, name, getattr(CoordExpEndpoints, name))
    server._register_rl_rollout_app = register_ours
    server.lifespan = lifespan_ours
    server.coordexp_installed = True


def _heartbeat(server: Any) -> dict[str, Any]:
    page: SharedHeartbeat = server.coordexp_heartbeat
    return {"engine_silent_s": round(page.silent_s(server.coordexp_busy), 1), "num_steps": page.num_steps()}


async def _call_workers(connections: Sequence[Any], method: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
    """Results of ``method`` of these workers' engines. The pipes carry one call at a time; :class:`SerializeRequests`
    ensures that."""

    def exchange() -> list[Any]:
        for connection, kwargs in zip(connections, arguments, strict=True):
            connection.send({"type": "call", "method": method, "kwargs": kwargs})
        try:
            return [connection.recv() for connection in connections]
        except (EOFError, OSError) as error:
            raise HTTPException(503, f"a rollout worker has died ({error}); see the server's log") from error

    replies = await asyncio.to_thread(exchange)
    errors = [reply["error"] for reply in replies if "error" in reply]
    if errors:
        raise HTTPException(500, "; ".join(errors))
    return [reply["result"] for reply in replies]


async def _on_workers(connections: Sequence[Any], method: str) -> list[Any]:
    results = await _call_workers(connections, "coordexp_call", [{"method": method}] * len(connections))
    return [one for of_engine in results for one in of_engine]


async def _check_owner(connections: Sequence[Any], trainer: str) -> None:
    if (reason := refusal_of_owner(await _on_workers(connections, "coordexp_owner"), trainer)) is not None:
        raise HTTPException(409, reason)
