"""Where the members of a weight group meet: a small table of keys on the group's port, for who knows the group's token.

torch's own store takes what anybody sends who reaches its port, and makes room for as many bytes as are announced.
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
MAX_GUESTS = 1024
HELLO_S = 10.0
RETRY_S = 0.05
_LENGTH = struct.Struct(">I")


class MeetingTable:
    """Rank 0's side: keys and values, served on ``listener`` until :meth:`close`.

    A guest proves first that it knows ``token``; without one everybody is let in. Nothing is read that is longer than a
    member's own words can be.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._guests: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._let_in, name="weight-group-meeting", daemon=True).start()

    def close(self) -> None:
        """Free the port; safe to call twice."""
        with self._changed:
            self._closed = True
            guests = list(self._guests)
            self._changed.notify_all()
        for one in (self._listener, *guests):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a close alone does not wake who waits in accept()
            one.close()

    def _let_in(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._changed:
                if self._closed or len(self._guests) >= MAX_GUESTS:
                    guest.close()
                    continue
                self._guests.add(guest)
            threading.Thread(target=self._serve, args=(guest,), name="weight-group-guest", daemon=True).start()

    def _serve(self, guest: socket.socket) -> None:
        try:
            guest.settimeout(HELLO_S)
            nonce = secrets.token_hex(16)
            _send(guest, {"nonce": nonce})
            proof = _receive(guest, MAX_HELLO_BYTES).get("proof")
            if self._token and not hmac.compare_digest(str(proof).encode(), _proof(self._token, nonce).encode()):
                _send(guest, {"error": "the token of this weight group is another"})
                return
            _send(guest, {"ok": True})
            guest.settimeout(None)
            while True:
                _send(guest, self._answer(_receive(guest)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return  # gone, or no member of a group: nobody to tell
        finally:
            with self._changed:
                self._guests.discard(guest)
            guest.close()

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            match asked["do"]:
                case "set":
                    key, value = str(asked["key"]), bytes.fromhex(asked["value"])
                    stored = sum(map(len, self._values.values())) + len(value)
                    if stored > MAX_STORED_BYTES or len(self._values) >= MAX_KEYS:
                        return {"error": "the weight group's table is full"}
                    self._values[key] = value
                    self._changed.notify_all()
                    return {"ok": True}
                case "add":
                    key = str(asked["key"])
                    number = int(self._values.get(key, b"0")) + int(asked["value"])
                    self._values[key] = str(number).encode()
                    self._changed.notify_all()
                    return {"value": number}
                case "check":
                    return {"value": all(key in self._values for key in asked["keys"])}
                case "wait":
                    keys = [str(key) for key in asked["keys"]]
                    self._changed.wait_for(
                        lambda: self._closed or all(key in self._values for key in keys), float(asked["seconds"])
                    )
                    absent = [key for key in keys if key not in self._values]
                    return {"error": f"{absent[0]} did not come"} if absent else {"ok": True}
                case "get":
                    return {"value": self._values[str(asked["key"])].hex()}
                case other:
                    return {"error": f"{other!r} is nothing that is done here"}


class MeetingStore(dist.Store):
    """A member's way to the table, as torch's groups want it."""

    def __init__(self, host: str, port: int, token: str, timeout_s: float) -> None:
        """
        Raises:
            OSError: nobody listens there within ``timeout_s``. RuntimeError: the token is another.
        """
        super().__init__()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket = _connect(host, port, timeout_s)
        nonce = _receive(self._socket)["nonce"]
        self._told({"proof": _proof(token, nonce)})

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value, for all members to see."""
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self._told({"do": "set", "key": key, "value": encoded.hex()})

    def get(self, key: str) -> bytes:
        """The value, once it is there: see :meth:`wait`."""
        self.wait([key])
        return bytes.fromhex(self._told({"do": "get", "key": key})["value"])

    def add(self, key: str, value: int) -> int:
        """Add to a number that begins at 0, in one step. Returns: the sum."""
        return int(self._told({"do": "add", "key": key, "value": value})["value"])

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there now."""
        return bool(self._told({"do": "check", "keys": list(keys)})["value"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there, for at most ``timeout`` (the store's own without it).

        Raises:
            RuntimeError: one did not come. OSError: rank 0 is gone.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        self._told({"do": "wait", "keys": list(keys), "seconds": seconds}, seconds)

    def close(self) -> None:
        """Safe to call twice; a call under way ends with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _told(self, what: dict[str, Any], seconds: float = 0.0) -> dict[str, Any]:
        with self._lock:
            self._socket.settimeout(seconds + HELLO_S)
            _send(self._socket, what)
            answer = _receive(self._socket)
        if "error" in answer:
            raise RuntimeError(str(answer["error"])[:300])
        return answer


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Rank 0 may come later than others."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, left))
            connection.settimeout(HELLO_S)
            return connection
        except OSError:
            if left <= RETRY_S:
                raise
            time.sleep(RETRY_S)


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


def _send(to: socket.socket, what: dict[str, Any]) -> None:
    body = json.dumps(what).encode()
    to.sendall(_LENGTH.pack(len(body)) + body)


def _receive(source: socket.socket, at_most: int = MAX_FRAME_BYTES) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    if length > at_most:
        raise ValueError(f"{length} bytes were announced, and nobody here has so much to say")
    said = json.loads(_exactly(source, length))
    if not isinstance(said, dict):
        raise ValueError("no object")
    return said


def _exactly(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        if not (more := source.recv(min(length - len(data), 1 << 16))):
            raise ConnectionError("the other side is gone")
        data += more
    return bytes(data)
