"""Whether the engines still stir: a question to every worker every other second, and how long the last answer is ago.

A process that answers HTTP may stand before an engine that hangs, and a long answer looks from outside as a hung one
does. Engines answer between two decoding steps, so a busy one answers too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)
EVERY_S = 2.0


@dataclass(slots=True)
class Heartbeat:
    """``engines``: vLLM's ``AsyncLLM``, one for each data-parallel rank."""

    engines: list[Any]
    every_s: float = EVERY_S
    _heard_at: dict[int, float] = field(default_factory=dict)

    @property
    def silent_s(self) -> float:
        """Seconds since the slowest engine answered; 0 before :meth:`run`."""
        now = time.monotonic()
        return max((now - heard_at for heard_at in self._heard_at.values()), default=0.0)

    async def run(self) -> None:
        """Ask for ever; to be cancelled."""
        await asyncio.gather(*(self._ask(number, engine) for number, engine in enumerate(self.engines)))

    async def _ask(self, number: int, engine: Any) -> None:
        while True:
            self._heard_at.setdefault(number, time.monotonic())
            try:
                await engine.collective_rpc("coordexp_beat")
            except Exception as error:  # of a dead engine, whose death check_health tells; its silence grows here
                logger.warning("engine %d does not answer: %s: %s", number, type(error).__name__, error)
            else:
                self._heard_at[number] = time.monotonic()
            await asyncio.sleep(self.every_s)
