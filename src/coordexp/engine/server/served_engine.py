"""The vLLM engine behind ``coordexp serve``: start, answers, worker calls, progress."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from vllm import AsyncEngineArgs, SamplingParams
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import PrometheusStatLogger

from coordexp.engine.server.options import ServeOptions
from coordexp.engine.wire.arguments import (
    CALL,
    FAILURE,
    RESULT,
    activated_config,
    check_fits_drafts,
    check_fits_guard,
    end_at_turn_end,
    executor_on_cpu,
    extra_args,
    own_arguments,
    pushed_adapter,
    with_image_size,
    with_room_for_drafts,
)
from coordexp.engine.wire.engine_process import engines_import_quickly
from coordexp.engine.wire.starting import announced_start, engine_errors
from coordexp.errors import RolloutError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
RPC_S = 60.0
HEARTBEAT_S = 2.0
ALIVE_S = 1.0  # how often a call that waits looks whether its engine still lives


@dataclass(slots=True)
class ServedEngine:
    """vLLM's ``AsyncLLM``, which runs one engine process per data-parallel rank and spreads requests over them."""

    llm: Any
    world_size: int  # workers of all ranks
    guarded: bool
    takes_class_names: bool = False
    drafts: bool = False  # whether forced tokens are skipped
    adapted: bool = False  # whether answers use the pushed LoRA adapter

    @classmethod
    def start(cls, options: ServeOptions, gpu: bool) -> ServedEngine:
        """Load the model. Raises RolloutError if vLLM refuses it, or it is not ready within ``options.ready_s``."""
        guarded = activated_config(os.environ) is not None
        arguments = {
            **options.engine,
            **own_arguments(options.model, guarded, options.takes_class_names, options.skip_forced_tokens),
            "data_parallel_size": options.data_parallel_size,
        }
        arguments = with_room_for_drafts(with_image_size(arguments))
        if not gpu:
            arguments["distributed_executor_backend"] = executor_on_cpu(options.tensor_parallel_size)
        elif options.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = "uni"  # vLLM would start a worker process per rank
        done = threading.Event()

        # vLLM waits for its engine processes without a timeout, but raises an error if they end.
        def end_at_deadline() -> None:
            if not done.wait(options.ready_s):
                while not done.wait(0.1):
                    for child in multiprocessing.active_children():
                        child.kill()

        engines_import_quickly()
        begun = time.monotonic()
        threading.Thread(target=end_at_deadline, name="engine-start-deadline", daemon=True).start()
        try:
            with announced_start(arguments, gpu=gpu):
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[PrometheusStatLogger])
        except Exception as error:
            if time.monotonic() - begun < options.ready_s:
                with engine_errors("the vLLM engine could not be started"):
                    raise
            raise RolloutError(
                f"launch.wait_s: the engine was not ready within {options.ready_s:g} s; see the log above, or allow "
                "more seconds"
            ) from error
        finally:
            done.set()
        end_at_turn_end(llm)
        return cls(llm, options.world_size, guarded, options.takes_class_names, options.skip_forced_tokens)

    def render(self, prompt: Mapping[str, Any]) -> Any:
        """Process a prompt and its images for the engines. Thread-safe."""
        (rendered,) = self.llm.renderer.render_cmpl([parse_model_prompt(self.llm.model_config, prompt)])
        return rendered

    def is_answering(self, rank: int) -> bool:
        core = self.llm.engine_core
        if len(core.core_engines) == 1:
            return self.llm.output_processor.has_unfinished_requests()
        return core.engine_inflight[core.core_engines[rank]] > 0

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        """vLLM's outputs for one request, with the pushed adapter if there is one. Raises ValueError for
        parameters that the repeat guard or drafts exclude."""
        if self.guarded:  # with drafts vLLM is given no processors, and asks none
            check_fits_guard(sampling_params)
        if self.drafts:
            check_fits_drafts(sampling_params)
        adapter = pushed_adapter() if self.adapted else None
        return self.llm.generate(prompt, sampling_params, request_id, lora_request=adapter, **options)

    async def answer(self, prompt: Any, sampling: Mapping[str, Any], class_names: Sequence[str] = ()) -> Any:
        """vLLM's final output for one rendered prompt; cancelling it aborts the request. ``sampling``: arguments of
        ``SamplingParams``; ``class_names``: those that the answer is limited to, empty for no limit."""
        request_id = uuid.uuid4().hex
        extra = extra_args(request_id, class_names)
        parameters = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY, extra_args=extra)
        final = None
        async for output in self.generate(prompt, parameters, request_id):
            final = output
        if final is None or not final.finished:
            raise RolloutError("the engine ended a request without an answer; look into the server's log")
        return final

    async def workers(self, method: str, *args: Any, timeout_s: float = RPC_S) -> list[Any]:
        """Call ``method`` on every worker of every rank at once; results in rank order. Raises RolloutError if a worker
        fails or does not answer in time."""
        answers = list(chain.from_iterable(await self._all_ranks(CALL, method, list(args), timeout_s=timeout_s)))
        for answer in answers:
            if FAILURE in answer:
                raise RolloutError(answer[FAILURE])
        return [answer[RESULT] for answer in answers]

    async def num_sampled(self) -> list[int]:
        """Tokens sampled since the start, by rank."""
        return [max(of_rank) for of_rank in await self._all_ranks("coordexp_beat", timeout_s=None)]

    async def pop_triggers(self, request_ids: Sequence[str]) -> set[str]:
        """Those of ``request_ids`` that the repeat guard ended; each is reported once."""
        popped = await self.workers("coordexp_pop_triggers", list(request_ids)) if self.guarded else []
        return set(chain.from_iterable(popped))

    async def reset_caches(self, caches: Sequence[str] = ("prefix", "encoder", "mm")) -> None:
        """Empty these caches of every rank. Raises RolloutError if a rank kept one."""
        for cache in caches:
            what = f"reset_{cache}_cache"
            if await self._in_time(what, getattr(self.llm, what)(), RPC_S) is False:
                raise RolloutError(f"an engine could not empty its {cache} cache because requests are running")

    async def check_health(self) -> None:
        await self.llm.check_health()

    def shutdown(self) -> None:
        """Safe to call twice."""
        self.llm.shutdown(timeout=5.0)

    async def _all_ranks(self, method: str, *args: Any, timeout_s: float | None) -> list[list[Any]]:
        # AsyncLLM.collective_rpc returns the first rank's results only.
        call = self.llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        return await self._in_time(args[0] if args else method, call, timeout_s)

    async def _in_time(self, what: str, call: Awaitable[Result], timeout_s: float | None) -> Result:
        # vLLM leaves calls unanswered that wait while their engine dies.
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                if (left := deadline - time.monotonic()) <= 0:
                    raise RolloutError(f"{what}: an engine did not answer within {timeout_s:g} s")
                await self.check_health()
                await asyncio.wait({task}, timeout=min(left, ALIVE_S))
            return task.result()
        finally:
            task.cancel()


@dataclass(slots=True)
class Heartbeat:
    """Reads each engine's token count every few seconds. If an engine hangs, the HTTP server may still respond, and to
    a client the hang looks like a long answer."""

    engine: ServedEngine
    every_s: float = HEARTBEAT_S
    _num_tokens: list[int] = field(default_factory=list)  # by rank
    _progress_at: list[float] = field(default_factory=list)  # when a rank last sampled a token or had nothing to answer
    _heard_at: float = math.inf  # when all ranks last replied

    def report(self) -> dict[str, Any]:
        """Seconds since the slowest rank replied and made progress (0 before :meth:`run`); tokens sampled so far."""
        now = time.monotonic()
        return {
            "engine_silent_s": round(max(0.0, now - self._heard_at), 1),
            "engine_tokenless_s": round(now - min(self._progress_at, default=now), 1),
            "num_tokens": sum(self._num_tokens),
        }

    async def run(self) -> None:
        self._heard_at = time.monotonic()
        while True:
            try:
                num_tokens = await self.engine.num_sampled()
            except Exception as error:  # keep probing: engine_silent_s grows, and check_health reports a dead engine
                logger.warning("an engine does not answer: %s: %s", type(error).__name__, error)
            else:
                self._heard_at = now = time.monotonic()
                before, since = self._num_tokens or num_tokens, self._progress_at or [now] * len(num_tokens)
                self._progress_at = [
                    now if count != before[rank] or not self.engine.is_answering(rank) else since[rank]
                    for rank, count in enumerate(num_tokens)
                ]
                self._num_tokens = num_tokens
            await asyncio.sleep(self.every_s)
