"""A server with broken HTTP: slow bytes, hanging, early close, endless headers or answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
NESTED = b"[" * 200_000 + b"]" * 200_000


class Behaviour(NamedTuple):
    """Send ``first``; then ``again`` every ``pause_s`` seconds, or nothing (``hangs``), or close the connection."""

    first: bytes = b""
    again: bytes = b""
    hangs: bool = False
    pause_s: float = 0.05  # far below any limit per chunk


BEHAVIOURS = {
    "drips": Behaviour(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "drips_headers": Behaviour(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "drips_chunks": Behaviour(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "hangs": Behaviour(hangs=True),
    "hangs_half_way": Behaviour(HEAD + b"Content-Length: 100\r\n\r\n[", hangs=True),
    "never_ends": Behaviour(HEAD + b"Content-Length: 6442450944\r\n\r\n", b" " * (1 << 20), pause_s=0),
    "closes_at_once": Behaviour(),
    "closes_after_the_header": Behaviour(HEAD + b"Content-Length: 100\r\n\r\n"),
    "closes_half_way": Behaviour(HEAD + b'Content-Length: 100\r\n\r\n[{"respon'),
    "knows_no_path": Behaviour(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
    "speaks_another_protocol": Behaviour(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "nests": Behaviour(HEAD + b"Content-Length: %d\r\n\r\n" % len(NESTED) + NESTED),
}


@contextmanager
def lying(name: str) -> Iterator[str]:
    """Serve ``BEHAVIOURS[name]`` to every connection after its request's first bytes; yields the address."""
    behaviour, over = BEHAVIOURS[name], threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with suppress(OSError), client:
            client.recv(1 << 16)
            client.sendall(behaviour.first)
            while behaviour.again and not over.wait(behaviour.pause_s):
                client.sendall(behaviour.again)
            if behaviour.hangs:
                over.wait()
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.close()
