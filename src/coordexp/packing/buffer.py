"""The rank-local carry buffer: segments that wait, whole and in order, for a packed row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordexp.errors import CarryBufferOverflow, SegmentTooLong
from coordexp.packing.select import select_segments
from coordexp.records import Segment


class CarryBuffer:
    """First in, first guaranteed: :meth:`pop` always takes the oldest segment, and what fits best beside it."""

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
        """Queue segments behind those that wait: all of them, or on an error none.

        Raises:
            SegmentTooLong: one segment alone exceeds a row. CarryBufferOverflow: too many would wait.
        """
        self._check(segments, already=len(self._segments))
        self._segments.extend(segments)

    def pop(self) -> list[Segment]:
        """Take the segments of the next row out of the buffer, oldest first; the rest keeps its order.

        Raises:
            ValueError: the buffer is empty. MissingDependency: ``binpacking`` is not installed.
        """
        chosen = select_segments([segment.length for segment in self._segments], self.capacity)
        taken = [self._segments[index] for index in chosen]
        leaving = set(chosen)
        self._segments = [segment for index, segment in enumerate(self._segments) if index not in leaving]
        return taken

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep: ``{"segments": [Segment, …]}``, oldest first. Serialising is the caller's."""
        return {"segments": list(self._segments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the content by a saved one, under this buffer's own limits (same errors as :meth:`insert`)."""
        segments: Sequence[Segment] = state["segments"]
        self._check(segments, already=0)
        self._segments = list(segments)

    def _check(self, segments: Sequence[Segment], already: int) -> None:
        for segment in segments:
            if segment.length > self.capacity:
                raise SegmentTooLong(
                    f"sample {segment.sample_id}: {segment.length:,} tokens > global_max_length {self.capacity:,}; "
                    "raise global_max_length, lower rollout_matching.max_new_tokens, or set training.packing: false"
                )
        if already + len(segments) > self.max_segments:
            raise CarryBufferOverflow(
                f"{already:,} segments wait and {len(segments):,} more would exceed training.packing_buffer "
                f"{self.max_segments:,}; raise training.packing_buffer, lower training.per_device_train_batch_size, "
                "or raise global_max_length so that a row takes more segments"
            )
