"""The group over which weights travel from the learner to the engines' workers: bytes, by NCCL or Gloo.

Ranks 0 … W-2 are workers of rollout servers, rank W-1 is the learner, which sends. They meet at ``host:port``, where
rank 0 listens. Every wait has a deadline, and nothing that arrives is unpickled.
"""

from __future__ import annotations

import errno
import gc
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from coordexp.background import in_background
from coordexp.errors import RolloutError
from coordexp.weight_sync.meeting import MeetingStore, MeetingTable

Result = TypeVar("Result")
POLL_S = 0.0005
PARTS_AT_ONCE = 8  # Gloo's own two leave the wire idle between parts: 10% on loopback
PART_POLL_S = 0.002  # while further parts follow: waking costs more than it gains
PORT_FREE_S = 5.0
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a listener on every address can be met at home


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group meets, who this process is in it, and how long each of its waits may take. ``token``: what rank 0
    asks of everybody who comes; without one it lets everybody in. ``listen_host``: on rank 0's machine, the address on
    which it listens where ``host`` is what others call it; empty where they are the same."""

    host: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    token: str = field(default="", repr=False)
    listen_host: str = ""

    @property
    def meeting_host(self) -> str:
        """Where this process goes to meet. From rank 0's own machine the way by ``host`` may not lead back to it."""
        return _LOOPBACK_OF.get(self.listen_host, self.listen_host) or self.host

    def __str__(self) -> str:
        return f"weight group {self.host}:{self.port} (rank {self.rank} of {self.world_size})"


class Communicator(ABC):
    """One member's end of a weight group; ``device``: where what is sent and received must lie."""

    device: torch.device
    _address: GroupAddress
    _meeting: _Meeting
    _group: Any  # None once it is closed
    _unfinished = False

    def broadcast(
        self,
        parts: Sequence[torch.Tensor],
        source: int,
        *,
        arrived: Callable[[int], None] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        """Send ``parts`` (each uint8, 1-D, contiguous) from rank ``source``; the others receive into theirs, in place.

        All are under way at once, so that no part waits for the one before to be noticed.

        Args:
            arrived: told the index of each part, in order, once it is there.
            give_up: asked again and again while waiting; what it raises ends the wait.

        Raises:
            RolloutError: the deadline of a part passed, or the other side is gone.
        """
        if self._group is None:
            raise RolloutError(f"{self._address}: the group is closed")
        self._unfinished = True
        under_way = self._start(parts, source)
        for index, work in enumerate(under_way):
            self._finish(work, parts[index].numel(), give_up, POLL_S if work is under_way[-1] else PART_POLL_S)
            if arrived is not None:
                arrived(index)
        self._unfinished = False

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free its port; safe to call twice, and never waits for the other side."""

    @abstractmethod
    def _start(self, parts: Sequence[torch.Tensor], source: int) -> list[Any]:
        """Send or receive all parts: what :meth:`_finish` waits for, one for each."""

    @abstractmethod
    def _finish(self, work: Any, num_bytes: int, give_up: Callable[[], None] | None, poll_s: float) -> None:
        """Wait until one part is there; raises as :meth:`broadcast`."""


def join(address: GroupAddress, device: torch.device) -> Communicator:
    """Meet the other members and return this process's end: NCCL for a CUDA device, Gloo for the CPU.

    Raises:
        RolloutError: not every member came before the deadline, or the port is taken.
    """
    meeting = _meet(address)
    try:
        return (
            NcclCommunicator(address, meeting, device) if device.type == "cuda" else GlooCommunicator(address, meeting)
        )
    except BaseException:
        meeting.close()
        raise


def wait_until_free(address: GroupAddress, timeout_s: float) -> None:
    """Wait until nobody listens where a group is to meet: until the group before it is gone.

    Raises:
        RolloutError: somebody still listens at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((address.host, address.port), timeout=1.0):
                pass
        except OSError:  # refused, or nothing answers: free as far as anybody can tell
            return
        if time.monotonic() > deadline:
            raise RolloutError(
                f"{address}: another program, or a group that was not left, still listens there after {timeout_s:g} s; "
                "choose another group_port, or restart the server"
            )
        time.sleep(0.05)


@dataclass(slots=True)
class _Meeting:
    """A member's store of the group, and on rank 0 the table behind it."""

    store: MeetingStore
    table: MeetingTable | None

    def close(self) -> None:
        self.store.close()
        if self.table is not None:
            self.table.close()


def _meet(address: GroupAddress) -> _Meeting:
    """Come to where the group meets, and wait for every other member. Rank 0 listens on the server's one
    address alone."""
    table: MeetingTable | None = None
    store: MeetingStore | None = None
    try:
        if address.rank == 0:
            table = MeetingTable(_listen(address), address.token)
        store = MeetingStore(address.meeting_host, address.port, address.token, address.timeout_s)
        store.set(f"here/{address.rank}", b"1")
        store.wait([f"here/{rank}" for rank in range(address.world_size)], timedelta(seconds=address.timeout_s))
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # the last two: something else speaks there
        for one in (store, table):
            if one is not None:
                one.close()
        raise RolloutError(
            f"{address}: not every member came within {address.timeout_s:g} s, or the port is taken ({_brief(error)}). "
            "Check that the learner reaches the server's group_port, and that no other program listens there"
        ) from error
    return _Meeting(store, table)


def _listen(address: GroupAddress) -> socket.socket:
    """Take the group's port. A group that was just torn down may hold it a moment longer."""
    host = address.listen_host or address.host
    family, _, _, _, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0]
    deadline = time.monotonic() + min(PORT_FREE_S, address.timeout_s)
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
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

    def __init__(self, address: GroupAddress, meeting: _Meeting) -> None:
        self.device = torch.device("cpu")
        self._address = address
        self._meeting = meeting
        options: Any = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # Gloo's own choice is the host name's address, which may be one that the whole network reaches.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(address))]
        options._threads = PARTS_AT_ONCE
        options._timeout = timedelta(seconds=address.timeout_s)
        try:
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore("weights", meeting.store), address.rank, address.world_size, options
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
        """Abort what is under way and leave the meeting."""
        left, self._group = [self._group], None
        if left[0] is None:
            return
        self._meeting.close()
        if self._unfinished:
            # Gloo's destructor waits for a transfer that nobody ends, up to its deadline.
            in_background(lambda: _drop(left), "drop-weight-group")
        else:
            _drop(left)


class NcclCommunicator(Communicator):
    """CUDA tensors by NCCL, through vLLM's own binding: it can be aborted, and is apart from the learner's groups."""

    def __init__(self, address: GroupAddress, meeting: _Meeting, device: torch.device) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self.device = device
        self._address = address
        self._meeting = meeting
        store = meeting.store
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
            time.sleep(POLL_S)  # the device reports at no cost: unlike Gloo's threads, nobody wakes for it

    def close(self) -> None:
        """Destroy the communicator and leave the meeting."""
        if self._group is not None:
            self._group.destroy()
            self._meeting.close()
        self._group = None


def within(seconds: float, what: str, act: Callable[[], Result]) -> Result:
    """``act()`` with a deadline, for calls that have none of their own; its thread is left behind if it passes.

    Raises:
        RolloutError: the deadline passed.
    """
    outcome = in_background(act, "with-deadline")
    if not wait([outcome], timeout=seconds).done:
        raise RolloutError(f"{what} within {seconds:g} s")
    return outcome.result()


def _drop(group: list[Any]) -> None:
    group[0].abort()
    group.clear()


def _own_address(address: GroupAddress) -> str:
    """This machine's address on the way to the group's store."""
    if address.listen_host and address.listen_host not in _LOOPBACK_OF:
        return address.listen_host
    if address.rank == 0 and not address.listen_host:
        return address.host
    family, kind, _, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]


def _brief(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
