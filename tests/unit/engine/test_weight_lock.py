"""Answers and pushes exclude each other, and half-pushed weights never answer; vLLM's endpoints included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="its endpoints are locked too")

from vllm.exceptions import GracefulHTTPError

from coordexp.engine.server.app import WeightLock
from coordexp.engine.server.openai import LockedEngine
from coordexp.engine.wire.protocol import RequestRefused


def run(scenario: Callable[[WeightLock], Awaitable[Any]], wait_s: float = 5.0) -> Any:
    async def inside() -> Any:
        return await scenario(WeightLock(wait_s))

    return asyncio.run(inside())


def test_a_push_waits_for_answers_and_blocks_new_ones() -> None:
    async def scenario(lock: WeightLock) -> list[str]:
        order: list[str] = []

        async def answer() -> None:
            async with lock.answering():
                await asyncio.sleep(0.1)
                order.append("answered")

        async def push() -> None:
            await lock.begin()
            order.append("pushing")

        answering = asyncio.create_task(answer())
        await asyncio.sleep(0.01)
        pushing = asyncio.create_task(push())
        await asyncio.sleep(0.01)
        with pytest.raises(RequestRefused, match="being pushed") as refused:
            async with lock.answering():
                order.append("never")
        assert refused.value.status == 409
        await asyncio.gather(answering, pushing)
        return order

    assert run(scenario) == ["answered", "pushing"]


def test_a_push_times_out_if_answers_do_not_end() -> None:
    async def scenario(lock: WeightLock) -> None:
        async with lock.answering():
            with pytest.raises(RequestRefused, match="1 requests were still being answered"):
                await lock.begin()
        async with lock.answering():  # the old weights are complete, so answering continues
            pass

    run(scenario, wait_s=0.05)


def test_a_failure_outside_a_push_keeps_the_weights_valid() -> None:
    async def scenario(lock: WeightLock) -> None:
        lock.fail("a trainer left, long after its push")
        async with lock.answering():
            pass

    run(scenario)


class Engine:
    """Decodes three tokens without delay."""

    num_decoded = 0

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[int]:
        for token in range(3):
            self.num_decoded += 1
            yield token


def openai_answer(lock: WeightLock, engine: Engine, **extra: Any) -> AsyncIterator[Any]:
    server: Any = SimpleNamespace(lock=lock, engine=engine)
    return LockedEngine(server).generate("prompt", SimpleNamespace(extra_args=extra, skip_special_tokens=True), "id")


def test_a_slow_openai_client_does_not_delay_a_push() -> None:
    async def scenario(lock: WeightLock) -> list[Any]:
        engine = Engine()
        answer = openai_answer(lock, engine)
        first = await anext(answer)
        await lock.begin()
        assert engine.num_decoded == 3
        return [first, *[token async for token in answer]]

    assert run(scenario) == [0, 1, 2]


def test_an_openai_request_during_a_push_is_refused() -> None:
    async def scenario(lock: WeightLock) -> None:
        await lock.begin()
        with pytest.raises(GracefulHTTPError, match="being pushed") as refused:  # which vLLM's handlers translate
            await anext(openai_answer(lock, Engine()))
        assert refused.value.http_status == 409

    run(scenario)


def test_openai_clients_cannot_set_internal_arguments() -> None:
    async def scenario(lock: WeightLock) -> None:
        with pytest.raises(ValueError, match="coordexp_names"):
            await anext(openai_answer(lock, Engine(), coordexp_names=["cat"]))

    run(scenario)
