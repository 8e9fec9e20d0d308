"""A TCP forwarder in front of a real server, whose connections can be cut at a chosen request."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit


class CuttableProxy:
    """Forwards bytes both ways. After :meth:`cut`, the next requests for that path lose their connection unanswered."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._path, self._times = b"", 0
        self._lock = threading.Lock()

    def __enter__(self) -> CuttableProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def cut(self, path: str, times: int) -> None:
        with self._lock:
            self._path, self._times = path.encode(), times

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                for source, sink, watched in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._forward, args=(source, sink, watched), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, watched: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if watched and self._is_cut(data):
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _is_cut(self, data: bytes) -> bool:
        with self._lock:
            if self._times and b" " + self._path in data.split(b"\r\n", 1)[0]:
                self._times -= 1
                return True
        return False
