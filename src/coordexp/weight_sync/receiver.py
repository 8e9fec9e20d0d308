"""The receiving end of weight pushes in one worker: receives tensors, loads them, checks that all of them arrived.
Depends on the model and the weight group, not on vLLM.

``WeightLayout`` maps the trainer's tensors to a vLLM model's parameters: renamed, fused, tied. vLLM ignores some
unknown names, and counts a fused parameter as loaded after any part of it. So coverage is checked here, in both
directions, by the model's own mapping tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync import WeightVersion
from coordexp.weight_sync.buckets import (
    TensorInfo,
    as_bytes,
    combined,
    computed_by_now,
    pieces,
    read_infos,
    tensor_hashes,
    unpack,
)
from coordexp.weight_sync.group import Communicator, GroupAddress, join

Named = list[tuple[str, torch.Tensor]]
LOAD_BYTES = 32 << 20  # loaded at once while more arrives
_WRAPPED = ".base_layer"  # vLLM's LoRA layers hold the layer that they wrap so, and load its weights without it
_SENTINEL = 0xA5  # as a float of any type: tiny or huge, and no weight


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one tensor of the trainer: ``part`` of ``parts`` (in their order) of a runtime parameter."""

    parameter: str
    part: str = ""
    parts: tuple[str, ...] = ("",)


@dataclass(slots=True)
class WeightLayout:
    """The mapping for one loaded model. ``parameters``: runtime name without LoRA's wrapping → parameter."""

    parameters: Mapping[str, torch.Tensor]
    _aliases: Mapping[str, str]
    fused: Mapping[str, tuple[str, tuple[str, ...]]]  # part → name of the whole, and its parts in order
    _rename: Any
    _places: dict[str, Place] = field(default_factory=dict)

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> WeightLayout:
        parameters: dict[str, torch.Tensor] = {}
        first_name: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for runtime_name, parameter in model.named_parameters(remove_duplicate=False):
            name = runtime_name.replace(_WRAPPED, "")
            if id(parameter) in first_name:  # tied: the same memory under a second name
                aliases[name] = first_name[id(parameter)]
                continue
            first_name[id(parameter)] = name
            parameters[name] = parameter
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        fused = {part: (whole, tuple(parts)) for whole, parts in packed.items() if len(parts) > 1 for part in parts}
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        return cls(parameters, aliases, fused, mapper)

    def describes(self, model: torch.nn.Module) -> bool:
        # An engine may replace its parameters.
        parameter_of = {name.replace(_WRAPPED, ""): parameter for name, parameter in model.named_parameters()}
        return parameter_of.keys() == self.parameters.keys() and all(
            parameter_of[name] is p for name, p in self.parameters.items()
        )

    def place(self, name: str) -> Place:
        """Where the trainer's tensor ``name`` belongs. Raises RolloutError if the engine has no such parameter."""
        if name in self._places:
            return self._places[name]
        renamed = name if self._rename is None else self._rename.get_rename_mapper().map_name(name)
        if renamed is not None:
            *modules, last = renamed.split(".")
            place = Place(renamed)
            if modules and modules[-1] in self.fused:
                whole, parts = self.fused[modules[-1]]
                place = Place(".".join([*modules[:-1], whole, last]), modules[-1], parts)
            if place.parameter in self._aliases:
                place = Place(self._aliases[place.parameter])
            if place.parameter in self.parameters:
                self._places[name] = place
                return place
        raise RolloutError(
            f"the trainer sent {name!r}, which is not a weight of the engine's model"
            + (f" (it would be {renamed!r} there)" if renamed not in (None, name) else "")
            + "; both must be the same architecture with the same names"
        )

    def check_complete(self, names: Iterable[str]) -> None:
        """Raises RolloutError if these tensors of the trainer leave a parameter, or a part of one, as it was."""
        covered: dict[str, set[str]] = {}
        for name in names:
            place = self.place(name)
            covered.setdefault(place.parameter, set()).add(place.part)
        parts_of = dict(self.fused.values())
        missing = []
        for parameter in self.parameters:
            have = covered.get(parameter)
            if have is None:
                missing.append(parameter)
            elif "" not in have:
                parts = parts_of[parameter.split(".")[-2]]
                missing += [f"{parameter} ({part})" for part in parts if part not in have]
        if missing:
            raise RolloutError(
                f"{len(missing)} of the engine's weights were not sent: {_listed(missing)}; the engine keeps old "
                "values there, so its answers would not be the trainer's"
            )

    def read_back(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Each of the trainer's tensors as the parameters now hold it (views), for an engine on one device. Raises
        RolloutError for parts that do not fill their parameter."""
        part_rows = {self.place(name): shape[0] for name, shape in shapes.items() if shape}
        for name, shape in shapes.items():
            rows = self.rows(name, shape, part_rows)
            if rows is None or rows.numel() != torch.Size(shape).numel():
                place = self.place(name)
                rows_shape = "unknown" if rows is None else str(tuple(rows.shape))
                raise RolloutError(
                    f"{name} has shape {tuple(shape)}, its place in the engine's {place.parameter} {rows_shape} "
                    f"of {tuple(self.parameters[place.parameter].shape)}"
                )
            yield name, rows

    def rows(self, name: str, shape: tuple[int, ...], part_rows: Mapping[Place, int]) -> torch.Tensor | None:
        """The rows (a view) of a parameter that a tensor of the trainer fills, if its parts are stored in their order.
        ``part_rows``: number of rows of each place; None is returned if one before this part is missing."""
        place = self.place(name)
        start = 0
        for part in place.parts[: place.parts.index(place.part)]:
            before = replace(place, part=part)
            if before not in part_rows:
                return None
            start += part_rows[before]
        parameter = self.parameters[place.parameter].detach()
        return parameter[start : start + shape[0]] if shape else parameter


class InPlaceTargets:
    """Memory of the engine into which a tensor's bytes may be written without its loader.

    A matching name and size do not prove that: a loader may reorder, pad or transform. So while the loader loads a
    tensor for the first time, :meth:`probe` fills the presumed destination with a sentinel first and compares bytes
    afterwards. If they are the tensor's, loading is a plain copy, and later pushes of the same shape and type skip it.
    Measured at 1.7 GB on two cores: a push through the loader takes a fifth longer (benchmarks/README.md).
    """

    def __init__(self, layout: WeightLayout, *, enabled: bool) -> None:
        self._layout = layout
        self._enabled = enabled
        self._part_rows: dict[Place, int] = {}
        self._proven: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def destination(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """(number of bytes,) uint8: the memory that this tensor fills; None if that is not proven."""
        return self._memory(name, shape) if self._proven.get(name) == (shape, dtype) else None

    @contextmanager
    def probe(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Around the engine's loading of ``tensors``: find where each goes. Raises RolloutError if one was ignored."""
        self._part_rows |= {self._layout.place(name): len(tensor) for name, tensor in tensors if tensor.dim()}
        presumed: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors if self._enabled else ():
            memory = self._memory(name, tuple(tensor.shape))
            parameter = self._layout.parameters[self._layout.place(name).parameter]
            if memory is not None and parameter.dtype == tensor.dtype and 0 < memory.numel() == tensor.nbytes:
                presumed.append((name, tensor, memory.fill_(_SENTINEL)))
        yield
        for name, tensor, memory in presumed:
            if torch.equal(memory, as_bytes(tensor).to(memory.device)):  # offloaded weights are in main memory
                self._proven[name] = tuple(tensor.shape), tensor.dtype
            elif bool((memory == _SENTINEL).all()):
                raise RolloutError(
                    f"the engine's loader ignored {name}: {self._layout.place(name).parameter} was left as it was"
                )

    def _memory(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        rows = self._layout.rows(name, shape, self._part_rows)
        return as_bytes(rows) if rows is not None and rows.is_contiguous() else None


def _listed(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


@dataclass(slots=True)
class PushState:
    """The push under way, or the last one, which keeps its figures."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    received_hashes: dict[str, int] = field(default_factory=dict)
    adapter_names: list[str] = field(default_factory=list)
    open: bool = False
    checksum: str | None = None
    failure: str | None = None
    received_bytes: int = 0
    receive_s: float = 0.0
    load_s: float = 0.0
    num_in_place: int = 0


class WeightReceiver:
    """One worker's end of weight pushes. Weights are loaded in the background while further ones arrive, so an error of
    loading shows at a later call."""

    def __init__(self, model: torch.nn.Module, device: torch.device, *, sharded: bool) -> None:
        self.layout = WeightLayout.from_model(model)
        self.state = PushState()
        self._weights = WeightVersion()
        self._pushes = 0
        self._base_overwritten = False  # by full weights: an adapter for the checkpoint no longer fits
        self._overwritten: set[Place] = set()  # since the start, by pushes that failed too
        self.model = model
        self._device = device
        self._sharded = sharded  # tensor parallel: no worker holds a whole tensor to read back
        self.in_place = InPlaceTargets(self.layout, enabled=not sharded)
        self._group: Communicator | None = None
        self._trainer = ""
        self._source = -1
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-weights")
        self._loading: list[list[Future[None]]] = []  # of the newest bucket and the one before it
        self._buffers: list[torch.Tensor] = []  # two, used in turn

    @property
    def owner(self) -> str | None:
        """The trainer whose weight group this is, while it is connected; None also where another worker knows it."""
        return self._trainer if self._group is not None and self._group.is_whole() else None

    @property
    def problem(self) -> str | None:
        """Why the weights may be neither the old nor the new ones; None if they are sound."""
        if self.state.failure is None and self.state.open and self.state.shapes:
            return "weights are being pushed"  # or the trainer is gone; ms-swift's never commit an adapter alone
        return self.state.failure

    def open(self, address: GroupAddress, trainer: str = "") -> None:
        """Join a weight group, where the last rank sends; leave that of an earlier trainer."""
        self.close()
        self._group, self._trainer = join(address, self._device), trainer
        self._source = address.world_size - 1

    def close(self) -> None:
        """Leave the group. A push that was under way is lost, and its weights stay half-loaded."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._loading, self._buffers = [], []  # what is still being loaded precedes what is loaded later
        if self.state.open:
            self.state.failure = "the trainer disconnected during a push"
        self.state.open = False

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Keep the text of an error for later reports: ``swift rollout`` answers 200 even then."""
        try:
            yield
        except Exception as error:
            self.state.failure = f"{type(error).__name__}: {error}"
            raise

    def receive(self, payload: Sequence[Mapping[str, Any]]) -> None:
        with self.recording_failures():
            infos = read_infos(payload)
            self._begin_bucket([(info.name, info.shape) for info in infos])
            for some in self._arriving(infos, reuse_memory=True):
                self._loading[-1].append(self._loader.submit(self._load, some))

    def take(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load full weights that are in this process already. They must not change before :meth:`commit` returns."""
        with self.recording_failures():
            self._begin_bucket([(name, tuple(tensor.shape)) for name, tensor in named])
            # The loading thread has a stream of its own: it must wait for what this one's still computes.
            self._loading[-1].append(self._loader.submit(self._load, named, computed_by_now(self._device)))

    def receive_adapter(self, payload: Sequence[Mapping[str, Any]]) -> Named:
        """Receive the tensors of an adapter, in memory of their own: an engine may keep them as they are."""
        with self.recording_failures():
            infos = read_infos(payload)
            self.begin()
            return [named for some in self._arriving(infos, reuse_memory=False) for named in some]

    def _arriving(self, infos: Sequence[TensorInfo], *, reuse_memory: bool) -> Iterator[Named]:
        # Yields the tensors that must be loaded, in portions of at least LOAD_BYTES. Each piece (see buckets.pieces) is
        # one transfer. A lone tensor with a proven destination is received into the engine's own memory, and not
        # yielded. All others share a staging buffer.
        if self._group is None:
            raise RolloutError("no weight group is open; call /init_communicator/ first")
        started = time.perf_counter()
        transfers: list[tuple[list[TensorInfo], torch.Tensor | None]] = []
        for piece in pieces(infos):
            first = infos[piece[0]]
            place = self.in_place.destination(first.name, first.shape, first.torch_dtype) if len(piece) == 1 else None
            transfers.append(([infos[index] for index in piece], place))
        staged_sizes = [sum(info.numel for info in tensors) for tensors, place in transfers if place is None]
        num_left = sum(staged_sizes)
        if reuse_memory and self._device.type == "cpu":
            # Two buffers take turns, because fresh pages cost as much as the transfer itself. _begin_bucket has waited
            # for the weights in the one that is used again.
            buffer = self._buffers.pop(0) if len(self._buffers) == 2 else torch.empty(0, dtype=torch.uint8)
            if buffer.numel() < num_left:
                buffer = torch.empty(num_left, dtype=torch.uint8)
            self._buffers.append(buffer)
        else:
            buffer = torch.empty(num_left, dtype=torch.uint8, device=self._device)
        staging = iter(buffer[:num_left].split(staged_sizes))
        memories = [next(staging) if place is None else place for _, place in transfers]

        waiting: Named = []  # arrived, not yet yielded
        num_waiting = 0  # bytes
        for index in self._group.broadcast_each(memories, self._source):
            (tensors, place), memory = transfers[index], memories[index]
            self.state.received_bytes += memory.numel()
            if place is not None:
                self.state.num_in_place += 1
                continue
            waiting += unpack(memory, tensors)
            num_waiting += memory.numel()
            num_left -= memory.numel()
            if num_waiting >= LOAD_BYTES or num_left == 0:
                yield waiting
                waiting, num_waiting = [], 0
        self.state.receive_s += time.perf_counter() - started

    def commit(
        self, version: int | None, wants_checksum: bool, finish: Callable[[], None], trainer_id: str | None = None
    ) -> dict[str, Any]:
        """End a push: check that all weights have arrived and are loaded, then ``finish`` (vLLM's post-processing).
        ``version``: of these weights, None for one more than the last; ``wants_checksum``: read the parameters back and
        hash them. Raises RolloutError if nothing was pushed, loading failed, or weights are missing: the old version is
        gone too."""
        state = self.state
        with self.recording_failures():
            if not state.open or state.failure is not None:
                raise RolloutError(state.failure or "no push is under way")
            self._finish_loading(keep=0)
            if not state.adapter_names:
                self.layout.check_complete(state.shapes)
            elif trainer_id is not None:  # ms-swift's trainers push the model below their adapter first
                self._check_base()
            finish()
            state.checksum = None
            if wants_checksum and self._sharded:
                state.checksum = combined(state.received_hashes)
            elif wants_checksum:  # of nothing after an adapter
                read = self.layout.read_back(state.shapes)
                state.checksum = combined(tensor_hashes(read))
            self._weights = WeightVersion(self._weights.version + 1 if version is None else version, trainer_id)
            self._pushes += 1
            self._base_overwritten |= not state.adapter_names
            state.open = False
            return self.report()

    def _check_base(self) -> None:
        # CoordExp's adapters are trained on the checkpoint's weights, but for those that come with them.
        changed = self._overwritten - {self.layout.place(name) for name in self.state.shapes}
        if changed:
            shown = _listed(sorted({place.parameter for place in changed}))
            raise RolloutError(
                f"an earlier push changed {shown} of the engine's model, on whose own weights this adapter was "
                "trained; restart the server, or push with sync.mode: full"
            )

    def report(self) -> dict[str, Any]:
        """State of this worker's weights, for the trainer to check; JSON can hold it."""
        state = self.state
        return {
            **self._weights.payload(),
            "pushes": self._pushes,
            "base_overwritten": self._base_overwritten,
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
            "owner": self.owner,
        }

    def _begin_bucket(self, named_shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        # Refuse wrong names before a byte is loaded.
        self.begin()
        for name, shape in named_shapes:
            self.layout.place(name)
            if name in self.state.shapes:
                raise RolloutError(f"the trainer sent {name!r} twice in one push")
            self.state.shapes[name] = shape
            self._overwritten.add(self.layout.place(name))
        self._finish_loading(keep=1)  # at most one bucket is still being loaded while another arrives
        self._loading.append([])

    def _finish_loading(self, keep: int) -> None:
        while len(self._loading) > keep:
            while self._loading[0]:
                self._loading[0].pop(0).result()
            self._loading.pop(0)

    def begin(self) -> None:
        """Open a push, if none is open. One with an error ends with this: no part of it counts for the next."""
        if self.state.open and self.state.failure is None:
            return
        if self._loading:
            self._loading, self._buffers = [], []
        if not self.layout.describes(self.model):
            self.layout = WeightLayout.from_model(self.model)
            self.in_place = InPlaceTargets(self.layout, enabled=not self._sharded)
        self.state = PushState(open=True)

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]], ready: torch.cuda.Event | None = None) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            if ready is not None:
                torch.cuda.current_stream(self._device).wait_event(ready)
        started = time.perf_counter()
        if self._sharded:
            self.state.received_hashes |= tensor_hashes(tensors)
        with torch.no_grad():
            unproven: Named = []
            for name, tensor in tensors:
                place = self.in_place.destination(name, tuple(tensor.shape), tensor.dtype)
                if place is None:
                    unproven.append((name, tensor))
                else:
                    place.copy_(as_bytes(tensor))
            if unproven:
                try:
                    with self.in_place.probe(unproven):
                        self.model.load_weights(unproven)  # pyright: ignore[reportCallIssue]
                except (RuntimeError, ValueError, AssertionError, LookupError, TypeError, AttributeError) as error:
                    # vLLM's own message states at most that sizes do not fit.
                    sent = _listed([f"{name} {tuple(tensor.shape)}" for name, tensor in unproven], 12)
                    raise RolloutError(
                        f"the engine does not take one of {sent} ({type(error).__name__}: {str(error).strip()[:300]}); "
                        "do its model and the trainer's differ in kind or size?"
                    ) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for name, tensor in tensors:
            parameter = self.layout.parameters[self.layout.place(name).parameter]
            if parameter.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                raise RolloutError(f"the engine made {name} a parameter without copying it; its memory is used again")
        self.state.load_s += time.perf_counter() - started
