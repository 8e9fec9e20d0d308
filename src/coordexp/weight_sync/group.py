"""Weight groups: process groups through which the trainer sends weights to engine workers, by NCCL or Gloo.

Ranks 0 … W-2 are workers of one rollout server, rank W-1 is the trainer, which sends. Rank 0 listens. Every wait has a
deadline, and nothing is unpickled. (vLLM's own weight transfer has no CPU backend and no deadlines, and unpickles.)
"""

from __future__ import annotations

import errno
import gc
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from coordexp.background import in_background
from coordexp.errors import RolloutError
from coordexp.weight_sync.rendezvous import RendezvousServer, RendezvousStore

Result = TypeVar("Result")
POLL_S = 0.0005
PARTS_AT_ONCE = 8  # Gloo's own two leave the wire idle between parts: 10% on loopback
PART_POLL_S = 0.002  # while further parts follow: waking costs more than it gains
PORT_FREE_S = 5.0
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # how to reach, on its own machine, a listener on every address


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group meets, and this process's rank in it. ``timeout_s``: deadline of each wait. ``token``: of every
    member; empty admits everyone. ``listen_host``: the address on which rank 0 listens, if not ``host``."""

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
        under_way = self._start(parts, source)  # all at once: the end of a part is noticed late
        for index, work in enumerate(under_way):
            self._finish(work, parts[index].numel(), give_up, POLL_S if work is under_way[-1] else PART_POLL_S)
            yield index
        self._unfinished = False

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
    """Meet the other members and return this process's end: NCCL for a CUDA device, Gloo for the CPU. Raises
    RolloutError."""
    # On rank 0's own machine ``host`` may not lead back to it.
    host = _LOOPBACK_OF.get(address.listen_host, address.listen_host) or address.host
    server: RendezvousServer | None = None
    store: RendezvousStore | None = None
    try:
        if address.rank == 0:
            server = RendezvousServer(_listen(address), address.token)
        store = RendezvousStore(host, address.port, address.token, address.timeout_s, server)
        store.set(f"here/{address.rank}", b"1")
        store.wait([f"here/{rank}" for rank in range(address.world_size)])
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # the last two: another protocol is spoken there
        for one in (store, server):
            if one is not None:
                one.close()
        raise RolloutError(
            f"{address}: not every member came within {address.timeout_s:g} s, or the port is taken ({_brief(error)}). "
            "Check that the learner reaches the server's group_port, and that no other program listens there"
        ) from error
    try:
        return (NcclCommunicator if device.type == "cuda" else GlooCommunicator)(address, store, device)
    except BaseException:
        store.close()
        raise


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
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:  # a group that was just torn down may hold the port a moment longer
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            gc.collect()  # an error's traceback may keep the old group's store alive in a cycle
            time.sleep(0.1)
        else:
            listener.listen()
            return listener


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
            raise RolloutError(f"{address}: Gloo could not connect its members ({_brief(error)})") from error

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
                f"the other side is gone ({_brief(error)})"
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
        if address.rank == 0:
            store.set("nccl_id", bytes(NCCLLibrary().ncclGetUniqueId().internal).hex())
        unique_id = bytes.fromhex(store.get("nccl_id").decode())
        self._group = within(
            address.timeout_s,
            f"{address}: NCCL could not connect its members",
            lambda: PyNcclCommunicator.from_unique_id_bytes(unique_id, address.rank, address.world_size, device),
        )

    def _start(self, parts: Sequence[torch.Tensor], source: int) -> list[Any]:
        stream = torch.cuda.current_stream(self.device)
        under_way = []
        for part in parts:
            self._group.broadcast(part, source, stream)
            under_way.append(torch.cuda.Event())
            under_way[-1].record(stream)
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
            time.sleep(POLL_S)  # not poll_s: unlike with Gloo, polling disturbs no thread that does the transfer

    def close(self) -> None:
        if self._group is not None:
            self._group.destroy()
            self._store.close()
        self._group = None


def within(seconds: float, what: str, act: Callable[[], Result]) -> Result:
    """``act()``, or RolloutError after that many seconds, for calls without a deadline of their own. Its thread
    continues."""
    outcome = in_background(act, "with-deadline")
    if not wait([outcome], timeout=seconds).done:
        raise RolloutError(f"{what} within {seconds:g} s")
    return outcome.result()


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
