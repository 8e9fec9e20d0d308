"""The receiving end of weight pushes in one worker: receives tensors, loads them, checks that all of them arrived.

Depends on the model and the weight group, not on vLLM: the worker extension and the colocated engine call it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync import checksum
from coordexp.weight_sync.buckets import TensorInfo, pieces, read_infos, unpack
from coordexp.weight_sync.group import Communicator, GroupAddress, join
from coordexp.weight_sync.layout import InPlaceTargets, WeightLayout
from coordexp.weight_sync.version import WeightVersion

Named = list[tuple[str, torch.Tensor]]
LOAD_BYTES = 32 << 20  # loaded at once while more arrives


@dataclass(slots=True)
class PushState:
    """The push under way, and figures of the last one."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    received_hashes: dict[str, int] = field(default_factory=dict)
    adapter_names: list[str] = field(default_factory=list)
    open: bool = False
    weights: WeightVersion = field(default_factory=WeightVersion)
    pushes: int = 0
    base_overwritten: bool = False  # by full weights: an adapter for the checkpoint no longer fits
    checksum: str | None = None
    failure: str | None = None
    received_bytes: int = 0
    receive_s: float = 0.0
    load_s: float = 0.0
    num_in_place: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """One piece of a bucket, and the memory (uint8) into which it is received: the engine's own, or a part of the
    staging buffer."""

    tensors: list[TensorInfo]
    memory: torch.Tensor
    is_staged: bool


class WeightReceiver:
    """One worker's end of weight pushes; knows the model, not vLLM.

    Weights are loaded in the background while further ones arrive, so an error of loading shows at a later call. Once
    the engine's loader has shown where a large tensor is (:class:`InPlaceTargets`), its bytes are received straight
    into that memory.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, *, sharded: bool) -> None:
        self.layout = WeightLayout.from_model(model)
        self.state = PushState()
        self.model = model
        self._device = device
        self._sharded = sharded  # tensor parallel: no worker holds a whole tensor to read back
        self.in_place = InPlaceTargets(self.layout, enabled=not sharded)
        self._group: Communicator | None = None
        self._source = -1
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-weights")
        self._loading_before: list[Future[None]] = []  # of the bucket before the newest
        self._loading: list[Future[None]] = []
        self._buffers: list[torch.Tensor] = []  # two, taken in turn

    def open(self, address: GroupAddress) -> None:
        """Join a weight group whose last rank sends. A group that is still open belongs to an earlier trainer, and is
        torn down."""
        self.close()
        self._group = join(address, self._device)
        self._source = address.world_size - 1

    def close(self) -> None:
        """Leave the group. A push that was under way is lost, and its weights stay half-loaded."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._loading_before, self._loading, self._buffers = [], [], []
        if self.state.open:
            self.record_failure("the learner left in the middle of a push")
        self.state.open = False

    def receive(self, payload: Sequence[Mapping[str, Any]]) -> None:
        """Receive one bucket of full weights and start to load it."""
        with recorded(self.record_failure):
            infos = read_infos(payload)
            self._expect([(info.name, info.shape) for info in infos])
            self._next_bucket()
            for some in self._arriving(infos, self._buffer):
                self._loading.append(self._loader.submit(self._load, some))

    def take(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load full weights that are in this process already. They must not change before :meth:`commit` returns."""
        with recorded(self.record_failure):
            self._expect([(name, tuple(tensor.shape)) for name, tensor in named])
            self._next_bucket()
            # The loading thread has a stream of its own: it must wait for what this one's still computes.
            ready = torch.cuda.Event() if self._device.type == "cuda" else None
            if ready is not None:
                ready.record(torch.cuda.current_stream(self._device))
            self._loading.append(self._loader.submit(self._load, named, ready))

    def receive_adapter(self, payload: Sequence[Mapping[str, Any]]) -> Named:
        """Receive the tensors of an adapter, in memory of their own: an engine may keep them as they are."""
        with recorded(self.record_failure):
            infos = read_infos(payload)
            self.begin()
            arrived = self._arriving(infos, lambda size: torch.empty(size, dtype=torch.uint8, device=self._device))
            return [named for some in arrived for named in some]

    def _arriving(self, infos: Sequence[TensorInfo], allocate: Callable[[int], torch.Tensor]) -> Iterator[Named]:
        """Receive one bucket; yields the tensors that must be loaded, in portions of at least ``LOAD_BYTES``.

        Each piece (see ``buckets.pieces``) is one transfer. A lone tensor with a proven destination is received into
        the engine's own memory, and not yielded. All others share a staging buffer: ``allocate(number of bytes)``.
        """
        if self._group is None:
            raise RolloutError("no weight group is open; call /init_communicator/ first")
        started = time.perf_counter()
        groups = [[infos[index] for index in piece] for piece in pieces(infos)]
        destinations = [self.in_place.destination(group[0]) if len(group) == 1 else None for group in groups]
        num_staged = sum(
            info.numel for group, memory in zip(groups, destinations, strict=True) if memory is None for info in group
        )
        staging = allocate(num_staged)
        transfers: list[_Transfer] = []
        start = 0
        for group, memory in zip(groups, destinations, strict=True):
            if memory is not None:
                transfers.append(_Transfer(group, memory, is_staged=False))
                continue
            size = sum(info.numel for info in group)
            transfers.append(_Transfer(group, staging[start : start + size], is_staged=True))
            start += size

        waiting: Named = []  # arrived, not yet yielded
        num_waiting = num_arrived = 0  # bytes
        for index in self._group.broadcast_each([one.memory for one in transfers], self._source):
            transfer = transfers[index]
            self.state.received_bytes += transfer.memory.numel()
            if not transfer.is_staged:
                self.state.num_in_place += 1
                continue
            waiting += unpack(transfer.memory, transfer.tensors)
            num_waiting += transfer.memory.numel()
            num_arrived += transfer.memory.numel()
            if num_waiting >= LOAD_BYTES or num_arrived == num_staged:
                yield waiting
                waiting, num_waiting = [], 0
        self.state.receive_s += time.perf_counter() - started

    def _buffer(self, size: int) -> torch.Tensor:
        """Staging memory for one bucket. On a CPU two buffers take turns, because fresh pages cost as much as the
        transfer itself; :meth:`_next_bucket` has waited for the weights in the one that is used again."""
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8)
        self._buffers.append(buffer)
        return buffer

    def commit(
        self,
        version: int | None,
        wants_checksum: bool,
        finish: Callable[[], None],
        learner_id: str | None = None,
    ) -> dict[str, Any]:
        """End a push: check that all weights have come and are loaded, then ``finish`` (vLLM's post-processing).

        Args:
            version: of these weights; None for one more than the last.
            wants_checksum: read the parameters back and hash them.
            learner_id: of the trainer whose weights they are.

        Raises:
            RolloutError: nothing was pushed, loading failed, or weights are missing. The old version is gone too.
        """
        state = self.state
        with recorded(self.record_failure):
            if not state.open:
                raise RolloutError(state.failure or "no push is under way")
            self._finish_loading()
            if not state.adapter_names:
                self.layout.check_complete(state.shapes)
            finish()
            state.checksum = self._checksum() if wants_checksum else None
            state.weights = WeightVersion(state.weights.version + 1 if version is None else version, learner_id)
            state.pushes += 1
            state.base_overwritten |= not state.adapter_names
            state.open = False
            state.failure = None
            return self.report()

    def report(self) -> dict[str, Any]:
        """State of this worker's weights, for the trainer to check; JSON can hold it."""
        state = self.state
        return {
            **state.weights.payload(),
            "pushes": state.pushes,
            "base_overwritten": state.base_overwritten,
            "push_open": state.open,
            "failure": state.failure,
            "checksum": state.checksum,
            "checksum_of": "received" if self._sharded else "parameters",
            "num_tensors": len(state.shapes),
            "received_bytes": state.received_bytes,
            "receive_s": state.receive_s,
            "load_s": state.load_s,
            "num_in_place": state.num_in_place,
            "communicator_open": self._group is not None,
        }

    def _expect(self, named_shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Record the names of a bucket, and refuse wrong ones before a byte is loaded."""
        self.begin()
        for name, shape in named_shapes:
            self.layout.place(name)
            if name in self.state.shapes:
                raise RolloutError(f"the learner sent {name!r} twice in one push")
            self.state.shapes[name] = shape

    def _next_bucket(self) -> None:
        """Make room for one more bucket: at most one is still being loaded while another arrives."""
        _finish(self._loading_before)
        self._loading_before, self._loading = self._loading, []

    def begin(self) -> None:
        """Open a push, if none is open."""
        if self.state.open:
            return
        if not self.layout.describes(self.model):
            self.layout = WeightLayout.from_model(self.model)
            self.in_place = InPlaceTargets(self.layout, enabled=not self._sharded)
        last = self.state
        self.state = PushState(
            open=True,
            weights=last.weights,
            pushes=last.pushes,
            base_overwritten=last.base_overwritten,
            failure=last.failure,
        )

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]], ready: torch.cuda.Event | None = None) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            if ready is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)
        started = time.perf_counter()
        if self._sharded:
            self.state.received_hashes |= {name: checksum.tensor_hash(tensor) for name, tensor in tensors}
        with torch.no_grad():
            unproven = [(name, tensor) for name, tensor in tensors if not self.in_place.put(name, tensor)]
            if unproven:
                with self.in_place.probe(unproven), _naming(unproven):
                    self.model.load_weights(unproven)  # pyright: ignore[reportCallIssue]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for name, tensor in tensors:
            parameter = self.layout.parameters[self.layout.place(name).parameter]
            if parameter.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                raise RolloutError(f"the engine made {name} a parameter without copying it; its memory is used again")
        self.state.load_s += time.perf_counter() - started

    def _finish_loading(self) -> None:
        _finish(self._loading_before)
        _finish(self._loading)

    def _checksum(self) -> str:
        if self.state.adapter_names and not self.state.shapes:
            return checksum.combined({})
        if self._sharded:
            return checksum.combined(self.state.received_hashes)
        read = self.layout.read_back(self.state.shapes)
        return checksum.combined({name: checksum.tensor_hash(tensor) for name, tensor in read})

    def record_failure(self, why: str) -> None:
        """Keep the reason for later reports: ``swift rollout`` answers 200 whatever happens here."""
        self.state.failure = why


def _finish(loading: list[Future[None]]) -> None:
    while loading:
        loading.pop(0).result()


@contextmanager
def _naming(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Name the tensors in an error of the engine's loader, which says at most that sizes do not fit."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError, LookupError, TypeError, AttributeError) as error:
        named = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors[:12]]
        more = f" or {len(tensors) - len(named)} more" if len(tensors) > len(named) else ""
        raise RolloutError(
            f"the engine does not take {' or '.join(named)}{more} ({type(error).__name__}: "
            f"{str(error).strip()[:300] or 'no reason given'}); do its model and the learner's differ in kind or size?"
        ) from error


@contextmanager
def recorded(keep: Callable[[str], None]) -> Iterator[None]:
    """Keep the text of an error that leaves the block: ``swift rollout`` answers 200 whatever happens here."""
    try:
        yield
    except Exception as error:
        keep(f"{type(error).__name__}: {error}")
        raise
