"""Answers and pushes exclude each other; half-pushed weights answer nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coordexp.rollouts.engine.stamp import WeightStamp
from coordexp.serving.gate import RequestRefused, WeightGate


def run(scenario: Callable[[WeightGate], Awaitable[Any]], wait_s: float = 5.0) -> Any:
    async def inside() -> Any:
        return await scenario(WeightGate(wait_s))

    return asyncio.run(inside())


def test_answers_know_their_version() -> None:
    async def scenario(gate: WeightGate) -> list[int]:
        seen = []
        for version in (0, 7):
            await gate.begin()
            gate.commit(WeightStamp(version))
            async with gate.answering() as current:
                seen.append(current.version)
        return seen

    assert run(scenario) == [0, 7]


def test_a_push_waits_for_answers_and_keeps_new_ones_out() -> None:
    async def scenario(gate: WeightGate) -> list[str]:
        order: list[str] = []

        async def answer() -> None:
            async with gate.answering():
                await asyncio.sleep(0.1)
                order.append("answered")

        async def push() -> None:
            await gate.begin()
            order.append("pushing")

        answering = asyncio.create_task(answer())
        await asyncio.sleep(0.01)
        pushing = asyncio.create_task(push())
        await asyncio.sleep(0.01)
        with pytest.raises(RequestRefused, match="being pushed") as refused:
            async with gate.answering():
                order.append("never")
        assert refused.value.status == 409
        await asyncio.gather(answering, pushing)
        return order

    assert run(scenario) == ["answered", "pushing"]


def test_a_push_gives_up_on_answers_that_do_not_end() -> None:
    async def scenario(gate: WeightGate) -> None:
        async with gate.answering():
            with pytest.raises(RequestRefused, match="1 requests were still being answered"):
                await gate.begin()
        async with gate.answering():  # the old weights are whole, so they go on answering
            pass

    run(scenario, wait_s=0.05)


def test_after_a_failed_push_only_a_whole_one_helps() -> None:
    async def scenario(gate: WeightGate) -> None:
        await gate.begin()
        gate.fail("the learner left")
        for _ in range(2):
            with pytest.raises(RequestRefused, match="the learner left"):
                async with gate.answering():
                    pass
        await gate.begin()
        gate.commit(WeightStamp(3, "a"))
        async with gate.answering() as stamp:
            assert stamp == WeightStamp(3, "a")

    run(scenario)


def test_a_failure_outside_a_push_breaks_nothing() -> None:
    async def scenario(gate: WeightGate) -> None:
        gate.fail("a learner left, long after its push")
        async with gate.answering():
            pass

    run(scenario)
