"""Which of the learner's tensors make up which parameter of a vLLM model: renamed, fused, tied; and where they lie in
the engine's memory, so that their bytes can be received there, without loading.

vLLM loads what it recognises, ignores some of what it does not, and counts a fused parameter as loaded once any part of
it came. So coverage is checked here, in both directions, by the model's own mapping tables.

Names alone do not prove a place: an engine's loader may reorder, pad or transform. So the loader shows it. Before it
loads a tensor, the supposed place is blanked; holds it exactly the tensor's bytes afterwards, then loading *is* copying
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.buckets import TensorInfo, as_bytes

_WRAPPED = ".base_layer"  # vLLM's LoRA layers hold the layer that they wrap so, and load its weights without it
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of the learner belongs: ``part`` of ``parts`` (in their order) of a runtime parameter."""

    parameter: str
    part: str = ""
    parts: tuple[str, ...] = ("",)


@dataclass(slots=True)
class WeightLayout:
    """The mapping for one loaded model. ``parameters``: runtime name without LoRA's wrapping → parameter."""

    parameters: Mapping[str, torch.Tensor]
    _aliases: Mapping[str, str]
    _fused: Mapping[str, tuple[str, tuple[str, ...]]]
    _rename: Any
    _places: dict[str, Place] = field(default_factory=dict)
    _siblings: dict[tuple[str, str], str] = field(default_factory=dict)  # parameter and part → the learner's name

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> WeightLayout:
        """The layout of vLLM's model: each parameter once, and which names of a checkpoint go where in it."""
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
        """Whether these are still the model's parameters: an engine may put new ones in their place."""
        parameter_of = {name.replace(_WRAPPED, ""): parameter for name, parameter in model.named_parameters()}
        return parameter_of.keys() == self.parameters.keys() and all(
            parameter_of[name] is p for name, p in self.parameters.items()
        )

    def place(self, name: str) -> Place:
        """Where the learner's tensor ``name`` belongs.

        Raises:
            RolloutError: the engine has no such parameter.
        """
        if name not in self._places:
            place = self._places[name] = self._find(name)
            self._siblings[place.parameter, place.part] = name
        return self._places[name]

    def _find(self, name: str) -> Place:
        renamed = name if self._rename is None else self._rename.get_rename_mapper().map_name(name)
        if renamed is not None:
            *modules, last = renamed.split(".")
            place = Place(renamed)
            if modules and modules[-1] in self._fused:
                whole, parts = self._fused[modules[-1]]
                place = Place(".".join([*modules[:-1], whole, last]), modules[-1], parts)
            if place.parameter in self._aliases:
                return Place(self._aliases[place.parameter])
            if place.parameter in self.parameters:
                return place
        raise RolloutError(
            f"the learner sent {name!r}, which is no weight of the engine's model"
            + (f" (it would be {renamed!r} there)" if renamed not in (None, name) else "")
            + "; both must be the same architecture with the same names"
        )

    def check_complete(self, names: Iterable[str]) -> None:
        """Refuse a set of the learner's tensors that leaves a parameter, or a part of one, as it was.

        Raises:
            RolloutError: naming the first missing ones.
        """
        covered: dict[str, set[str]] = {}
        for name in names:
            place = self.place(name)
            covered.setdefault(place.parameter, set()).add(place.part)
        missing = []
        for parameter in self.parameters:
            have = covered.get(parameter)
            if have is None:
                missing.append(parameter)
            elif "" not in have:
                missing += [f"{parameter} ({part})" for part in self._parts_of(parameter) if part not in have]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", …" if len(missing) > _SHOWN else "")
            raise RolloutError(
                f"{len(missing)} of the engine's weights were not sent: {shown}; the engine keeps old values there, so "
                "its answers would not be the learner's"
            )

    def _parts_of(self, parameter: str) -> tuple[str, ...]:
        whole = parameter.split(".")[-2]
        return next(parts for name, parts in self._fused.values() if name == whole)

    def read_back(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Each of the learner's tensors as the parameters now hold it (views), for an engine on one device.

        Args:
            shapes: shape of every tensor that was sent.

        Raises:
            RolloutError: parts that do not fill their parameter.
        """
        for name, shape in shapes.items():
            place = self.place(name)
            rows = self.rows(name, shapes)
            if rows is None or rows.numel() != torch.Size(shape).numel():
                rows_shape = "unknown" if rows is None else str(tuple(rows.shape))
                raise RolloutError(
                    f"{name} has shape {tuple(shape)}, its place in the engine's {place.parameter} {rows_shape} "
                    f"of {tuple(self.parameters[place.parameter].shape)}"
                )
            yield name, rows

    def rows(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> torch.Tensor | None:
        """The rows (a view) of a parameter that a tensor of the learner should fill, by the order of its parts.

        Args:
            shapes: of the learner's tensors by name; None comes back where that of a part before it is missing.
        """
        place = self.place(name)
        parameter = self.parameters[place.parameter].detach()
        start = 0
        for part in place.parts[: place.parts.index(place.part)]:
            sibling = self._siblings.get((place.parameter, part))
            if sibling is None or sibling not in shapes:
                return None
            start += shapes[sibling][0]
        shape = shapes[name]
        return parameter[start : start + shape[0]] if shape else parameter


_BLANK = 0xA5  # as a float of any type: tiny or huge, and no weight


class ProvenPlaces:
    """The places that loading has proven, for one model."""

    def __init__(self, layout: WeightLayout, *, none: bool) -> None:
        """``none``: prove nothing, as where tensor parallelism splits tensors over workers."""
        self._layout = layout
        self._none = none
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._proven: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def bytes_of(self, info: TensorInfo) -> torch.Tensor | None:
        """(number of bytes,) uint8: the memory that this tensor fills; None where that is not proven."""
        return self._memory(info.name) if self._proven.get(info.name) == (info.shape, info.torch_dtype) else None

    def put(self, name: str, tensor: torch.Tensor) -> bool:
        """Copy a tensor to its proven place; False where there is none."""
        if self._proven.get(name) != (tuple(tensor.shape), tensor.dtype):
            return False
        memory = self._memory(name)
        if memory is None:
            return False
        memory.copy_(as_bytes(tensor))
        return True

    @contextmanager
    def proving(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Around the engine's loading of ``tensors``: see where each of them goes.

        Raises:
            RolloutError: the loader ignored a tensor.
        """
        self._shapes |= {name: tuple(tensor.shape) for name, tensor in tensors}
        supposed = {} if self._none else {name: self._supposed(name, tensor) for name, tensor in tensors}
        for memory in supposed.values():
            if memory is not None:
                memory.fill_(_BLANK)
        yield
        for name, tensor in tensors:
            memory = supposed.get(name)
            if memory is None:
                continue
            if torch.equal(memory, as_bytes(tensor)):
                self._proven[name] = tuple(tensor.shape), tensor.dtype
            elif bool((memory == _BLANK).all()):
                raise RolloutError(
                    f"the engine's loader ignored {name}: {self._layout.place(name).parameter} was left as it was"
                )

    def _supposed(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        memory = self._memory(name)
        parameter = self._layout.parameters[self._layout.place(name).parameter]
        if memory is None or parameter.dtype != tensor.dtype or memory.numel() != tensor.numel() * tensor.itemsize:
            return None
        return memory if memory.numel() else None

    def _memory(self, name: str) -> torch.Tensor | None:
        rows = self._layout.rows(name, self._shapes)
        return as_bytes(rows) if rows is not None and rows.is_contiguous() else None
