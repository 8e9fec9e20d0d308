"""One optimizer step, prepared before its first forward pass.

A window is the raw micro-batches of one accumulation round. Rollouts come first, un-packed, for all of them; then each
micro-step parses, matches, builds its segments, queues them, and takes one packed row. Only then are the supervised
positions of the whole step counted, over all ranks, so that every loss term is normalised globally and exactly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coordexp import distributed
from coordexp.coords import CoordVocab, FieldOrder
from coordexp.data.dataset import Sample
from coordexp.matching import MatchingConfig, match_objects
from coordexp.metrics import SampleOutcome, rollout_counters
from coordexp.modeling.inputs import check_prompt
from coordexp.objective import SupervisionCounts
from coordexp.packing import CarryBuffer, build_row
from coordexp.parsing import parse_rollout
from coordexp.records import PackedRow, Rollout, Segment
from coordexp.rollouts import RolloutBackend, SeedContext
from coordexp.targets import TransportConfig, build_gt_target, build_target


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one optimizer step on this rank, the step's global counts, and this rank's metric sums."""

    rows: tuple[PackedRow, ...]
    counts: SupervisionCounts
    metrics: Mapping[str, float]
    outcomes: tuple[SampleOutcome, ...] = ()


class SegmentSource(Protocol):
    """Turns the window's samples into segments, micro-step by micro-step, and counts what happened."""

    def segments(
        self, micro_batches: Sequence[Sequence[Sample]], global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]: ...


@dataclass(frozen=True, slots=True)
class GroundTruthSource:
    """Stage 1: every answer is written from ground truth."""

    vocab: CoordVocab
    field_order: FieldOrder

    def segments(
        self, micro_batches: Sequence[Sequence[Sample]], global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        return [[self._segment(sample) for sample in batch] for batch in micro_batches], []

    def _segment(self, sample: Sample) -> Segment:
        record = sample.record
        target = build_gt_target(record.objects, self.vocab, sample_id=record.sample_id, field_order=self.field_order)
        return Segment(record.sample_id, sample.request.prompt_token_ids, target, sample.request.model_inputs)


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Stage 2: the model answers, and is corrected on its own answer. One round of rollouts per window."""

    backend: RolloutBackend
    vocab: CoordVocab
    matching: MatchingConfig
    transport: TransportConfig
    field_order: FieldOrder
    training_seed: int
    decode_flag: str  # the 0/1 metric that names the decoding mode

    def segments(
        self, micro_batches: Sequence[Sequence[Sample]], global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        started = time.perf_counter()
        self.backend.sync_weights(global_step)
        answered = [
            self.backend.generate(
                [sample.request for sample in batch],
                SeedContext(self.training_seed, global_step, micro_step, distributed.rank()),
            )
            for micro_step, batch in enumerate(micro_batches)
        ]
        generated = time.perf_counter()
        segments: list[list[Segment]] = []
        outcomes: list[SampleOutcome] = []
        for batch, rollouts in zip(micro_batches, answered, strict=True):
            new = [self._outcome(sample, rollout) for sample, rollout in zip(batch, rollouts, strict=True)]
            outcomes += new
            segments.append(
                [
                    Segment(
                        sample.record.sample_id,
                        sample.request.prompt_token_ids,
                        outcome.target,
                        sample.request.model_inputs,
                    )
                    for sample, outcome in zip(batch, new, strict=True)
                ]
            )
        metrics.update(rollout_counters(outcomes))
        lengths = [len(outcome.rollout.response_token_ids) for outcome in outcomes]
        metrics["rollout/gen_new_tokens_p99"] = float(np.percentile(lengths, 99)) if lengths else 0.0
        metrics[self.decode_flag] = 1
        metrics["time/rollout_generate_s"] = generated - started
        metrics["time/target_build_s"] = time.perf_counter() - generated
        return segments, outcomes

    def _outcome(self, sample: Sample, rollout: Rollout) -> SampleOutcome:
        check_prompt(
            sample.record.sample_id,
            sample.request.prompt_token_ids,
            rollout.prompt_token_ids,
            self.vocab.decode,
        )
        parsed = parse_rollout(rollout.response_token_ids, self.vocab, ended=not rollout.truncated)
        match = match_objects(parsed.objects, sample.record.objects, self.matching)
        target = build_target(
            parsed,
            match,
            sample.record.objects,
            self.vocab,
            sample_id=sample.record.sample_id,
            field_order=self.field_order,
            transport=self.transport,
        )
        return SampleOutcome(rollout, parsed, match, target)


class WindowBuilder:
    """Raw micro-batches → the rows of one optimizer step.

    With a carry buffer each micro-step takes one packed row and the rest waits; without one (``training.packing:
    false``) a micro-step's segments are laid in a row of their own, however long.
    """

    def __init__(
        self,
        source: SegmentSource,
        buffer: CarryBuffer | None,
        warn: Callable[[str], None],
        min_fill_ratio: float,
    ) -> None:
        self.buffer = buffer
        self._source = source
        self._warn = warn
        self._min_fill_ratio = min_fill_ratio

    def prepare(self, micro_batches: Sequence[Sequence[Sample]], global_step: int) -> Window:
        """Everything an optimizer step needs but its forward passes. A collective call: all ranks make it together.

        Raises:
            AlignmentError, SegmentTooLong, CarryBufferOverflow, RolloutError: nothing has been trained on yet.
        """
        metrics: defaultdict[str, float] = defaultdict(float)
        segments, outcomes = self._source.segments(micro_batches, global_step, metrics)
        started = time.perf_counter()
        rows = tuple(build_row(self._select(new, metrics)) for new in segments)
        local = SupervisionCounts.of(segment.target for row in rows for segment in row.segments)
        counts = SupervisionCounts(*(int(n) for n in distributed.all_reduce(local.as_tuple(), "sum")))
        metrics["time/pack_s"] = time.perf_counter() - started
        metrics["train/samples_total"] = sum(len(batch) for batch in micro_batches)
        metrics["train/tokens_total"] = sum(row.length for row in rows)
        metrics["packing/segments_total"] = sum(len(row.segments) for row in rows)
        return Window(rows, counts, metrics, tuple(outcomes))

    def _select(self, new: Sequence[Segment], metrics: MutableMapping[str, float]) -> Sequence[Segment]:
        if self.buffer is None:
            return new
        self.buffer.insert(*new)
        chosen = self.buffer.pop()
        taken = sum(segment.length for segment in chosen)
        metrics["packing/selected_tokens_total"] += taken
        metrics["packing/capacity_tokens_total"] += self.buffer.capacity
        metrics["packing/buffer_segments"] = len(self.buffer)
        if taken < self._min_fill_ratio * self.buffer.capacity:
            metrics["packing/underfilled_rows_total"] += 1
            self._warn(
                f"a packed row is filled to {taken / self.buffer.capacity:.2f} of global_max_length, below "
                f"training.packing_min_fill_ratio {self._min_fill_ratio}; raise per_device_train_batch_size or lower "
                "global_max_length"
            )
        return chosen
