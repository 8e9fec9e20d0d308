"""Rendezvous of a weight group: a small key-value store on the group's port, for processes that know the group's token.

torch's own TCPStore, on which vLLM's StatelessProcessGroup is built, accepts any process that reaches its port, and
allocates as many bytes as one announces. Here a frame is a length and a JSON object; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MAX_HELLO_BYTES = 1 << 12
MAX_FRAME_BYTES = 1 << 20
MAX_STORED_BYTES = 64 << 20
MAX_KEYS = 1 << 16
MAX_CONNECTIONS = 1024
HELLO_S = 10.0
RETRY_S = 0.05
_LENGTH = struct.Struct(">I")


class RendezvousServer:
    """Rank 0's side: serves the store on ``listener`` until :meth:`close`, to connections that prove that they know
    ``token``. An empty token admits everyone."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept_loop, name="weight-group-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Free the port; safe to call twice."""
        with self._changed:
            self._closed = True
            connections = list(self._connections)
            self._changed.notify_all()
        for one in (self._listener, *connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a close alone does not wake a thread in accept()
            one.close()

    def _accept_loop(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._changed:
                if self._closed or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="weight-group-member", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_S)
            nonce = secrets.token_hex(16)
            _send(connection, {"nonce": nonce})
            proof = _receive(connection, MAX_HELLO_BYTES).get("proof")
            if self._token and not hmac.compare_digest(str(proof).encode(), _proof(self._token, nonce).encode()):
                _send(connection, {"error": "wrong token for this weight group"})
                return
            _send(connection, {"ok": True})
            connection.settimeout(None)
            while True:
                _send(connection, self._handle(_receive(connection)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return  # gone, or not a member of a group
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            match request["op"]:
                case "set":
                    value = bytes.fromhex(request["value"])
                    stored = sum(map(len, self._values.values())) + len(value)
                    if stored > MAX_STORED_BYTES or len(self._values) >= MAX_KEYS:
                        return {"error": "the weight group's store is full"}
                    self._values[str(request["key"])] = value
                    self._changed.notify_all()
                    return {"ok": True}
                case "add":
                    key = str(request["key"])
                    number = int(self._values.get(key, b"0")) + int(request["value"])
                    self._values[key] = str(number).encode()
                    self._changed.notify_all()
                    return {"value": number}
                case "check":
                    return {"value": all(key in self._values for key in request["keys"])}
                case "wait":
                    keys = [str(key) for key in request["keys"]]
                    self._changed.wait_for(
                        lambda: self._closed or all(key in self._values for key in keys), float(request["seconds"])
                    )
                    absent = [key for key in keys if key not in self._values]
                    return {"error": f"{absent[0]} did not come"} if absent else {"ok": True}
                case "get":
                    return {"value": self._values[str(request["key"])].hex()}
                case other:
                    return {"error": f"unknown operation {other!r}"}


class RendezvousStore(dist.Store):
    """A member's view of the store, in the form that torch's process groups take."""

    def __init__(
        self, host: str, port: int, token: str, timeout_s: float, server: RendezvousServer | None = None
    ) -> None:
        """Connect, again and again, because rank 0 may start later. ``server``: on rank 0, closed with this store.
        Raises OSError without a connection in time, RuntimeError for a wrong token."""
        super().__init__()
        self._server = server
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._socket = socket.create_connection((host, port), timeout=max(0.1, left))
                break
            except OSError:
                if left <= RETRY_S:
                    raise
                time.sleep(RETRY_S)
        self._socket.settimeout(HELLO_S)
        nonce = _receive(self._socket)["nonce"]
        self._call({"proof": _proof(token, nonce)})

    def set(self, key: str, value: bytes | str) -> None:
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self._call({"op": "set", "key": key, "value": encoded.hex()})

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes.fromhex(self._call({"op": "get", "key": key})["value"])

    def add(self, key: str, value: int) -> int:
        return int(self._call({"op": "add", "key": key, "value": value})["value"])

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call({"op": "check", "keys": list(keys)})["value"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        # RuntimeError: a key is still missing at the end of the timeout. OSError: rank 0 is gone.
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._call({"op": "wait", "keys": list(keys), "seconds": seconds}, seconds)

    def close(self) -> None:
        """Safe to call twice; a call under way ends with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._server is not None:
            self._server.close()

    def _call(self, request: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        with self._lock:
            self._socket.settimeout(seconds + HELLO_S)
            _send(self._socket, request)
            answer = _receive(self._socket)
        if "error" in answer:
            raise RuntimeError(str(answer["error"])[:300])
        return answer


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> dict[str, Any]:
    def read(length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            if not (more := connection.recv(min(length - len(data), 1 << 16))):
                raise ConnectionError("the other side is gone")
            data += more
        return bytes(data)

    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes; at most {max_bytes} are accepted")
    message = json.loads(read(length))
    if not isinstance(message, dict):
        raise ValueError("a frame that holds no JSON object")
    return message
