"""Who may use the weights now: answers and pushes exclude each other, and half-pushed weights answer nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from coordexp.errors import RolloutError
from coordexp.weight_sync.version import WeightVersion


class RequestRefused(RolloutError):
    """A request that this server does not serve; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class WeightLock:
    """State of a server's weights. Used from one event loop.

    ``ready`` → (first bucket) ``updating`` → (commit) ``ready``; any failure between leads to ``broken``, out of which
    only a complete push leads.
    """

    wait_s: float
    stamp: WeightVersion = field(default_factory=WeightVersion)
    broken: str | None = None
    updating: bool = False
    num_answering: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[WeightVersion]:
        """Within it the weights do not change; says which they are.

        Raises:
            RequestRefused: weights are being pushed, or a push failed half-way.
        """
        if self.updating:
            raise RequestRefused(409, "weights are being pushed; ask again when the push has ended")
        if self.broken is not None:
            raise RequestRefused(
                409, f"the last push of weights failed half-way ({self.broken}); push them again before asking"
            )
        self.num_answering += 1
        self._idle.clear()
        try:
            yield self.stamp
        finally:
            self.num_answering -= 1
            if self.num_answering == 0:
                self._idle.set()

    async def begin(self) -> None:
        """Open a push, or go on with the open one: wait for running answers, and let no new one start.

        Raises:
            RequestRefused: answers are still running at the deadline.
        """
        if self.updating:
            return
        self.updating = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.wait_s)
        except TimeoutError as error:
            self.updating = False
            raise RequestRefused(
                409, f"{self.num_answering} requests were still being answered after {self.wait_s:g} s; push later"
            ) from error

    def commit(self, stamp: WeightVersion) -> None:
        """The push is complete."""
        self.updating, self.broken, self.stamp = False, None, stamp

    def fail(self, why: str) -> None:
        """The push under way failed: the weights are neither the old ones nor the new."""
        if self.updating:
            self.updating, self.broken = False, why
