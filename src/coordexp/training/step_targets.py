"""A step's answers → targets → segments, and the counts of what happened to them. No gradient, no model."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordexp import distributed
from coordexp.coords import CoordVocab, FieldOrder
from coordexp.data.augment import LEFT_OUT
from coordexp.errors import AppendError
from coordexp.metrics import rollout_counters
from coordexp.records import Segment, TrainingTarget
from coordexp.targets import (
    SampleOutcome,
    SupervisionWeights,
    TargetPolicy,
    TransportConfig,
    build_gt_target,
    build_target,
    empty_target,
    is_closed,
)
from coordexp.training.batches import MicroBatches, Sample
from coordexp.training.rollout_queue import MatchedAnswer


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How targets are written. ``weights``: which of their tokens each loss term trains on. ``drop_unclosed``: an
    answer after which nothing can be appended is counted and left out of training (Channel-B), instead of ending the
    run."""

    vocab: CoordVocab
    field_order: FieldOrder
    transport: TransportConfig
    policy: TargetPolicy
    weights: SupervisionWeights = field(default_factory=SupervisionWeights)
    drop_unclosed: bool = False


def ground_truth_segments(
    samples: MicroBatches, options: TargetOptions, metrics: MutableMapping[str, float]
) -> list[list[Segment]]:
    """Answers written from the annotations: stage 1 and Channel-A."""
    left_out = [sample.record.metadata.get(LEFT_OUT) for batch in samples for sample in batch]
    if any(count is not None for count in left_out):
        metrics["train/augment_left_out_total"] = sum(count or 0 for count in left_out)
    return [[_segment(sample, ground_truth_target(sample, options)) for sample in batch] for batch in samples]


def ground_truth_target(sample: Sample, options: TargetOptions) -> TrainingTarget:
    """The whole answer, as annotated."""
    record = sample.record
    return build_gt_target(
        record.objects,
        options.vocab,
        sample_id=record.sample_id,
        field_order=options.field_order,
        weights=options.weights,
    )


def decide_policy(policy: TargetPolicy, answers: Sequence[MatchedAnswer]) -> tuple[TargetPolicy, bool]:
    """The step's target policy, and whether annotations are taken as complete.

    With ``complete_above`` they are if at least that share of all predicted objects, on all ranks, matches an
    annotation; then unmatched objects are wrong rather than unannotated. An object of soft ground truth, which nobody
    annotated, does not count as a match. A collective call with ``complete_above``, on all ranks alike.
    """
    if policy.complete_above is None:
        return policy, False
    predicted = sum(len(answer.parsed.objects) for answer in answers)
    annotated = sum(
        answer.sample.record.objects[pair.gt_idx].soft is None for answer in answers for pair in answer.match.pairs
    )
    annotated_in_all, predicted_in_all = distributed.all_reduce([annotated, predicted], "sum")
    is_complete = annotated_in_all > 0 and annotated_in_all / predicted_in_all >= policy.complete_above
    return (policy.for_complete(), True) if is_complete else (policy, False)


def corrected(answer: MatchedAnswer, options: TargetOptions, policy: TargetPolicy, complete: bool) -> SampleOutcome:
    """The answer with its target: correct what it found, append what it missed.

    Raises:
        AppendError: nothing can be appended to the answer (with ``drop_unclosed`` its target is empty instead).
    """
    record = answer.sample.record
    try:
        target = build_target(
            answer.parsed,
            answer.match,
            record.objects,
            options.vocab,
            sample_id=record.sample_id,
            field_order=options.field_order,
            transport=options.transport,
            policy=policy,
            weights=options.weights,
        )
    except AppendError:
        if not options.drop_unclosed:
            raise
        target = empty_target(record.sample_id)
    return SampleOutcome(answer.rollout, answer.parsed, answer.match, target, policy, taken_as_complete=complete)


def rollout_segments(
    samples: MicroBatches,
    outcomes: Sequence[SampleOutcome],
    options: TargetOptions,
    metrics: MutableMapping[str, float],
) -> list[list[Segment]]:
    """Segments by micro-step; ``outcomes`` in the order of ``samples``."""
    remaining = iter(outcomes)
    segments, dropped = [], 0
    for batch in samples:
        kept = []
        for sample in batch:
            target = next(remaining).target
            if options.drop_unclosed and not is_closed(target):
                dropped += 1
            else:
                kept.append(_segment(sample, target))
        segments.append(kept)
    if options.drop_unclosed:
        metrics["stage2/closure_dropped_total"] = dropped
    return segments


def rollout_metrics(outcomes: Sequence[SampleOutcome], counted: Mapping[str, float], step: int) -> dict[str, float]:
    """Counts of the step's answers. ``counted``: what the backend counted."""
    lengths = [len(outcome.rollout.response_token_ids) for outcome in outcomes]
    oldest = min((outcome.rollout.weight_version for outcome in outcomes), default=step)
    return {
        **rollout_counters(outcomes),
        "rollout/repeat_terminate_active": 0,  # unless the backend counted otherwise
        **counted,
        "rollout/gen_new_tokens_p99": float(np.percentile(lengths, 99)) if lengths else 0.0,
        "rollout/staleness_steps": step - oldest,
    }


def _segment(sample: Sample, target: TrainingTarget) -> Segment:
    request = sample.request
    return Segment(sample.record.sample_id, request.prompt_token_ids, target, request.model_inputs)
