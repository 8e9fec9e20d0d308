"""Parts of the plugin that need nothing of ms-swift (importing it patches transformers' trainers): a heartbeat of its
workers in shared memory, requests one at a time, and seeds by place.

ms-swift's pipe to a worker is silent until an answer is complete. So each worker writes a page of memory after every
step of its engine, and the HTTP process reads it.
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
    """``config`` for each worker, which counts its own requests from 0; ``sizes``: number of requests of each."""
    if config is None or config.seed is None:
        return [config] * len(sizes)
    return [replace(config, seed=config.seed + sum(sizes[:index])) for index in range(len(sizes))]


VARIABLE = "COORDEXP_SWIFT_HEARTBEAT"  # the page's file, for the workers
_ENTRY = struct.Struct("<dQ")  # end of the last step, by the clock that all processes share; number of steps


class SharedHeartbeat:
    """One entry for each worker."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, num_workers: int) -> SharedHeartbeat:
        """A page for the workers that this process starts afterwards."""
        descriptor, path = tempfile.mkstemp(prefix="coordexp-heartbeat-")
        os.ftruncate(descriptor, _ENTRY.size * num_workers)
        os.close(descriptor)
        os.environ[VARIABLE] = path
        return cls(path)

    def forget_name(self) -> None:
        """Call it when all workers have the page: it then disappears with the last process."""
        Path(os.environ[VARIABLE]).unlink(missing_ok=True)

    def record_step(self, worker: int) -> None:
        _, steps = _ENTRY.unpack_from(self._page, _ENTRY.size * worker)
        _ENTRY.pack_into(self._page, _ENTRY.size * worker, time.monotonic(), steps + 1)

    def last_step(self, worker: int) -> tuple[float, int]:
        """End of the last step of ``worker``'s engine, and number of its steps."""
        return _ENTRY.unpack_from(self._page, _ENTRY.size * worker)

    def silent_s(self, busy_since: dict[int, float]) -> float:
        """Seconds since the last step of the slowest worker that has requests; ``busy_since``: start of their call."""
        now = time.monotonic()
        return max((now - max(since, self.last_step(worker)[0]) for worker, since in busy_since.items()), default=0.0)

    def num_steps(self) -> int:
        return sum(self.last_step(worker)[1] for worker in range(len(self._page) // _ENTRY.size))


def with_heartbeat(step: Callable[..., Any], worker: int) -> Callable[..., Any]:
    """``step`` of this worker's engine, recorded on the HTTP process's page; ``step`` itself without a page."""
    path = os.environ.get(VARIABLE)
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
    (ms-swift itself blocks its event loop while it waits for a worker, and the probe with it.)"""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") == "/health":
            await self._app(scope, receive, send)
            return
        async with self._turn:
            await self._app(scope, receive, send)
