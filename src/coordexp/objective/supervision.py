"""A packed row's supervision as tensors: where each loss term is trained, and with which weight.

N supervised positions of the row's L tokens, K coordinate slots, M boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from coordexp.records import PackedRow


@dataclass(frozen=True, slots=True, eq=False)
class SupervisionTensors:
    """Positions of a row with a non-zero weight in some term.

    ``position_N``: their tokens' row positions (the hidden states that predict them are at ``position_N - 1``);
    ``label_N``: token ids; ``weights``: (N,) float32 per term that the row has; ``coord_in_N_K``: indices into N of the
    coordinate slots, ``coord_bin_K``: their target bins, which may be fractional; ``box_in_K_M4``: indices into K of
    each box's slots, ``box_bin_M4``: its true bins.
    """

    position_N: torch.Tensor
    label_N: torch.Tensor
    weights: Mapping[str, torch.Tensor]
    coord_in_N_K: torch.Tensor
    coord_bin_K: torch.Tensor
    box_in_K_M4: torch.Tensor
    box_bin_M4: torch.Tensor

    @classmethod
    def from_row(cls, row: PackedRow) -> SupervisionTensors:
        """Shift the targets of a row that :func:`coordexp.packing.build_row` checked to row positions."""
        weights_L: dict[str, np.ndarray] = {}
        coord_pos, coord_bin, box_pos, box_bin = [], [], [], []
        for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
            target, first = segment.target, start + len(segment.prompt_token_ids)
            for term, weight_T in target.weights.items():
                weight_L = weights_L.setdefault(term, np.zeros(row.length, dtype=np.float32))
                weight_L[first:end] = weight_T
            coord_pos.append(target.coord_pos_K + first)
            coord_bin.append(target.coord_bin_K)
            box_pos.append(target.box_pos_M4 + first)
            box_bin.append(target.box_bin_M4)
        supervised_L = np.zeros(row.length, dtype=bool)
        for weight_L in weights_L.values():
            supervised_L |= weight_L != 0
        position_N = np.flatnonzero(supervised_L)
        coord_pos_K = np.concatenate(coord_pos)
        return cls(
            position_N=torch.from_numpy(position_N),
            label_N=torch.from_numpy(row.token_ids_L[position_N].astype(np.int64)),
            weights={term: torch.from_numpy(weight_L[position_N]) for term, weight_L in weights_L.items()},
            coord_in_N_K=torch.from_numpy(np.searchsorted(position_N, coord_pos_K)),
            coord_bin_K=torch.from_numpy(np.concatenate(coord_bin).astype(np.float64)),
            box_in_K_M4=torch.from_numpy(np.searchsorted(coord_pos_K, np.concatenate(box_pos))),
            box_bin_M4=torch.from_numpy(np.concatenate(box_bin).astype(np.float64)),
        )

    def weight_N(self, term: str) -> torch.Tensor:
        """Weights of ``term``, zeros if the row has none of it: (N,)."""
        weight_N = self.weights.get(term)
        return torch.zeros_like(self.position_N, dtype=torch.float32) if weight_N is None else weight_N


def tree_map(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``fn`` to every tensor in dataclasses, mappings and tuples; copy the rest."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: tree_map(fn, item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(tree_map(fn, item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: tree_map(fn, getattr(value, field.name)) for field in fields(value)})
    return value


def tensors_to_device(value: Any, device: torch.device) -> Any:
    """A copy with every tensor on ``device``; copies from pinned memory to a GPU do not block the host."""
    return tree_map(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"), value)
