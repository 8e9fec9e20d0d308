"""Where a window's segments come from: ground truth (stage 1), or the model's own answers (stage 2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from coordexp import distributed
from coordexp.coords import CoordVocab, FieldOrder
from coordexp.data.augment import LEFT_OUT
from coordexp.data.dataset import Sample
from coordexp.errors import AppendError
from coordexp.matching import MatchingConfig, match_objects
from coordexp.metrics import SampleOutcome, rollout_counters
from coordexp.modeling.inputs import check_prompt
from coordexp.parsing import parse_rollout
from coordexp.recording.writer import RolloutLog
from coordexp.records import MatchResult, ParsedRollout, Rollout, Segment
from coordexp.rollouts import RolloutBackend, RolloutRound, SeedContext, synced
from coordexp.targets import (
    SupervisionWeights,
    TargetPolicy,
    TransportConfig,
    build_gt_target,
    build_target,
    empty_target,
    is_closed,
)


class SegmentSource(Protocol):
    """Turns the window's samples into segments, micro-step by micro-step, and counts what happened."""

    def segments(
        self, micro_batches: Sequence[Sequence[Sample]], global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        """Segments of each micro-batch, in order, and what became of each sample whose answer was asked for. Adds to
        ``metrics``. A collective call where rollouts are made."""
        ...


@dataclass(frozen=True, slots=True)
class GroundTruthSource:
    """Stage 1: every answer is written from ground truth."""

    vocab: CoordVocab
    field_order: FieldOrder
    weights: SupervisionWeights = field(default_factory=SupervisionWeights)

    def segments(
        self, micro_batches: Sequence[Sequence[Sample]], global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        """Answers written from the annotations; no outcomes."""
        views = [sample.record.metadata.get(LEFT_OUT) for batch in micro_batches for sample in batch]
        if any(count is not None for count in views):
            metrics["train/augment_left_out_total"] = sum(count or 0 for count in views)
        return [[self._segment(sample) for sample in batch] for batch in micro_batches], []

    def _segment(self, sample: Sample) -> Segment:
        record = sample.record
        target = build_gt_target(
            record.objects,
            self.vocab,
            sample_id=record.sample_id,
            field_order=self.field_order,
            weights=self.weights,
        )
        return Segment(record.sample_id, sample.request.prompt_token_ids, target, sample.request.model_inputs)


@dataclass(frozen=True, slots=True)
class RolloutWindow:
    """What became of a window's samples, by micro-step and in their order.

    ``rollout_s``: from the first request to the last answer; ``build_s``: parsing, matching and building.
    ``report``, ``counted``: what the backend says of it.
    """

    by_round: list[list[SampleOutcome]]
    rollout_s: float
    build_s: float
    report: Mapping[str, Any] = field(default_factory=dict)
    counted: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Stage 2: the model answers, and is corrected on its own answer.

    The whole window is asked for at once. What is answered is parsed, matched and made a target by a second thread
    while the rest still decodes; the weights do not change meanwhile, so nothing of it is stale.
    """

    backend: RolloutBackend
    vocab: CoordVocab
    matching: MatchingConfig
    transport: TransportConfig
    field_order: FieldOrder
    training_seed: int
    decode_flag: str  # the 0/1 metric that names the decoding mode
    drop_unclosed: bool = False  # Channel-B: count an answer behind which nothing can be written, and train without it
    log: RolloutLog | None = None
    policy: TargetPolicy = field(default_factory=TargetPolicy)
    weights: SupervisionWeights = field(default_factory=SupervisionWeights)

    def segments(
        self, micro_batches: Sequence[Sequence[Sample]], global_step: int, metrics: MutableMapping[str, float]
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        """One round of rollouts for all micro-batches, then each answer parsed, matched and built."""
        started = time.perf_counter()
        with self.failing_together(global_step):
            with synced(self.backend, global_step):
                metrics["time/weight_sync_s"] = time.perf_counter() - started
                answered = self.answer(micro_batches, global_step)
            answered = self.reported(answered)
        metrics["time/rollout_wait_s"] = answered.rollout_s
        return self.learn_from(answered, micro_batches, global_step, metrics)

    def failing_together(self, global_step: int) -> AbstractContextManager[None]:
        """Raises on all ranks what one raises within it, where :meth:`learn_from` is a collective call in which the
        others would wait; does nothing elsewhere."""
        if self.policy.complete_above is None:
            return nullcontext()
        return distributed.raise_on_all_ranks(f"answers of step {global_step + 1}")

    def learn_from(
        self,
        answered: RolloutWindow,
        micro_batches: Sequence[Sequence[Sample]],
        global_step: int,
        metrics: MutableMapping[str, float],
    ) -> tuple[list[list[Segment]], list[SampleOutcome]]:
        """The segments of a window that is answered, and everything that the step says of its rollouts. A collective
        call with ``policy.complete_above``."""
        by_round: Sequence[Sequence[SampleOutcome]] = answered.by_round
        build_s = answered.build_s
        taken_as_complete = self._is_complete(micro_batches, by_round)
        started = time.perf_counter()
        if taken_as_complete:
            complete = replace(self, policy=self.policy.for_complete())
            by_round = _each(complete._as_complete, micro_batches, by_round)
            build_s += time.perf_counter() - started
        if self.log is not None:
            self.log.write(global_step, answered.report)
        outcomes = [outcome for one in by_round for outcome in one]
        metrics.update(rollout_counters(outcomes))
        metrics["rollout/repeat_terminate_active"] = 0  # unless the backend knows better
        metrics.update(answered.counted)
        metrics["time/rollout_s"] = answered.rollout_s
        metrics["time/target_build_s"] = build_s
        lengths = [len(outcome.rollout.response_token_ids) for outcome in outcomes]
        metrics["rollout/gen_new_tokens_p99"] = float(np.percentile(lengths, 99)) if lengths else 0.0
        oldest = min((outcome.rollout.weight_version for outcome in outcomes), default=global_step)
        metrics["rollout/staleness_steps"] = global_step - oldest
        metrics[self.decode_flag] = 1
        if self.drop_unclosed:
            metrics["stage2/closure_dropped_total"] = sum(not is_closed(outcome.target) for outcome in outcomes)
        segments = [
            [
                _segment(sample, outcome)
                for sample, outcome in zip(batch, one, strict=True)
                if is_closed(outcome.target) or not self.drop_unclosed
            ]
            for batch, one in zip(micro_batches, by_round, strict=True)
        ]
        return segments, outcomes

    def reported(self, answered: RolloutWindow) -> RolloutWindow:
        """With what the backend has to say of its last window, and has counted since it was last asked."""
        return replace(answered, report=self.backend.last_report(), counted=self.backend.take_metrics())

    def answer(self, micro_batches: Sequence[Sequence[Sample]], global_step: int) -> RolloutWindow:
        """Ask for the window of the step after ``global_step`` finished ones, with that step's seeds. No collective
        call, so any thread may make it.

        Raises: as :meth:`RolloutBackend.generate` and :meth:`outcome`.
        """
        started = time.perf_counter()
        rounds = [
            RolloutRound(
                tuple(sample.request for sample in batch),
                SeedContext(self.training_seed, global_step, micro_step, distributed.rank()),
            )
            for micro_step, batch in enumerate(micro_batches)
        ]
        pending: dict[tuple[int, int], Future[tuple[SampleOutcome, float]]] = {}
        with ThreadPoolExecutor(1, thread_name_prefix="targets") as builder:
            try:
                for answer in self.backend.generate_window(rounds):
                    place = (answer.round_idx, answer.index)
                    assert place not in pending, f"two answers to request {place}"
                    sample = micro_batches[answer.round_idx][answer.index]
                    pending[place] = builder.submit(self._timed_outcome, sample, answer.rollout)
                rollout_s = time.perf_counter() - started
                built = {place: future.result() for place, future in pending.items()}
            except BaseException:
                builder.shutdown(cancel_futures=True)  # the first failure ends the step: what waits is of no use
                raise
        by_round = [
            [built[round_idx, index][0] for index in range(len(batch))] for round_idx, batch in enumerate(micro_batches)
        ]
        return RolloutWindow(by_round, rollout_s, sum(seconds for _, seconds in built.values()))

    def _timed_outcome(self, sample: Sample, rollout: Rollout) -> tuple[SampleOutcome, float]:
        started = time.perf_counter()
        return self.outcome(sample, rollout), time.perf_counter() - started

    def outcome(self, sample: Sample, rollout: Rollout) -> SampleOutcome:
        """Check the prompt, parse, match, build.

        Raises:
            AlignmentError: the answer is to another prompt than the learner's. AppendError: nothing can be written
                behind the answer (with ``drop_unclosed`` its target is empty instead).
        """
        check_prompt(
            sample.record.sample_id,
            sample.request.prompt_token_ids,
            rollout.prompt_token_ids,
            self.vocab.decode,
        )
        parsed = parse_rollout(rollout.response_token_ids, self.vocab, ended=not rollout.truncated)
        match = match_objects(parsed.objects, sample.record.objects, self.matching)
        return self._targeted(sample, rollout, parsed, match)

    def _is_complete(
        self, micro_batches: Sequence[Sequence[Sample]], by_round: Sequence[Sequence[SampleOutcome]]
    ) -> bool:
        """Whether so many of the objects in all ranks' answers are annotated that annotations are taken as complete. A
        soft object is one that nobody annotated: what it matches speaks against it."""
        if self.policy.complete_above is None:
            return False
        annotated, written = 0, 0
        for batch, one in zip(micro_batches, by_round, strict=True):
            for sample, outcome in zip(batch, one, strict=True):
                written += len(outcome.parsed.objects)
                truth = sample.record.objects
                annotated += sum(truth[pair.gt_idx].soft is None for pair in outcome.match.pairs)
        annotated_everywhere, written_everywhere = distributed.all_reduce([annotated, written], "sum")
        return annotated_everywhere > 0 and annotated_everywhere / written_everywhere >= self.policy.complete_above

    def _as_complete(self, sample: Sample, outcome: SampleOutcome) -> SampleOutcome:
        """Its target again, by this source's policy: the one for annotations that lack nothing."""
        again = self._targeted(sample, outcome.rollout, outcome.parsed, outcome.match)
        return replace(again, taken_as_complete=True)

    def _targeted(self, sample: Sample, rollout: Rollout, parsed: ParsedRollout, match: MatchResult) -> SampleOutcome:
        try:
            target = build_target(
                parsed,
                match,
                sample.record.objects,
                self.vocab,
                sample_id=sample.record.sample_id,
                field_order=self.field_order,
                transport=self.transport,
                policy=self.policy,
                weights=self.weights,
            )
        except AppendError:
            if not self.drop_unclosed:
                raise
            target = empty_target(sample.record.sample_id)
        return SampleOutcome(rollout, parsed, match, target, self.policy)


def _each(
    again: Callable[[Sample, SampleOutcome], SampleOutcome],
    micro_batches: Sequence[Sequence[Sample]],
    by_round: Sequence[Sequence[SampleOutcome]],
) -> list[list[SampleOutcome]]:
    """``again`` of every sample of a window and what became of it."""
    return [
        [again(sample, outcome) for sample, outcome in zip(batch, one, strict=True)]
        for batch, one in zip(micro_batches, by_round, strict=True)
    ]


def _segment(sample: Sample, outcome: SampleOutcome) -> Segment:
    request = sample.request
    return Segment(sample.record.sample_id, request.prompt_token_ids, outcome.target, request.model_inputs)
