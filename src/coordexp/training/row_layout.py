"""Which segments of an optimizer step share a packed row, and which wait for a later step."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

from coordexp.data.dataset import Sample
from coordexp.packing import CarryBuffer, build_row
from coordexp.records import PackedRow, Segment
from coordexp.targets import empty_target

logger = logging.getLogger("coordexp")


class RowLayout:
    """Segments by micro-step → the rows of one optimizer step.

    * With a carry buffer each micro-step takes one packed row, and what does not fit waits.
    * ``drain`` (Channel-B) takes all segments in their own step, in as many rows as they need: the next rollouts come
      from other weights.
    * Without ``capacity`` (``training.packing: false``) each micro-step's segments form one row, however long.
    """

    def __init__(
        self, buffer: CarryBuffer | None, *, capacity: int | None, drain: bool = False, min_fill_ratio: float = 0.0
    ) -> None:
        self.buffer = buffer
        self.drain = drain
        self._capacity = capacity
        self._min_fill_ratio = min_fill_ratio
        self._warned_of_fill = self._warned_of_overflow = False  # once a run; metrics count the rest
        self._first_waiting: tuple[int, int] | None = None  # (finished steps, waiting segments) when first seen

    def __call__(
        self, segments: Sequence[Sequence[Segment]], step: int, metrics: MutableMapping[str, float]
    ) -> list[PackedRow]:
        """The rows of the step after ``step`` finished ones, in the order in which they are trained on.

        Raises:
            AlignmentError, SegmentTooLong, CarryBufferOverflow.
        """
        if self._capacity is None:
            chosen = [new for new in segments if new or not self.drain]
        elif self.drain:
            everything = [segment for new in segments for segment in new]
            buffer = CarryBuffer(self._capacity, max(1, len(everything)))
            buffer.insert(*everything)
            chosen = []
            while len(buffer):
                chosen.append(self._counted(buffer.pop(), metrics))
        else:
            assert self.buffer is not None, "packing without a carry buffer"
            chosen = []
            for new in segments:
                self.buffer.insert(*new)
                chosen.append(self._counted(self.buffer.pop(), metrics))
            self._foresee_overflow(self.buffer, step)
        return [build_row(one) for one in chosen]

    def _counted(self, chosen: Sequence[Segment], metrics: MutableMapping[str, float]) -> Sequence[Segment]:
        assert self._capacity is not None
        taken = sum(segment.length for segment in chosen)
        metrics["packing/selected_tokens_total"] += taken
        metrics["packing/capacity_tokens_total"] += self._capacity
        if taken < self._min_fill_ratio * self._capacity:
            metrics["packing/underfilled_rows_total"] += 1
            if not (self._warned_of_fill or self.drain):
                self._warned_of_fill = True
                logger.warning(
                    "a packed row is filled to %.2f of global_max_length, below training.packing_min_fill_ratio %s; "
                    "raise per_device_train_batch_size or lower global_max_length",
                    taken / self._capacity,
                    self._min_fill_ratio,
                )
        return chosen

    def _foresee_overflow(self, buffer: CarryBuffer, step: int) -> None:
        """Warn once when the buffer is half full and filling, long before :class:`CarryBufferOverflow` ends the run."""
        waiting, most = len(buffer), buffer.max_segments
        if self._first_waiting is None:
            self._first_waiting = (step, waiting)
        since, before = self._first_waiting
        if self._warned_of_overflow or waiting <= before or 2 * waiting <= most:
            return
        self._warned_of_overflow = True
        steps = max(1, round((most - waiting) * (step - since) / (waiting - before)))
        logger.warning(
            "%s segments wait for a row, of %s that training.packing_buffer allows: micro-steps bring more than rows "
            "take, and training ends in about %s steps; raise global_max_length or training.packing_buffer, or lower "
            "per_device_train_batch_size",
            f"{waiting:,}",
            f"{most:,}",
            f"{steps:,}",
        )


def blank_row(batches: Sequence[Sequence[Sample]]) -> PackedRow:
    """The step's shortest prompt without an answer. It runs through every weight and supervises nothing: a rank with
    fewer rows than another goes through it, so that each gradient exchange has its counterpart on every rank."""
    sample = min((sample for batch in batches for sample in batch), key=lambda one: len(one.request.prompt_token_ids))
    request, sample_id = sample.request, sample.record.sample_id
    return build_row([Segment(sample_id, request.prompt_token_ids, empty_target(sample_id), request.model_inputs)])
