"""A server that speaks HTTP badly on purpose: it drips, hangs, closes early, never ends a header or an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

BODY = b'[{"response": {}}]'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
Behaviour = Callable[[socket.socket, threading.Event], None]


def drips(client: socket.socket, over: threading.Event) -> None:
    """A byte now and then, each long before a limit per chunk would act."""
    client.sendall(HEAD + b"Content-Length: 100000\r\n\r\n")
    while not over.wait(0.05):
        client.sendall(b" ")


def drips_headers(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(0.05):
        client.sendall(b"X: y\r\n")


def drips_chunks(client: socket.socket, over: threading.Event) -> None:
    client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while not over.wait(0.05):
        client.sendall(b"1\r\n \r\n")


def hangs(_: socket.socket, over: threading.Event) -> None:
    over.wait()


def hangs_half_way(client: socket.socket, over: threading.Event) -> None:
    client.sendall(HEAD + b"Content-Length: 100\r\n\r\n[")
    over.wait()


def never_ends(client: socket.socket, over: threading.Event) -> None:
    client.sendall(HEAD + b"Content-Length: 6442450944\r\n\r\n")
    while not over.is_set():
        client.sendall(b" " * (1 << 20))


def closes_at_once(client: socket.socket, _: threading.Event) -> None:
    client.close()


def closes_behind_the_header(client: socket.socket, _: threading.Event) -> None:
    client.sendall(HEAD + b"Content-Length: 100\r\n\r\n")


def closes_half_way(client: socket.socket, _: threading.Event) -> None:
    client.sendall(HEAD + b"Content-Length: 100\r\n\r\n" + BODY[:9])


def nests(client: socket.socket, _: threading.Event) -> None:
    body = b"[" * 200_000 + b"]" * 200_000
    client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def talks_of_something_else(client: socket.socket, _: threading.Event) -> None:
    client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


@contextmanager
def lying(behaviour: Behaviour) -> Iterator[str]:
    """Serve ``behaviour`` to every connection, behind its request's first bytes; gives the address."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with suppress(OSError), client:
            client.recv(1 << 16)
            behaviour(client, over)
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
