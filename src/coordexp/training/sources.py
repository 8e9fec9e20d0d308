"""Where a window's segments come from: ground truth (stage 1), or the model's own answers (stage 2)."""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coordexp import distributed
from coordexp.coords import CoordVocab, FieldOrder
from coordexp.data.dataset import Sample
from coordexp.matching import MatchingConfig, match_objects
from coordexp.metrics import SampleOutcome, rollout_counters
from coordexp.modeling.inputs import check_prompt
from coordexp.parsing import parse_rollout
from coordexp.records import Rollout, Segment
from coordexp.rollouts import RolloutBackend, SeedContext
from coordexp.targets import TransportConfig, build_gt_target, build_target


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
