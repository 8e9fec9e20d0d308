"""Which engine of a server answers which request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from coordexp.serving.serve.engines import EngineGroup


class FakeEngine:
    """Answers nothing until it may."""

    def __init__(self) -> None:
        self.num_answering = 0
        self.may_answer = asyncio.Event()

    async def generate(self, prompt: Any, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.num_answering += 1
        try:
            await self.may_answer.wait()
            output = SimpleNamespace(token_ids=[1], text="", finish_reason="stop")
            yield SimpleNamespace(finished=True, prompt_token_ids=[2], outputs=[output])
        finally:
            self.num_answering -= 1


async def asked(group: EngineGroup, count: int) -> list[asyncio.Task[Any]]:
    """``count`` calls of one request each, as micro-steps of one sample make them."""
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(group.answer({"prompt": ""}, {}, False)))
        await asyncio.sleep(0)
    return tasks


def test_calls_of_one_request_each_keep_every_engine_busy() -> None:
    async def scenario() -> None:
        engines = [FakeEngine() for _ in range(3)]
        group = EngineGroup(list(engines), 1, guarded=False)
        tasks = await asked(group, 6)
        assert [engine.num_answering for engine in engines] == [2, 2, 2]
        engines[1].may_answer.set()
        await asyncio.gather(tasks[1], tasks[4])
        engines[1].may_answer.clear()
        more = await asked(group, 2)  # to the engine that has become free
        assert [engine.num_answering for engine in engines] == [2, 2, 2]
        for task in more:
            task.cancel()  # a client that hangs up frees its place too
        await asyncio.gather(*more, return_exceptions=True)
        more = await asked(group, 1)
        assert [engine.num_answering for engine in engines] == [2, 1, 2]
        for engine in engines:
            engine.may_answer.set()
        await asyncio.gather(*tasks, *more)

    asyncio.run(scenario())
