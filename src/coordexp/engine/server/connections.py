"""Limits on clients of ``coordexp serve``: how many connections, how long the head of a request may take, and how many
lines of the log they may cause."""

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
# Of one kind of line that clients cause, so that they cannot fill the disk.
_MOST_LINES = 20
_LINES_S = 60.0


class FewLines(logging.Filter):
    """Lets at most ``most`` lines of a kind pass in ``every_s`` seconds; the next one that passes counts the others. A
    kind is a message before its arguments are inserted."""

    def __init__(self, most: int = _MOST_LINES, every_s: float = _LINES_S) -> None:
        super().__init__()
        self._most = most
        self._every_s = every_s
        self._since: dict[str, tuple[float, int]] = {}  # by kind: when the count began, and the count

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg), time.monotonic()
        began, count = self._since.get(kind, (now, 0))
        if now - began >= self._every_s:
            if (left_out := count - self._most) > 0:
                record.msg, record.args = f"{record.getMessage()} ({left_out} such lines were left out)", None
            began, count = now, 0
        self._since[kind] = began, count + 1
        return count < self._most


_FEW_LINES = FewLines()


def bounded_config(app: Any, **options: Any) -> uvicorn.Config:
    """uvicorn's configuration of ``app`` with these limits; ``options``: uvicorn's own."""
    for name in ("uvicorn.error", __name__, f"{__package__}.admission"):
        logging.getLogger(name).addFilter(_FEW_LINES)
    protocol: Any = type("Bounded", (BoundedProtocol,), {"most": most_connections()})
    return uvicorn.Config(app, http=protocol, log_config=None, access_log=False, **options)


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
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            logger.warning("a connection was closed: %d are open", self.most)
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
