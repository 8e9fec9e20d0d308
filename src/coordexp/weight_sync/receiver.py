"""The receiving end of weight pushes in one worker: what arrives, whether it is complete, and that it landed.

Knows the model and the weight group, not vLLM: the worker extension calls it, and colocated engines hand it tensors.
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
from coordexp.weight_sync.layout import ProvenPlaces, WeightLayout
from coordexp.weight_sync.stamp import WeightStamp

Named = list[tuple[str, torch.Tensor]]
LOAD_BYTES = 32 << 20  # what is loaded at once while more arrives


@dataclass(slots=True)
class PushState:
    """The push under way, and what the last ones did."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    received_hashes: dict[str, int] = field(default_factory=dict)
    adapter_names: list[str] = field(default_factory=list)
    open: bool = False
    stamp: WeightStamp = field(default_factory=WeightStamp)
    pushes: int = 0
    base_overwritten: bool = False  # full weights came at least once: an adapter for the checkpoint no longer fits
    checksum: str | None = None
    failure: str | None = None
    received_bytes: int = 0
    receive_s: float = 0.0
    load_s: float = 0.0
    num_in_place: int = 0


class WeightReceiver:
    """One worker's end of weight pushes; knows the model, not vLLM.

    Weights are loaded in the background while further ones arrive, so an error of loading shows at a later call. Once
    the engine's loader has shown where a large tensor lies, its bytes are received straight into that memory.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device, *, sharded: bool) -> None:
        self.layout = WeightLayout.from_model(model)
        self.state = PushState()
        self._model = model
        self._device = device
        self._sharded = sharded  # tensor parallel: no worker holds a whole tensor to read back
        self._places = ProvenPlaces(self.layout, none=sharded)
        self._group: Communicator | None = None
        self._source = -1
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-weights")
        self._loading_before: list[Future[None]] = []  # of the bucket before the newest
        self._loading: list[Future[None]] = []
        self._buffers: list[torch.Tensor] = []  # two, taken in turn

    def open(self, address: GroupAddress) -> None:
        """Join a weight group whose last rank sends. A group that is still open belongs to a learner of the past: it is
        torn down, not waited for."""
        self.close()
        self._group = join(address, self._device)
        self._source = address.world_size - 1

    def close(self) -> None:
        """Leave the group; a push that was under way is lost, and its weights stay half-loaded."""
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
            self._arriving(
                infos, self._buffer, lambda some: self._loading.append(self._loader.submit(self._load, some))
            )

    def take(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load full weights that are in this process already. They must not change before :meth:`commit` returns."""
        with recorded(self.record_failure):
            self._expect([(name, tuple(tensor.shape)) for name, tensor in named])
            self._next_bucket()
            self._start_loading(named)

    def receive_adapter(self, payload: Sequence[Mapping[str, Any]]) -> list[tuple[str, torch.Tensor]]:
        """Receive the tensors of an adapter."""
        with recorded(self.record_failure):
            infos = read_infos(payload)
            self.begin()
            here: Named = []

            def own_memory(size: int) -> torch.Tensor:  # an engine may keep an adapter's tensors as they are
                return torch.empty(size, dtype=torch.uint8, device=self._device)

            self._arriving(infos, own_memory, here.extend)
            return here

    def _arriving(
        self, infos: Sequence[TensorInfo], memory: Callable[[int], torch.Tensor], take: Callable[[Named], None]
    ) -> None:
        """Receive one bucket: each piece into its place where that is proven, the others into ``memory``, from which
        ``take`` gets them as soon as enough are there to be loaded."""
        if self._group is None:
            raise RolloutError("no weight group is open; call /init_communicator/ first")
        started = time.perf_counter()
        parts = [[infos[index] for index in piece] for piece in pieces(infos)]
        sizes = [sum(info.numel for info in part) for part in parts]
        places = [self._places.bytes_of(part[0]) if len(part) == 1 else None for part in parts]
        staged = memory(sum(size for size, place in zip(sizes, places, strict=True) if place is None))
        targets: list[torch.Tensor] = []
        start = 0
        for size, place in zip(sizes, places, strict=True):
            targets.append(staged[start : start + size] if place is None else place)
            start += size if place is None else 0
        last_staged = max((index for index, place in enumerate(places) if place is None), default=-1)
        here: Named = []
        num_bytes = 0

        def arrived(index: int) -> None:
            nonlocal here, num_bytes
            self.state.received_bytes += sizes[index]
            if places[index] is None:
                here += unpack(targets[index], parts[index])
                num_bytes += sizes[index]
            if here and (num_bytes >= LOAD_BYTES or index == last_staged):
                take(here)
                here, num_bytes = [], 0

        self._group.broadcast(targets, self._source, arrived=arrived)
        self.state.num_in_place += sum(place is not None for place in places)
        self.state.receive_s += time.perf_counter() - started

    def _buffer(self, size: int) -> torch.Tensor:
        """Memory for one bucket. On a CPU it is used again, as fresh pages cost as much as the transfer itself: every
        other bucket gets the same, whose weights :meth:`_next_bucket` has waited for."""
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
        """End a push: everything loaded, everything covered; ``finish`` lets vLLM lay the weights out anew.

        Args:
            version: what these weights are called from now on; None counts on.
            wants_checksum: read the parameters back and sum them.
            learner_id: whose weights they are.

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
            state.stamp = WeightStamp(state.stamp.version + 1 if version is None else version, learner_id)
            state.pushes += 1
            state.base_overwritten |= not state.adapter_names
            state.open = False
            state.failure = None
            return self.report()

    def report(self) -> dict[str, Any]:
        """What a learner checks; JSON-able."""
        state = self.state
        return {
            **state.stamp.payload(),
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
        """Note what a bucket holds, and refuse it before a byte of it is loaded."""
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
        if not self.layout.describes(self._model):
            self.layout = WeightLayout.from_model(self._model)
            self._places = ProvenPlaces(self.layout, none=self._sharded)
        last = self.state
        self.state = PushState(
            open=True,
            stamp=last.stamp,
            pushes=last.pushes,
            base_overwritten=last.base_overwritten,
            failure=last.failure,
        )

    def _start_loading(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._loading.append(self._loader.submit(self._load, tensors))

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        started = time.perf_counter()
        if self._sharded:
            self.state.received_hashes |= {name: checksum.tensor_hash(tensor) for name, tensor in tensors}
        with torch.no_grad():
            unproven = [(name, tensor) for name, tensor in tensors if not self._places.put(name, tensor)]
            if unproven:
                with self._places.proving(unproven), _naming(unproven):
                    self._model.load_weights(unproven)  # pyright: ignore[reportCallIssue]
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
        """Note why this push failed, for who asks later: ``swift rollout`` answers 200 whatever happens here."""
        self.state.failure = why


def _finish(loading: list[Future[None]]) -> None:
    while loading:
        loading.pop(0).result()


@contextmanager
def _naming(tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Engines say of a weight that does not fit its sizes at most, and not always those."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError, LookupError, TypeError, AttributeError) as error:
        named = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors[:12]]
        more = f" or {len(tensors) - len(named)} more" if len(tensors) > len(named) else ""
        raise RolloutError(
            f"the engine does not take {' or '.join(named)}{more} ({type(error).__name__}: "
            f"{str(error).strip()[:300] or 'no reason given'}): has it another model, or another size of it, than the "
            "learner?"
        ) from error


@contextmanager
def recorded(keep: Callable[[str], None]) -> Iterator[None]:
    """Keep the text of an error that leaves the block: ``swift rollout`` answers 200 whatever happens here."""
    try:
        yield
    except Exception as error:
        keep(f"{type(error).__name__}: {error}")
        raise
