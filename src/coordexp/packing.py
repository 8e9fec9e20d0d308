"""Segments → packed rows: which to take, which wait, where every token is. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from coordexp.errors import AlignmentError, CarryBufferOverflow, SegmentTooLong, require
from coordexp.records import PackedRow, Segment

# Segments times capacity that the exact search accepts: 512 segments at 64k tokens.
_EXACT_LIMIT = 2**25
_CURE = (
    "raise global_max_length; where the model's own answer makes it long, lower rollout_matching.max_new_tokens; or "
    "set training.packing: false"
)


def select_segments(lengths: Sequence[int], capacity: int) -> list[int]:
    """Ascending insertion indices of the segments to pack next; 0, the oldest, is always among them.

    The fullest selection wins; of equally full ones the one with fewer segments, then the one with the
    lexicographically smallest indices. This order is searched exactly while segments x capacity is small enough. Beyond
    that, the best of two heuristics by the same order wins: oldest-first greedy, and the fullest bin of
    ``binpacking.to_constant_volume`` next to the oldest. So a selection is never emptier than oldest-first greedy.

    Args:
        lengths: tokens per segment in insertion order, each in 1..capacity. capacity: tokens per row.

    Raises:
        MissingDependency: ``binpacking`` is not installed.
        SegmentTooLong: a length exceeds the capacity. ValueError: no lengths, or one below 1.
    """
    binpacking = require("binpacking", "packing (training.packing: true)")
    lengths = [int(length) for length in lengths]
    if not lengths:
        raise ValueError("no segment to select from")
    if min(lengths) < 1:
        raise ValueError(f"segment {lengths.index(min(lengths))} has {min(lengths)} tokens; a segment has at least 1")
    if max(lengths) > capacity:
        raise SegmentTooLong(
            f"segment {lengths.index(max(lengths))}: {max(lengths):,} tokens > row capacity {capacity:,}; {_CURE}"
        )
    if sum(lengths) <= capacity:
        return list(range(len(lengths)))
    if len(lengths) * capacity <= _EXACT_LIMIT:
        # The best selection by the whole order: the two heuristics cannot beat it.
        return best_selection(lengths, capacity)
    candidates = [oldest_first(lengths, capacity), binpacking_candidate(binpacking, lengths, capacity)]
    return min(candidates, key=lambda chosen: (-sum(lengths[i] for i in chosen), len(chosen), chosen))


def oldest_first(lengths: Sequence[int], capacity: int) -> list[int]:
    """The baseline: scan in insertion order and take each segment that still fits."""
    chosen, room = [], capacity
    for index, length in enumerate(lengths):
        if length <= room:
            chosen.append(index)
            room -= length
    return chosen


def binpacking_candidate(binpacking: ModuleType, lengths: Sequence[int], capacity: int) -> list[int]:
    """The oldest, and the fullest of the constant-volume bins made of the others that fit next to it."""
    room = capacity - lengths[0]
    fitting = {index: length for index, length in enumerate(lengths) if index > 0 and length <= room}
    if not fitting:
        return [0]
    bins = binpacking.to_constant_volume(fitting, room)
    fullest = min(bins, key=lambda chosen: (-sum(chosen.values()), len(chosen), sorted(chosen)))
    return [0, *sorted(fullest)]


def best_selection(lengths: Sequence[int], capacity: int) -> list[int]:
    """The exact optimum that includes the oldest: fullest, then fewest, then lexicographically smallest.

    Subset sums as integers used as bit sets: bit s of ``sums[k][i]`` is set if exactly k of segments i, i + 1, … sum
    to s. Rows hold few segments, so few layers are built.
    """
    count, room = len(lengths), capacity - lengths[0]
    mask, reachable = (1 << (room + 1)) - 1, 1
    for length in lengths[1:]:
        reachable |= (reachable << length) & mask
    left = reachable.bit_length() - 1  # the fullest total
    mask = (1 << (left + 1)) - 1
    sums = [[1] * (count + 1)]
    while not (sums[-1][1] >> left) & 1:  # the first layer that reaches it has the fewest segments
        fewer, here, layer = sums[-1], 0, [0] * (count + 1)
        for i in range(count - 1, 0, -1):
            here |= (fewer[i + 1] << lengths[i]) & mask
            layer[i] = here
        sums.append(layer)
    # Walking forward and taking each segment that keeps the optimum gives the smallest indices.
    chosen, needed = [0], len(sums) - 1
    for i, length in enumerate(lengths[1:], start=1):
        if left >= length and (sums[needed - 1][i + 1] >> (left - length)) & 1:
            chosen.append(i)
            left -= length
            needed -= 1
    return chosen


class CarryBuffer:
    """Waiting segments. :meth:`pop` always takes the oldest, and the selection that fills the row best with it."""

    def __init__(self, capacity: int, max_segments: int) -> None:
        """``capacity``: tokens a row (``global_max_length``); ``max_segments``: ``training.packing_buffer``."""
        if capacity < 1 or max_segments < 1:
            raise ValueError(f"capacity and max_segments must be at least 1, got {capacity} and {max_segments}")
        self.capacity = capacity
        self.max_segments = max_segments
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The waiting segments, oldest first."""
        return tuple(self._segments)

    def insert(self, *segments: Segment) -> None:
        """Append segments: all of them, or on an error none. Raises SegmentTooLong if one alone exceeds a row,
        CarryBufferOverflow if too many would wait."""
        for segment in segments:
            if segment.length > self.capacity:
                raise SegmentTooLong(
                    f"sample {segment.sample_id}: {segment.length:,} tokens > global_max_length {self.capacity:,}; "
                    f"{_CURE}"
                )
        if len(self._segments) + len(segments) > self.max_segments:
            raise CarryBufferOverflow(
                f"{len(self._segments):,} segments wait and {len(segments):,} more would exceed "
                f"training.packing_buffer {self.max_segments:,}; raise training.packing_buffer, lower "
                "training.per_device_train_batch_size, or raise global_max_length so that a row takes more segments"
            )
        self._segments.extend(segments)

    def pop(self) -> list[Segment]:
        """Take the segments of the next row out of the buffer, oldest first; the rest keeps its order. Raises
        ValueError if the buffer is empty, MissingDependency without ``binpacking``."""
        chosen = select_segments([segment.length for segment in self._segments], self.capacity)
        taken = [self._segments[index] for index in chosen]
        leaving = set(chosen)
        self._segments = [segment for index, segment in enumerate(self._segments) if index not in leaving]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: ``{"segments": [Segment, …]}``, oldest first; the caller serialises it."""
        return {"segments": list(self._segments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content by a saved one, under this buffer's own limits (same errors as :meth:`insert`)."""
        self._segments = []
        self.insert(*state["segments"])


def build_row(segments: Sequence[Segment]) -> PackedRow:
    """Lay segments end to end, each as its prompt tokens and then its target tokens.

    Raises:
        ValueError: no segment. AlignmentError: roles or weights do not have one value per target token, or the
            coordinates of a target are not exactly its assistant tokens with a ``coord`` weight.
    """
    if not segments:
        raise ValueError("a packed row needs at least one segment")
    for segment in segments:  # a shifted position would train silently on the wrong tokens
        target, where = segment.target, f"sample {segment.sample_id}"
        length = len(target.token_ids)
        for name, array_T in (("roles", target.roles_T), *target.weights.items()):
            if len(array_T) != length:
                raise AlignmentError(f"{where}: {len(array_T)} {name} for {length} target tokens")
        positions = np.concatenate([np.ravel(target.coord_pos_K), np.ravel(target.box_pos_M4)]).astype(np.int64)
        outside = positions[(positions < 0) | (positions >= length)]
        if outside.size:
            raise AlignmentError(
                f"{where}: supervised coordinate at target position {outside[0]} is outside the {length} assistant "
                "tokens (it would point into the prompt or the next sample); rebuild the target"
            )
        coord_T = target.weights.get("coord", np.zeros(length))
        unweighted = positions[coord_T[positions] == 0]
        if unweighted.size:
            raise AlignmentError(
                f"{where}: supervised coordinate at target position {unweighted[0]} is a token without a coord weight; "
                "rebuild the target"
            )
        if not np.array_equal(np.flatnonzero(coord_T), target.coord_pos_K):
            raise AlignmentError(
                f"{where}: {np.count_nonzero(coord_T)} tokens have a coord weight, but {len(target.coord_pos_K)} have "
                "a target bin, or not in this order; rebuild the target"
            )
    token_ids_L = np.concatenate(
        [np.asarray((*segment.prompt_token_ids, *segment.target.token_ids), dtype=np.int64) for segment in segments]
    )
    offsets = np.concatenate([[0], np.cumsum([segment.length for segment in segments])])
    return PackedRow(tuple(segments), token_ids_L, tuple(offsets.tolist()))
