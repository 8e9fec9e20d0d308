"""Whether the engines get on: a question to every worker every other second, how long the last answer is ago, and since
when an engine that has something to answer has drawn no token.

A process that answers HTTP may stand before an engine that hangs, and a long answer looks from outside as a hung one
does. Engines answer between two decoding steps, so a busy one answers too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
