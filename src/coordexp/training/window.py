"""One optimizer step, prepared before its first forward pass.

A window is the raw micro-batches of one accumulation round. Rollouts come first, un-packed, for all of them; then each
micro-step parses, matches, builds its segments, queues them, and takes one packed row. Only then are the supervised
positions of the whole step counted, over all ranks, so that every loss term is normalised globally and exactly.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from coordexp import distributed
from coordexp.config.objective import Channel
from coordexp.data.dataset import Sample
from coordexp.metrics import SampleOutcome
from coordexp.packing import CarryBuffer, build_row
from coordexp.records import PackedRow, Segment
from coordexp.targets import count_terms
from coordexp.training.sources import SegmentSource

logger = logging.getLogger("coordexp")
Rows = list[list[Sequence[Segment]]]  # by micro-step: the segments of each row


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one optimizer step on this rank, by micro-step; the positions of each loss term in the
    whole step, and this rank's metric sums. ``channel`` is the two-channel schedule's, None in every other training."""

    micro_steps: tuple[tuple[PackedRow, ...], ...]
    totals: Mapping[str, int]
    metrics: Mapping[str, float]
    outcomes: tuple[SampleOutcome, ...] = ()
    channel: Channel | None = None

    @property
    def rows(self) -> tuple[PackedRow, ...]:
        """All rows, in the order in which they are trained on."""
        return tuple(row for rows in self.micro_steps for row in rows)


class WindowBuilder:
    """Raw micro-batches → the rows of one optimizer step.

    With a carry buffer each micro-step takes one packed row and the rest waits; without one (``training.packing:
    false``) a micro-step's segments are laid in a row of their own, however long.
    """

    def __init__(
        self,
        source: SegmentSource,
        buffer: CarryBuffer | None,
        min_fill_ratio: float,
    ) -> None:
        self.buffer = buffer
        self._source = source
        self._warned = False  # once a run; the metric counts the rest
        self._first_waiting: tuple[int, int] | None = None  # finished steps, segments: how fast the buffer fills
        self._warned_of_overflow = False
        self._min_fill_ratio = min_fill_ratio

    def prepare(self, micro_batches: Sequence[Sequence[Sample]], global_step: int) -> Window:
        """Everything an optimizer step needs but its forward passes. A collective call: all ranks make it together.

        Raises:
            AlignmentError, AppendError, SegmentTooLong, CarryBufferOverflow, RolloutError: nothing has been trained on
                yet, but the carry buffer may have given rows away; :meth:`CarryBuffer.load_state_dict` restores it.
        """
        metrics: defaultdict[str, float] = defaultdict(float)
        with distributed.raise_on_all_ranks(f"rollouts of step {global_step + 1}"):
            segments, outcomes = self._source.segments(micro_batches, global_step, metrics)
        started = time.perf_counter()
        with distributed.raise_on_all_ranks(f"packing of step {global_step + 1}"):
            laid_out = self._lay_out(segments, metrics)
        self._foresee_overflow(global_step)
        padded = self._pad(laid_out, micro_batches, metrics)
        with distributed.raise_on_all_ranks(
            f"rows of step {global_step + 1}"
        ):  # before the next collective call: see raise_on_all_ranks
            micro_steps = tuple(tuple(build_row(chosen) for chosen in rows) for rows in padded)
            rows = [row for one in micro_steps for row in one]
            local = count_terms(segment.target for row in rows for segment in row.segments)
        summed = distributed.all_reduce(tuple(local.values()), "sum")
        totals = {term: int(total) for term, total in zip(local, summed, strict=True)}
        metrics["time/pack_s"] = time.perf_counter() - started
        metrics["train/samples_total"] = sum(len(batch) for batch in micro_batches)
        metrics["train/tokens_total"] = sum(row.length for row in rows)
        metrics["packing/segments_total"] = sum(len(row.segments) for row in rows)
        return Window(micro_steps, totals, metrics, tuple(outcomes))

    def _foresee_overflow(self, global_step: int) -> None:
        """Warn once when the buffer is half full and filling, long before :class:`CarryBufferOverflow` ends the run."""
        if self.buffer is None or self._warned_of_overflow:
            return
        waiting, most = len(self.buffer), self.buffer.max_segments
        if self._first_waiting is None:
            self._first_waiting = (global_step, waiting)
        since, before = self._first_waiting
        if waiting <= before or 2 * waiting <= most:
            return
        self._warned_of_overflow = True
        steps = max(1, round((most - waiting) * (global_step - since) / (waiting - before)))
        logger.warning(
            "%s segments wait for a row, of %s that training.packing_buffer allows: micro-steps bring more than rows "
            "take, and training ends in about %s steps; raise global_max_length or training.packing_buffer, or lower "
            "per_device_train_batch_size",
            f"{waiting:,}",
            f"{most:,}",
            f"{steps:,}",
        )

    def _lay_out(self, segments: Sequence[Sequence[Segment]], metrics: MutableMapping[str, float]) -> Rows:
        """Each micro-step's new segments → the segments of its rows: here one row a micro-step."""
        return [[self._select(new, metrics)] for new in segments]

    def _pad(self, rows: Rows, micro_batches: Sequence[Sequence[Sample]], metrics: MutableMapping[str, float]) -> Rows:
        """Give every rank equally many rows: here they have one a micro-step. May be a collective call."""
        return rows

    def _select(self, new: Sequence[Segment], metrics: MutableMapping[str, float]) -> Sequence[Segment]:
        if self.buffer is None:
            return new
        self.buffer.insert(*new)
        chosen = self.buffer.pop()
        metrics["packing/buffer_segments"] = len(self.buffer)
        fill = count_fill(chosen, self.buffer.capacity, self._min_fill_ratio, metrics)
        if fill < self._min_fill_ratio and not self._warned:
            self._warned = True
            logger.warning(
                "a packed row is filled to %.2f of global_max_length, below training.packing_min_fill_ratio %s; raise "
                "per_device_train_batch_size or lower global_max_length",
                fill,
                self._min_fill_ratio,
            )
        return chosen


def count_fill(
    chosen: Sequence[Segment], capacity: int, min_fill_ratio: float, metrics: MutableMapping[str, float]
) -> float:
    """Count one packed row. Returns: the share of ``capacity`` that it fills."""
    taken = sum(segment.length for segment in chosen)
    metrics["packing/selected_tokens_total"] += taken
    metrics["packing/capacity_tokens_total"] += capacity
    if taken < min_fill_ratio * capacity:
        metrics["packing/underfilled_rows_total"] += 1
    return taken / capacity
