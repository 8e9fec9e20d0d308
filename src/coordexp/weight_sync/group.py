"""Weight groups: process groups through which the trainer sends weights to engine workers, by NCCL or Gloo; and their
rendezvous, a small key-value store on the group's port, for processes that know the group's token.

Ranks 0 … W-2 are workers of one rollout server, rank W-1 is the trainer, which sends. Rank 0 listens. Every wait has a
deadline, and nothing is unpickled. (vLLM's own weight transfer has no CPU backend and no deadlines, and unpickles.)
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from coordexp.addresses import KEEPALIVE
from coordexp.background import in_background
from coordexp.errors import RolloutError, first_line

Result = TypeVar("Result")
_POLL_S = 0.0005
PARTS_AT_ONCE = 8  # Gloo's own two leave the wire idle between parts: 10% on loopback
PART_POLL_S = 0.002  # while further parts follow: waking costs more than it gains
PORT_FREE_S = 5.0
MAX_FRAME_BYTES = 1 << 20
HELLO_S = 10.0
RETRY_S = 0.05
STORE_POLL_S = 0.01
_LENGTH = struct.Struct(">I")
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how to reach, on its own machine, a listener on every address


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Address of a group's rendezvous, and this process's rank in it. ``timeout_s``: deadline of each wait. ``token``:
    every member must send it; empty admits everyone. ``listen_host``: the address on which rank 0 listens, if not
    ``host``."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    token: str = field(default="", repr=False)
    listen_host: str = ""

    def __str__(self) -> str:
        return f"weight group {self.host}:{self.port} (rank {self.rank} of {self.world_size})"


class Communicator(ABC):
    """One member's end of a weight group. Tensors must be on ``device``."""

    _group: Any  # None once it is closed
    _unfinished = False

    def __init__(self, address: GroupAddress, store: RendezvousStore, device: torch.device) -> None:
        self.device = device
        self._address = address
        self._store = store

    def broadcast(
        self, parts: Sequence[torch.Tensor], source: int, *, give_up: Callable[[], None] | None = None
    ) -> None:
        for _ in self.broadcast_each(parts, source, give_up=give_up):
            pass

    def broadcast_each(
        self, parts: Sequence[torch.Tensor], source: int, *, give_up: Callable[[], None] | None = None
    ) -> Iterator[int]:
        """Send ``parts`` (each uint8, 1-D, contiguous) from rank ``source``; the others receive into theirs, in place.
        Yields the index of each part, in order, when it has arrived. ``give_up`` is called repeatedly while waiting;
        it raises to end the wait. RolloutError: the deadline of a part passed, or the other side is gone."""
        if self._group is None:
            raise RolloutError(f"{self._address}: the group is closed")
        self._unfinished = True
        under_way = self._start(parts, source)  # all at once, because polling notices the end of a part late
        for index, work in enumerate(under_way):
            self._finish(work, parts[index].numel(), give_up, _POLL_S if work is under_way[-1] else PART_POLL_S)
            yield index
        self._unfinished = False

    def is_whole(self) -> bool:
        """Whether every member is connected, as rank 0 knows it; False on other ranks, and after :meth:`close`."""
        return self._group is not None and self._store.num_members() == self._address.world_size

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free its port; safe to call twice, and never waits for the other side."""

    @abstractmethod
    def _start(self, parts: Sequence[torch.Tensor], source: int) -> list[Any]:
        """Returns one handle for each part."""

    @abstractmethod
    def _finish(self, work: Any, num_bytes: int, give_up: Callable[[], None] | None, poll_s: float) -> None:
        """Wait for one part."""


def join(address: GroupAddress, device: torch.device) -> Communicator:
    """Wait for all members; return this process's end: NCCL on CUDA devices, Gloo on CPUs. Raises RolloutError."""
    # ``host`` is the name for other machines, and may not be reachable from rank 0's own.
    host = _LOOPBACK_OF.get(address.listen_host, address.listen_host) or address.host
    server: RendezvousServer | None = None
    store: RendezvousStore | None = None
    try:
        if address.rank == 0:
            server = RendezvousServer(_listen(address), address.token)
        store = RendezvousStore(host, address.port, address.token, address.timeout_s, server)
        store.set(f"here/{address.rank}", b"1")
        store.wait([f"here/{rank}" for rank in range(address.world_size)])
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # the last two: the port speaks another protocol
        for one in (store, server):
            if one is not None:
                one.close()
        if store is not None and isinstance(error, OSError):
            raise _left(address, error) from error
        raise RolloutError(
            f"{address}: not every member connected within {address.timeout_s:g} s, or the port is taken "
            f"({first_line(error)}). Check that the trainer reaches the server's group_port, and that no other program "
            "listens there"
        ) from error
    try:
        return (NcclCommunicator if device.type == "cuda" else GlooCommunicator)(address, store, device)
    except OSError as error:
        store.close()
        raise _left(address, error) from error
    except BaseException:
        store.close()
        raise


def _left(address: GroupAddress, error: OSError) -> RolloutError:
    # Its store answered before.
    return RolloutError(f"{address}: a member left before all were connected ({first_line(error)})")


def wait_until_free(address: GroupAddress, timeout_s: float) -> None:
    """Wait until the group's port is free, i.e. until the group before it is gone. Raises RolloutError."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address.host, address.port), timeout=1.0):
                pass
        except OSError:  # refused, or no answer: so it is free, seen from here
            return
        if time.monotonic() > deadline:
            raise RolloutError(
                f"{address}: another program, or a group that was not left, still listens there after {timeout_s:g} s; "
                "choose another group_port, or restart the server"
            )
        time.sleep(0.05)


def _listen(address: GroupAddress) -> socket.socket:
    host = address.listen_host or address.host
    family, _, _, _, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
    deadline = time.monotonic() + min(PORT_FREE_S, address.timeout_s)
    while True:
        try:
            return socket.create_server(where, family=family, dualstack_ipv6=family == socket.AF_INET6)
        except OSError as error:  # a group that was just torn down may hold the port a moment longer
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            gc.collect()  # an error's traceback may keep the old group's store alive in a cycle
            time.sleep(0.1)


class GlooCommunicator(Communicator):
    """CPU tensors over TCP."""

    def __init__(self, address: GroupAddress, store: RendezvousStore, device: torch.device) -> None:
        super().__init__(address, store, device)
        options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # Gloo would choose the host name's address, which the whole network may reach.
        if address.listen_host and address.listen_host not in _LOOPBACK_OF:
            own_address = address.listen_host
        elif address.rank == 0 and not address.listen_host:
            own_address = address.host
        else:  # this machine's address on the way to the group's store; a datagram socket sends nothing
            family, kind, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                own_address = probe.getsockname()[0]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
        options._threads = PARTS_AT_ONCE
        options._timeout = timedelta(seconds=address.timeout_s)
        try:
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore("weights", store), address.rank, address.world_size, options
            )
        except RuntimeError as error:
            raise RolloutError(f"{address}: Gloo could not connect its members ({first_line(error)})") from error

    def _start(self, parts: Sequence[torch.Tensor], source: int) -> list[Any]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return [self._group.broadcast([part], options) for part in parts]

    def _finish(self, work: Any, num_bytes: int, give_up: Callable[[], None] | None, poll_s: float) -> None:
        deadline = time.monotonic() + self._address.timeout_s
        while give_up is not None and not work.is_completed() and time.monotonic() < deadline:
            give_up()
            time.sleep(poll_s)
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            raise RolloutError(
                f"{self._address}: {num_bytes} bytes did not arrive within {self._address.timeout_s:g} s, or "
                f"the other side is gone ({first_line(error)})"
            ) from error

    def close(self) -> None:
        left, self._group = [self._group], None
        if left[0] is None:
            return
        self._store.close()

        def drop() -> None:
            left[0].abort()
            left.clear()

        if self._unfinished:  # Gloo's destructor waits for an unfinished transfer, up to its deadline
            in_background(drop, "drop-weight-group")
        else:
            drop()


class NcclCommunicator(Communicator):
    """CUDA tensors by NCCL, through vLLM's own binding: it can be aborted, and is apart from the trainer's groups."""

    def __init__(self, address: GroupAddress, store: RendezvousStore, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        super().__init__(address, store, device)
        # A trainer is in one group with each of its servers. On one stream their transfers would queue up.
        self._stream = torch.cuda.Stream(device)
        if address.rank == 0:
            store.set("nccl_id", bytes(NCCLLibrary().ncclGetUniqueId().internal).hex())
        unique_id = bytes.fromhex(store.get("nccl_id").decode())
        self._group = within(
            address.timeout_s,
            f"{address}: NCCL could not connect its members",
            lambda: PyNcclCommunicator.from_unique_id_bytes(unique_id, address.rank, address.world_size, device),
        )

    def _start(self, parts: Sequence[torch.Tensor], source: int) -> list[Any]:
        # The caller's stream may still write what is sent here, or read what is overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        under_way = []
        for part in parts:
            part.record_stream(self._stream)  # after an error too, memory is not used again before the transfer ends
            self._group.broadcast(part, source, self._stream)
            under_way.append(torch.cuda.Event())
            under_way[-1].record(self._stream)
        return under_way

    def _finish(self, work: Any, num_bytes: int, give_up: Callable[[], None] | None, poll_s: float) -> None:
        deadline = time.monotonic() + self._address.timeout_s
        while not work.query():
            if give_up is not None:
                give_up()
            if time.monotonic() > deadline:
                self.close()
                raise RolloutError(
                    f"{self._address}: {num_bytes} bytes did not arrive within {self._address.timeout_s:g} s"
                )
            time.sleep(_POLL_S)  # not poll_s: unlike with Gloo, polling disturbs no thread that does the transfer

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._store.close()
        self._group = None


def within(seconds: float, what: str, act: Callable[[], Result]) -> Result:
    """``act()``, or RolloutError after that many seconds; its thread continues. For calls without a deadline."""
    outcome = in_background(act, "with-deadline")
    if not wait([outcome], timeout=seconds).done:
        raise RolloutError(f"{what} within {seconds:g} s")
    return outcome.result()


# The rendezvous. torch's own TCPStore, on which vLLM's StatelessProcessGroup is built, accepts any process that reaches
# its port, and allocates as many bytes as one announces. Here a frame is a length and a JSON object.


class RendezvousServer:
    """Rank 0's side: serves the store on ``listener`` until :meth:`close`, to connections that prove that they know
    ``token``. An empty token admits everyone."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener = listener
        self._token = token
        self._values: dict[str, str] = {}  # in hexadecimal
        self._lock = threading.Lock()  # of what follows
        self._connections: set[socket.socket] = set()
        self._members: set[socket.socket] = set()  # connections that have proved that they know the token
        self._closed = False
        threading.Thread(target=self._accept_loop, name="weight-group-rendezvous", daemon=True).start()

    def num_members(self) -> int:
        """Members that are connected. The sockets know it; the thread of one that has left may not have run yet."""
        with self._lock:
            left = select.poll()
            for one in () if self._closed else self._members:
                left.register(one, select.POLLRDHUP)
            return 0 if self._closed else len(self._members) - len(left.poll(0))

    def close(self) -> None:
        """Free the port; safe to call twice."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
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
            with self._lock:
                if self._closed:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="weight-group-member", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            for option in KEEPALIVE:
                connection.setsockopt(*option)
            connection.settimeout(HELLO_S)
            nonce = secrets.token_hex(16)
            _send(connection, {"nonce": nonce})
            proof = _receive(connection).get("proof")
            if self._token and not hmac.compare_digest(str(proof).encode(), _proof(self._token, nonce).encode()):
                _send(connection, {"error": "wrong token for this weight group"})
                return
            with self._lock:
                self._members.add(connection)
            _send(connection, {"ok": True})
            connection.settimeout(None)
            while True:
                _send(connection, self._handle(_receive(connection)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return  # gone, or not a member of a group
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._members.discard(connection)
            connection.close()

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "set":
                self._values[str(request["key"])] = str(request["value"])
                return {"ok": True}
            case "get":
                return {"values": [self._values.get(str(key)) for key in request["keys"]]}
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
        return bytes.fromhex(self._wait([key], self._timeout_s)[0])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def num_members(self) -> int:
        """Members that are connected, on rank 0; 0 on others."""
        return 0 if self._server is None else self._server.num_members()

    def close(self) -> None:
        """Safe to call twice; a call under way ends with an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._server is not None:
            self._server.close()

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str]:
        # Their values. RuntimeError: a key is still missing after `seconds`. OSError: rank 0 is gone.
        deadline = time.monotonic() + seconds
        while None in (values := self._call({"op": "get", "keys": list(keys)})["values"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{keys[values.index(None)]} did not come")
            time.sleep(STORE_POLL_S)
        return values

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
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


def _receive(connection: socket.socket) -> dict[str, Any]:
    def read(length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            if not (more := connection.recv(min(length - len(data), 1 << 16))):
                raise ConnectionError("the other side is gone")
            data += more
        return bytes(data)

    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
    message = json.loads(read(length))
    if not isinstance(message, dict):
        raise ValueError("a frame that is not a JSON object")
    return message
