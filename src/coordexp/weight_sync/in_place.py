"""Where the learner's tensors lie in the engine's memory, so that their bytes can be received there, without loading.

Names alone do not prove it: an engine's loader may reorder, pad or transform. So the loader shows it. Before it loads a
tensor, the supposed place is blanked; holds it exactly the tensor's bytes afterwards, then loading *is* copying there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.buckets import TensorInfo, as_bytes
from coordexp.weight_sync.layout import WeightLayout

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
