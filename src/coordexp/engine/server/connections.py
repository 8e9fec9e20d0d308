"""Limits on connections to ``coordexp serve`` before a request has arrived: how many, and how long a head may take."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)
HEAD_S = 20.0  # for the request line and headers; a connection without either is closed
MOST_CONNECTIONS = 1024
_OTHER_FILES = 128  # that the process needs beside connections
_LOG_EVERY_S = 60.0


def bounded_config(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration of ``app`` with these limits; ``options``: uvicorn's own."""
    protocol: Any = type("Bounded", (BoundedProtocol,), {"most": most_connections()})
    return uvicorn.Config(app, http=protocol, log_config=None, **options)


def most_connections() -> int:
    """Connections at a time, fewer than the files that this process may open: one more must not stop `accept`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(16, min(MOST_CONNECTIONS, soft - _OTHER_FILES))


_Protocol: Any = AutoHTTPProtocol  # httptools' or h11's, whichever is installed


class BoundedProtocol(_Protocol):
    """uvicorn's HTTP protocol with a deadline for each request's head, and a limit of connections. uvicorn itself waits
    for ever for the rest of a head, and counts connections only once they have sent one."""

    head_s = HEAD_S
    most = MOST_CONNECTIONS
    _last_logged = -_LOG_EVERY_S
    _num_refused = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._log_refused()
            transport.abort()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()  # the head is there; the body has a deadline of its own
        elif self._deadline is None:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.head_s, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _log_refused(self) -> None:
        kind = BoundedProtocol
        kind._num_refused += 1
        if time.monotonic() - kind._last_logged >= _LOG_EVERY_S:
            kind._last_logged = time.monotonic()
            logger.warning("more than %d connections: %d were closed so far", self.most, kind._num_refused)
