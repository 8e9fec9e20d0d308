"""Which columns of the language head are coordinate tokens: of the vocabulary, and of a chunk of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True, eq=False)
class CoordColumns:
    """The coordinate tokens, by bin, and sorted: a chunk's are then a slice, found without a read from a GPU."""

    ids_B: torch.Tensor
    sorted_ids: tuple[int, ...]
    sorted_ids_B: torch.Tensor
    bin_of_sorted_B: torch.Tensor

    @staticmethod
    @lru_cache(maxsize=8)
    def on(coord_ids: tuple[int, ...], device: torch.device) -> CoordColumns:
        """Cached, because a copy from the host to a GPU blocks."""
        with torch.inference_mode(False):  # the first caller may need no gradient, and later ones do
            order = sorted(range(len(coord_ids)), key=coord_ids.__getitem__)
            in_order = tuple(coord_ids[k] for k in order)
            ids_B, sorted_ids_B, order_B = (
                torch.tensor(values, device=device) for values in (coord_ids, in_order, order)
            )
            return CoordColumns(ids_B, in_order, sorted_ids_B, order_B)

    def within(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinate columns of a chunk, counted from its start, and their bins."""
        low, high = bisect_left(self.sorted_ids, start), bisect_left(self.sorted_ids, stop)
        return self.sorted_ids_B[low:high] - start, self.bin_of_sorted_B[low:high]


def coord_ids_on(coord_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """The coordinate tokens by bin: int64 (B,) on ``device``, cached."""
    return CoordColumns.on(tuple(coord_ids), device).ids_B
