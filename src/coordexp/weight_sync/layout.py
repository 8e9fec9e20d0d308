"""Where the trainer's tensors belong in a vLLM model: renamed, fused, tied; and where they can be written directly.

vLLM ignores some unknown names, and counts a fused parameter as loaded after any part of it. So coverage is checked
here, in both directions, by the model's own mapping tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.buckets import as_bytes

_WRAPPED = ".base_layer"  # vLLM's LoRA layers hold the layer that they wrap so, and load its weights without it
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of the trainer belongs: ``part`` of ``parts`` (in their order) of a runtime parameter."""

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
            f"the learner sent {name!r}, which is not a weight of the engine's model"
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
            shown = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
            raise RolloutError(
                f"{len(missing)} of the engine's weights were not sent: {shown}; the engine keeps old values there, so "
                "its answers would not be the learner's"
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


_SENTINEL = 0xA5  # as a float of any type: tiny or huge, and no weight


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
        """Around the engine's loading of ``tensors``: find out where each of them goes. Raises RolloutError if the
        loader ignored one."""
        self._part_rows |= {self._layout.place(name): len(tensor) for name, tensor in tensors if tensor.dim()}
        presumed: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, tensor in tensors if self._enabled else ():
            memory = self._memory(name, tuple(tensor.shape))
            parameter = self._layout.parameters[self._layout.place(name).parameter]
            if memory is not None and parameter.dtype == tensor.dtype and 0 < memory.numel() == tensor.nbytes:
                presumed.append((name, tensor, memory.fill_(_SENTINEL)))
        yield
        for name, tensor, memory in presumed:
            if torch.equal(memory, as_bytes(tensor)):
                self._proven[name] = tuple(tensor.shape), tensor.dtype
            elif bool((memory == _SENTINEL).all()):
                raise RolloutError(
                    f"the engine's loader ignored {name}: {self._layout.place(name).parameter} was left as it was"
                )

    def _memory(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        rows = self._layout.rows(name, shape, self._part_rows)
        return as_bytes(rows) if rows is not None and rows.is_contiguous() else None
