"""Two channels in one run: each optimizer step is Channel-A or Channel-B, as the schedule says.

* **Channel-A** reads the ground truth and needs no rollout. Its segments wait in a carry buffer like stage 1's: they
  are written from ground truth, so waiting, also through Channel-B steps, does not age them.
* **Channel-B** takes every raw sample of the step through rollout, match and target, and trains on all of them in the
  same step, on as many packed rows as they need. Nothing is carried: the next Channel-B step has other weights.

Its rows all belong to the step's last micro-step, so that gradients are synchronised once, behind the last row.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from coordexp import distributed
from coordexp.config.objective import Channel
from coordexp.data.dataset import Sample
from coordexp.packing import CarryBuffer
from coordexp.records import Segment
from coordexp.targets import empty_target
from coordexp.training.sources import SegmentSource
from coordexp.training.window import Rows, Window, WindowBuilder, count_fill


@dataclass(frozen=True, slots=True)
class ChannelSchedule:
    """The two-channel schedule of a run; ``b_ratio`` is exact."""

    b_ratio: Fraction

    @classmethod
    def from_ratio(cls, b_ratio: float) -> ChannelSchedule:
        """The ratio as it was written in YAML.

        The shortest decimal that reads back as the same float is the one that was typed (up to 15 digits), and it is
        what counts. The float itself would not do: 0.29 is stored a little below, ``100 * 0.29`` gives
        28.999999999999996, and a step that was due is lost; which products round up and which down is an accident.
        A ratio that no decimal writes is the decimal that was typed: 0.333 is 333 steps of 1000.

        Raises:
            ValueError: not in [0, 1].
        """
        ratio = Fraction(repr(float(b_ratio)))
        if not 0 <= ratio <= 1:
            raise ValueError(f"b_ratio {b_ratio} is no share of steps; it lies between 0 (Channel-A only) and 1")
        return cls(ratio)

    def channel(self, step: int) -> Channel:
        """The channel of the optimizer step that is taken after ``step`` steps."""
        return "B" if self.b_steps_before(step + 1) > self.b_steps_before(step) else "A"

    def b_steps_before(self, step: int) -> int:
        """How many of the steps 0 … step − 1 are Channel-B: ⌊step · b⌋, in whole numbers."""
        return step * self.b_ratio.numerator // self.b_ratio.denominator

    def realised(self, step: int) -> float:
        """The share of Channel-B among the steps 0 … step."""
        return self.b_steps_before(step + 1) / (step + 1)


class DrainingBuilder(WindowBuilder):
    """Channel-B's windows: every segment of the step in the step, and equally many rows on every rank."""

    def __init__(self, source: SegmentSource, capacity: int | None, min_fill_ratio: float) -> None:
        """``capacity``: tokens a row; None lays each micro-step's samples in a row of their own."""
        super().__init__(source, None, min_fill_ratio)
        self._capacity = capacity

    def _lay_out(self, segments: Sequence[Sequence[Segment]], metrics: MutableMapping[str, float]) -> Rows:
        before_the_last: Rows = [[] for _ in segments[1:]]
        if self._capacity is None:
            return [*before_the_last, [new for new in segments if new]]
        waiting = [segment for new in segments for segment in new]
        buffer = CarryBuffer(self._capacity, max(1, len(waiting)))
        buffer.insert(*waiting)
        rows: list[Sequence[Segment]] = []
        while len(buffer):
            rows.append(buffer.pop())
            count_fill(rows[-1], self._capacity, self._min_fill_ratio, metrics)
        return [*before_the_last, rows]

    def _pad(self, rows: Rows, micro_batches: Sequence[Sequence[Sample]], metrics: MutableMapping[str, float]) -> Rows:
        """A rank with fewer rows than another, or none, goes through blank ones: every forward and every gradient
        exchange of one rank has its counterpart on the others."""
        (most,) = distributed.all_reduce([len(rows[-1])], "max")
        missing = max(1, int(most)) - len(rows[-1])
        if missing:
            blank = blank_segment(min((sample for batch in micro_batches for sample in batch), key=_prompt_length))
            metrics["packing/blank_rows_total"] += missing
            # First, so that the row behind which gradients are exchanged is a real one where there is any.
            rows = [*rows[:-1], [*[[blank]] * missing, *rows[-1]]]
        return rows


def blank_segment(sample: Sample) -> Segment:
    """A prompt without an answer: its row runs through every weight and supervises nothing."""
    return Segment(
        sample.record.sample_id,
        sample.request.prompt_token_ids,
        empty_target(sample.record.sample_id),
        sample.request.model_inputs,
    )


@dataclass(frozen=True, slots=True)
class TwoChannelBuilder:
    """One window builder a channel, and the schedule that chooses between them."""

    schedule: ChannelSchedule
    channel_a: WindowBuilder
    channel_b: WindowBuilder

    @property
    def buffer(self) -> CarryBuffer | None:
        """What a checkpoint must keep: Channel-A's waiting segments. Channel-B has none between steps."""
        return self.channel_a.buffer

    def prepare(self, micro_batches: Sequence[Sequence[Sample]], global_step: int) -> Window:
        """As :meth:`WindowBuilder.prepare`, by the channel of ``global_step`` for the whole window."""
        channel = self.schedule.channel(global_step)
        builder = self.channel_b if channel == "B" else self.channel_a
        window = builder.prepare(micro_batches, global_step)
        metrics = {
            **window.metrics,
            "stage2/channel_a": int(channel == "A"),
            "stage2/channel_b": int(channel == "B"),
            "stage2/b_ratio_realised": self.schedule.realised(global_step),
        }
        if self.buffer is not None:
            metrics["packing/buffer_segments"] = len(self.buffer)
        return replace(window, channel=channel, metrics=metrics)


def _prompt_length(sample: Sample) -> int:
    return len(sample.request.prompt_token_ids)
