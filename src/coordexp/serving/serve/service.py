"""What ``coordexp serve`` does when it is asked: answers by its engines, pushes of weights, and its state.

An error reaches the caller, and a push that fails half-way leaves a server that answers nothing until a whole one came.

The heartbeat tells whether the engines get on: a process that answers HTTP may stand before an engine that hangs, and a
long answer looks from outside as a hung one does. Engines answer between two decoding steps, so a busy one answers too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from coordexp.engine import versions
from coordexp.serving.serve.engines import Completion, EngineGroup
from coordexp.serving.serve.options import ServeOptions
from coordexp.serving.serve.requests import MAX_REQUESTS, InferRequest, PromptBuilder, RequestConfig
from coordexp.serving.serve.weight_lock import RequestRefused, WeightLock
from coordexp.weight_sync.version import WeightVersion

logger = logging.getLogger(__name__)
EVERY_S = 2.0


@dataclass(slots=True)
class Heartbeat:
    """``engines``: vLLM's ``AsyncLLM``, one for each data-parallel rank; ``is_answering``: whether one has something to
    answer."""

    engines: list[Any]
    is_answering: Callable[[int], bool]
    every_s: float = EVERY_S
    _heard_at: dict[int, float] = field(default_factory=dict)
    _drew_at: dict[int, float] = field(default_factory=dict)
    _num_drawn: dict[int, int] = field(default_factory=dict)

    @property
    def silent_s(self) -> float:
        """Seconds since the slowest engine answered; 0 before :meth:`run`."""
        return _longest_ago(self._heard_at)

    @property
    def tokenless_s(self) -> float:
        """Seconds since the slowest engine drew a token or had nothing to answer; 0 before :meth:`run`."""
        return _longest_ago(self._drew_at)

    @property
    def num_tokens(self) -> int:
        """Tokens that the engines have drawn since their start."""
        return sum(self._num_drawn.values())

    def report(self) -> dict[str, Any]:
        """For ``/health/`` and ``/status/``."""
        return {
            "engine_silent_s": round(self.silent_s, 1),
            "engine_tokenless_s": round(self.tokenless_s, 1),
            "num_tokens": self.num_tokens,
        }

    async def run(self) -> None:
        """Ask for ever; to be cancelled."""
        await asyncio.gather(*(self._ask(number, engine) for number, engine in enumerate(self.engines)))

    async def _ask(self, number: int, engine: Any) -> None:
        while True:
            self._heard_at.setdefault(number, time.monotonic())
            self._drew_at.setdefault(number, time.monotonic())
            try:
                num_drawn = max(await engine.collective_rpc("coordexp_beat"))
            except Exception as error:  # of a dead engine, whose death check_health tells; its silence grows here
                logger.warning("engine %d does not answer: %s: %s", number, type(error).__name__, error)
            else:
                self._heard_at[number] = time.monotonic()
                if num_drawn != self._num_drawn.get(number) or not self.is_answering(number):
                    self._drew_at[number] = time.monotonic()
                self._num_drawn[number] = num_drawn
            await asyncio.sleep(self.every_s)


def _longest_ago(times: Mapping[int, float]) -> float:
    now = time.monotonic()
    return max((now - at for at in times.values()), default=0.0)


Result = TypeVar("Result")
MAX_WAIT_S = 3600.0
MAX_LEARNER_ID = 64
MAX_TOKEN = 128
DECODED_AT_ONCE = 2  # calls whose images are decoded at a time: each may hold large ones


class GroupRequest(BaseModel):
    """Where to meet a learner. ``host`` is ms-swift's; this server listens on its own address. ``token``: what it shall
    ask of whoever comes there."""

    host: str = ""
    port: int = Field(ge=1, le=65535)
    world_size: int = Field(ge=2)
    first_rank: int = 0
    timeout_s: float = Field(default=120.0, gt=0, le=MAX_WAIT_S)
    token: str = Field(default="", max_length=MAX_TOKEN, repr=False)


class CommitRequest(BaseModel):
    """End of a push; ms-swift's clients send nothing."""

    weight_version: int | None = None
    learner_id: str | None = Field(default=None, max_length=MAX_LEARNER_ID)
    wants_checksum: bool = False


class RolloutServer:
    """State and actions behind the endpoints."""

    def __init__(self, options: ServeOptions, engines: EngineGroup, prompts: PromptBuilder) -> None:
        self.options = options
        self.engines = engines
        self.lock = WeightLock(options.push_wait_s)
        self.heartbeat = Heartbeat(engines.engines, engines.is_answering)
        self._prompts = prompts
        self._decoding = asyncio.Semaphore(DECODED_AT_ONCE)
        self._group_open = False
        self._group_lock = asyncio.Lock()  # one action on the weight group at a time
        self._timeout_s = options.push_wait_s
        self._adapted = False
        self._push_is_adapter = False

    async def infer(self, requests: list[InferRequest], config: RequestConfig) -> list[dict[str, Any]]:
        """One answer per request, in their order, all from the same weights; a push waits until they are given.

        Raises:
            RequestRefused: too many requests, or one that cannot be answered.
        """
        if len(requests) > MAX_REQUESTS:
            raise RequestRefused(413, f"{len(requests)} requests in one call; at most {MAX_REQUESTS}")
        names = [request.closed_names() for request in requests]
        if any(names) and not self.engines.closed_names:
            raise RequestRefused(
                400,
                "this server takes no closed list of class names; start it with "
                "rollout_matching.vllm.server.closed_names: true",
            )
        async with self.lock.answering() as stamp:
            async with self._decoding:
                prompts = await asyncio.to_thread(lambda: [self._prompts.build(request) for request in requests])
            completions = await _together(
                self.engines.answer(prompt, config.sampling_arguments(index), self._adapted, names[index])
                for index, prompt in enumerate(prompts)
            )
            triggers = await self.engines.pop_triggers([one.request_id for one in completions])
        return [
            {
                "response": self._response(one, config.return_details),
                "coordexp": {
                    **stamp.payload(),
                    "repeat_terminate_active": int(self.engines.guarded),
                    "repeat_terminate_triggered": int(one.request_id in triggers),
                    **({} if request.uuid is None else {"uuid": request.uuid}),
                },
            }
            for request, one in zip(requests, completions, strict=True)
        ]

    async def open_group(self, request: GroupRequest) -> None:
        """Let all workers join the learner's weight group; a group before it is left.

        Raises:
            RequestRefused: not this server's port or number of workers. RolloutError: they did not meet in time.
        """
        if request.port != self.options.group_port:
            raise RequestRefused(400, f"this server's group_port is {self.options.group_port}, not {request.port}")
        if request.world_size != self.engines.world_size + 1:
            raise RequestRefused(
                400,
                f"this server's group has {self.engines.world_size} workers and a learner, not {request.world_size}",
            )
        async with self._group_lock:
            self.lock.fail("another learner took the server over in the middle of a push")
            self._timeout_s = request.timeout_s
            self._group_open = False
            await self.engines.workers(
                "init_communicator",
                args_of=lambda index: (
                    self.options.advertised_host,
                    request.port,
                    request.world_size,
                    index * self.engines.tensor_parallel_size,
                    request.timeout_s,
                    request.token,
                    "" if self.options.host == self.options.advertised_host else self.options.host,
                ),
                timeout_s=request.timeout_s + 30,
            )
            self._group_open = True

    async def close_group(self) -> None:
        """Let all workers leave the group; a push under way has failed."""
        async with self._group_lock:
            self.lock.fail("the learner left in the middle of a push")
            self._group_open = False
            await self.engines.workers("close_communicator", timeout_s=self._timeout_s + 30)

    async def update(self, method: str, *args: Any, adapter: bool = False) -> None:
        """Take one bucket; the first one opens a push."""
        async with self._group_lock:
            if not self._group_open:
                raise RequestRefused(409, "no weight group is open; call /init_communicator/ first")
            if not self.lock.updating:
                self._push_is_adapter = False
            await self.lock.begin()
            self._push_is_adapter |= adapter
            await self._or_broken(self.engines.workers(method, args, timeout_s=self._timeout_s + 30))

    async def commit(self, request: CommitRequest) -> list[dict[str, Any]]:
        """End the push: from now on answers come from these weights. Each worker's report.

        Raises:
            RequestRefused: no push is under way. RolloutError: a worker did not get all of them.
        """
        async with self._group_lock:
            if not self.lock.updating:
                raise RequestRefused(409, f"no push is under way{self._broken_clause()}")
            version = self.lock.stamp.version + 1 if request.weight_version is None else request.weight_version
            stamp = WeightVersion(version, request.learner_id)
            reports = await self._or_broken(
                self.engines.workers(
                    "process_weights_after_loading",
                    [stamp.version, request.wants_checksum, stamp.learner_id],
                    timeout_s=MAX_WAIT_S,
                )
            )
            await self._or_broken(self.engines.reset_caches())
            self._adapted = self._push_is_adapter
            self.lock.commit(stamp)
            return reports

    async def status(self) -> dict[str, Any]:
        """What the server is, which weights it has, and each worker's state."""
        workers = await self.engines.workers("coordexp_status")
        return {
            "server": "coordexp serve",
            "engine_alive": True,
            "model": str(self.options.model),
            "world_size": self.engines.world_size,
            "data_parallel_size": len(self.engines.engines),
            **self.lock.stamp.payload(),
            "weight_checksum": workers[0]["checksum"],
            "push_open": self.lock.updating,
            "broken": self.lock.broken,
            **self.heartbeat.report(),
            "adapter": self._adapted,
            "num_answering": self.lock.num_answering,
            "repeat_terminate": workers[0]["repeat_terminate"],
            "versions": versions(),
            "workers": workers,
        }

    async def _or_broken(self, action: Awaitable[Result]) -> Result:
        try:
            return await action
        except BaseException as error:
            self.lock.fail(f"{type(error).__name__}: {error}")
            raise

    def _broken_clause(self) -> str:
        return "" if self.lock.broken is None else f"; the last one failed: {self.lock.broken}"

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


async def _together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order; the first failure cancels the rest."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]
