"""The vLLM engines of one server, one per data-parallel rank, addressed as one."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coordexp.engine.arguments import NAMES_KEY, NAMES_STATUS, executor_on_cpu, own_arguments
from coordexp.engine.guard_activation import REQUEST_KEY, activated_config, check_guard
from coordexp.engine.logits_processors import check_known_tokens
from coordexp.engine.worker import ADAPTER_ID, ADAPTER_NAME, ADAPTER_PATH, CALL, FAILURE, RESULT
from coordexp.errors import RolloutError
from coordexp.serving.serve.options import ServeOptions, device_groups
from coordexp.serving.serve.starting import EngineThreads

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
RPC_S = 60.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of an engine. ``finish_reason`` is vLLM's: stop, length, abort."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(slots=True)
class EngineGroup:
    """Engines of equal size; ``vllm`` is the module's ``AsyncLLM`` for each data-parallel rank. ``threads``: those that
    started them."""

    engines: list[Any]
    tensor_parallel_size: int
    guarded: bool
    closed_names: bool = False
    threads: EngineThreads = field(default_factory=EngineThreads)
    _num_answering: Counter[int] = field(default_factory=Counter)  # by engine

    @classmethod
    def start(cls, options: ServeOptions, gpu: bool) -> EngineGroup:
        """Load the model into every engine, all at once.

        One engine a rank: ``AsyncLLM(data_parallel_size=2).collective_rpc`` would return the first one's answers only.
        """
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        guarded = activated_config(os.environ) is not None
        arguments = {**options.engine, **own_arguments(options.model, guarded, options.closed_names)}
        if not gpu:
            arguments["distributed_executor_backend"] = executor_on_cpu(options.tensor_parallel_size)
        count = options.data_parallel_size
        devices = device_groups(count, options.tensor_parallel_size) if gpu else [None] * count
        logger.info("starting %d engines", count)
        threads = EngineThreads()
        engines = threads.start(
            lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), devices, options.ready_s
        )
        return cls(engines, options.tensor_parallel_size, guarded, options.closed_names, threads)

    @property
    def world_size(self) -> int:
        """Number of workers, all engines together."""
        return len(self.engines) * self.tensor_parallel_size

    def is_answering(self, index: int) -> bool:
        """Whether engine ``index`` has something to answer."""
        return self._num_answering[index] > 0

    async def workers(
        self,
        method: str,
        args: Sequence[Any] = (),
        *,
        timeout_s: float = RPC_S,
        args_of: Callable[[int], Sequence[Any]] | None = None,
    ) -> list[Any]:
        """Call ``method`` on every worker of every engine at once; results in rank order.

        Args:
            args_of: arguments by engine index, instead of the same for all.

        Raises:
            RolloutError: an engine did not answer in time, or a worker failed: what the first of them said.
        """
        calls = [
            engine.collective_rpc(CALL, args=(method, list(args if args_of is None else args_of(index))))
            for index, engine in enumerate(self.engines)
        ]
        answers = [one for of_engine in await self._all(method, calls, timeout_s) for one in of_engine]
        for answer in answers:
            if FAILURE in answer:
                raise RolloutError(answer[FAILURE])
        return [answer[RESULT] for answer in answers]

    async def answer(
        self, prompt: Mapping[str, Any], sampling: Mapping[str, Any], adapted: bool, names: Sequence[str] = ()
    ) -> Completion:
        """Generate one answer on the engine that has fewest to give; cancelling it aborts the request there.
        ``names``: the only descriptions that it may hold; empty for any.

        Calls may hold a single request each, so requests are dealt out over all calls, not within each.
        """
        index = min(range(len(self.engines)), key=self._num_answering.__getitem__)
        self._num_answering[index] += 1
        try:
            return await self._answer_on(self.engines[index], prompt, sampling, adapted, names)
        finally:
            self._num_answering[index] -= 1

    async def _answer_on(
        self,
        engine: Any,
        prompt: Mapping[str, Any],
        sampling: Mapping[str, Any],
        adapted: bool,
        names: Sequence[str],
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        request_id = uuid.uuid4().hex
        extra: dict[str, Any] = {REQUEST_KEY: request_id, **({NAMES_KEY: list(names)} if names else {})}
        parameters = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY, extra_args=extra)
        adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_PATH) if adapted else None
        final = None
        async for output in engine.generate(prompt, parameters, request_id, lora_request=adapter):
            final = output
        if final is None or not final.finished:
            raise RolloutError("the engine ended a request without an answer; look into the server's log")
        (best,) = final.outputs
        return Completion(
            request_id, tuple(final.prompt_token_ids), tuple(best.token_ids), best.text, str(best.finish_reason)
        )

    async def pop_triggers(self, request_ids: Sequence[str]) -> dict[str, Any]:
        """What the repeat guard did to these requests: id → rule and step; nothing where it is off."""
        if not self.guarded:
            return {}
        triggers: dict[str, Any] = {}
        for of_worker in await self.workers("coordexp_pop_triggers", [list(request_ids)]):
            triggers |= of_worker
        return triggers

    async def reset_caches(self, which: Sequence[str] = ("prefix", "encoder", "mm")) -> None:
        """Empty these caches of every engine.

        Raises:
            RolloutError: an engine kept its cache.
        """
        await asyncio.gather(*(self._reset(cache) for cache in which))

    async def _reset(self, cache: str) -> None:
        calls = [getattr(engine, f"reset_{cache}_cache")() for engine in self.engines]
        if False in await self._all(f"reset_{cache}_cache", calls, RPC_S):
            raise RolloutError(f"an engine kept its {cache} cache, as if requests were running")

    async def check_health(self) -> None:
        """Raises vLLM's own error where an engine is dead."""
        await self._all("check_health", [engine.check_health() for engine in self.engines], RPC_S)

    async def check_answers(self) -> None:
        """Refuse to serve answers that the environment's repeat guard should watch and does not, or that may contain
        ids beyond the tokenizer's vocabulary.

        Raises:
            RolloutError: a worker dropped a logits processor, or guards by other thresholds.
        """
        workers = await self.workers("coordexp_status")
        check_guard(workers, activated_config(os.environ))
        check_known_tokens(workers)
        if self.closed_names:
            from coordexp.engine.logits_processors import check_names

            check_names([bool(one[NAMES_STATUS]) for one in workers])

    def shutdown(self) -> None:
        """End every engine process; safe to call twice."""
        while self.engines:
            self.engines.pop().shutdown(timeout=5.0)
        self.threads.close()

    async def _all(self, what: str, calls: Sequence[Awaitable[Result]], timeout_s: float) -> list[Result]:
        try:
            return list(await asyncio.wait_for(asyncio.gather(*calls), timeout_s))
        except TimeoutError as error:
            raise RolloutError(f"{what}: an engine did not answer within {timeout_s:g} s") from error
