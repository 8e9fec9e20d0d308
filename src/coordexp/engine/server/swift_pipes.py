"""``swift rollout``'s pipes to its workers: a heartbeat next to them, one call at a time, seeds by place. Does not
import ms-swift, which patches transformers' trainers."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

# ms-swift's pipe to a worker is silent until an answer is complete. So each worker writes a page of memory after every
# step of its engine, and the HTTP process reads it.

HEARTBEAT_PATH = "COORDEXP_SWIFT_HEARTBEAT"  # the page's file, for the workers
# time.monotonic() at the end of the last step, a clock that all processes of a machine share; number of steps.
_ENTRY = np.dtype([("stepped_at", "<f8"), ("num_steps", "<u8")])


class SharedHeartbeat:
    """A page of memory with one entry for each worker."""

    def __init__(self, path: str) -> None:
        self._page = np.memmap(path, _ENTRY, "r+")

    @classmethod
    def create(cls, num_workers: int) -> SharedHeartbeat:
        """A page for the workers that this process starts afterwards."""
        descriptor, path = tempfile.mkstemp(prefix="coordexp-heartbeat-")
        os.ftruncate(descriptor, _ENTRY.itemsize * num_workers)
        os.close(descriptor)
        os.environ[HEARTBEAT_PATH] = path
        return cls(path)

    def forget_name(self) -> None:
        """Remove the page's file name. Call it when all workers have mapped the page, which lives until the last one
        ends."""
        Path(os.environ[HEARTBEAT_PATH]).unlink(missing_ok=True)

    def record_step(self, worker: int) -> None:
        self._page[worker] = time.monotonic(), self._page[worker]["num_steps"] + 1

    def silent_s(self, busy_since: dict[int, float]) -> float:
        """Seconds since the last step of the slowest worker that has requests; ``busy_since``: start of their call."""
        now, stepped_at = time.monotonic(), self._page["stepped_at"].tolist()
        return max((now - max(since, stepped_at[worker]) for worker, since in busy_since.items()), default=0.0)

    def num_steps(self) -> int:
        return int(self._page["num_steps"].sum())


def with_heartbeat(step: Callable[..., Any], worker: int) -> Callable[..., Any]:
    """``step`` of this worker's engine, recorded on the HTTP process's page; ``step`` itself without a page."""
    path = os.environ.get(HEARTBEAT_PATH)
    if path is None:
        return step
    page = SharedHeartbeat(path)

    def step_and_record(*arguments: Any, **options: Any) -> Any:
        outputs = step(*arguments, **options)
        page.record_step(worker)
        return outputs

    return step_and_record


class SerializeRequests:
    """ASGI middleware: one request at a time, as ms-swift's pipes to its workers require, except ``/health/``.
    (ms-swift itself blocks its event loop while it waits for a worker, so health checks would wait too.)"""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") == "/health":
            await self._app(scope, receive, send)
            return
        async with self._turn:
            await self._app(scope, receive, send)


def seeded_by_place(config: Any, sizes: Sequence[int]) -> list[Any]:
    """``config`` for each worker, with the seed of its first request: workers add only the index within their own
    requests. ``sizes``: number of requests of each worker."""
    if config is None or config.seed is None:
        return [config] * len(sizes)
    return [replace(config, seed=config.seed + sum(sizes[:index])) for index in range(len(sizes))]
