"""HTTP whose calls end at a deadline, however slowly bytes come: httpx's own limit is per chunk."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

_SEND_BYTES = 1 << 16
_of_thread = threading.local()


@contextmanager
def ends_within(seconds: float | None) -> Iterator[None]:
    """Every connection's reads and writes of this thread together end within ``seconds``; None sets no end."""
    _of_thread.end = None if seconds is None else time.monotonic() + seconds
    try:
        yield
    finally:
        _of_thread.end = None


class DeadlineTransport(httpx.HTTPTransport):
    """httpx's transport over connections that know the deadline of the call they serve."""

    def __init__(self, socket_options: Iterable[Any]) -> None:
        super().__init__()
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=None,
            keepalive_expiry=5.0,
            socket_options=list(socket_options),
            network_backend=_Backend(),
        )


class _Backend(httpcore.SyncBackend):
    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(*args, **options))


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        view = memoryview(buffer)
        for start in range(0, len(view), _SEND_BYTES):
            self._stream.write(bytes(view[start : start + _SEND_BYTES]), _left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        timeout = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(timeout: float | None, error: type[Exception]) -> float | None:
    end = getattr(_of_thread, "end", None)
    if end is None:
        return timeout
    left = end - time.monotonic()
    if left <= 0:
        raise error("the deadline of the call passed")
    return left if timeout is None else min(timeout, left)
