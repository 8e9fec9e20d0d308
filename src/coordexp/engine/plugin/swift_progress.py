"""Whether the workers of ``swift rollout`` get on while they decode: a page of memory that each of them writes after
every step of its engine and the HTTP process reads, whose pipe to a worker is silent until an answer is whole. And the
seeds of a call, by place. Imports nothing of ms-swift, whose trainers patch transformers' own.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RequestConfig


def seeded_by_place(config: RequestConfig | None, sizes: Sequence[int]) -> list[RequestConfig | None]:
    """``config`` for each worker, which counts its own requests from 0; ``sizes``: how many each of them gets."""
    if config is None or config.seed is None:
        return [config] * len(sizes)
    return [replace(config, seed=config.seed + sum(sizes[:index])) for index in range(len(sizes))]


VARIABLE = "COORDEXP_SWIFT_PROGRESS"  # the page's file, for the workers
_ENTRY = struct.Struct("<dQ")  # when the last step ended, by the clock that all processes share; how many there were


class ProgressPage:
    """One entry for each worker."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, num_workers: int) -> ProgressPage:
        """A page for the workers that this process starts from now on."""
        descriptor, path = tempfile.mkstemp(prefix="coordexp-progress-")
        os.ftruncate(descriptor, _ENTRY.size * num_workers)
        os.close(descriptor)
        os.environ[VARIABLE] = path
        return cls(path)

    def forget_name(self) -> None:
        """Once all workers have it: the page is gone with the last process."""
        Path(os.environ[VARIABLE]).unlink(missing_ok=True)

    def note(self, worker: int) -> None:
        """A step of ``worker``'s engine has ended."""
        _, steps = _ENTRY.unpack_from(self._page, _ENTRY.size * worker)
        _ENTRY.pack_into(self._page, _ENTRY.size * worker, time.monotonic(), steps + 1)

    def last_step(self, worker: int) -> tuple[float, int]:
        """When that of ``worker``'s engine ended, and how many it has done."""
        return _ENTRY.unpack_from(self._page, _ENTRY.size * worker)

    def silent_s(self, busy_since: dict[int, float]) -> float:
        """For how long the slowest of the workers that have something to answer has done no step."""
        now = time.monotonic()
        return max((now - max(since, self.last_step(worker)[0]) for worker, since in busy_since.items()), default=0.0)

    def num_steps(self) -> int:
        """Of all workers together."""
        return sum(self.last_step(worker)[1] for worker in range(len(self._page) // _ENTRY.size))


def noted(step: Callable[..., Any], worker: int) -> Callable[..., Any]:
    """``step`` of this worker's engine, noted on the page that the HTTP process gave it; itself where there is none."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return step
    page = ProgressPage(path)

    def step_and_note(*arguments: Any, **options: Any) -> Any:
        outputs = step(*arguments, **options)
        page.note(worker)
        return outputs

    return step_and_note


class OneAtATime:
    """ASGI middleware: requests after one another, as ms-swift's pipes to its workers want it; ``/health/`` between.

    ms-swift itself holds its event loop while it waits for a worker, which comes to the same but for the probe.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") == "/health":
            await self._app(scope, receive, send)
            return
        async with self._turn:
            await self._app(scope, receive, send)
