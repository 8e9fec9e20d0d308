"""The model's own answers to a step's samples: requested, parsed, matched and corrected.

With ``rollout_matching.rollouts_ahead: 1`` the :class:`RolloutQueue` holds the answers of one step. Step s, counted
from 0, takes what step s - 1 requested, pushes the weights it begins with, and requests the answers of step s + 1;
rollout servers answer while the step trains. Every answer is then one step old, however fast either side is. Only the
first step of a run, and one whose answers its checkpoint lacks, requests its own.

A thread sends requests and listens; the main thread does all that ranks do together (pushes, errors, saves).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coordexp import distributed
from coordexp.background import in_background
from coordexp.coords import CoordVocab, FieldOrder
from coordexp.data.dataset import Sample
from coordexp.errors import AppendError, CheckpointError
from coordexp.matching import MatchingConfig, match_objects
from coordexp.metrics import rollout_counters
from coordexp.modeling.inputs import check_prompt
from coordexp.out_of_memory import phase
from coordexp.parsing import parse_rollout
from coordexp.records import MatchResult, ParsedRollout, Rollout, TrainingTarget
from coordexp.rollouts import RolloutBackend, RolloutRound, SeedContext, rollout_session
from coordexp.targets import (
    SampleOutcome,
    SupervisionWeights,
    TargetPolicy,
    TransportConfig,
    build_gt_target,
    build_target,
    count_mixed_kind,
    empty_target,
)
from coordexp.training.batches import MicroBatches


@dataclass(frozen=True, slots=True)
class MatchedAnswer:
    """A sample's answer, parsed and matched. Its target is built once the step's policy is known."""

    sample: Sample
    rollout: Rollout
    parsed: ParsedRollout
    match: MatchResult


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """Rollout → :class:`MatchedAnswer`. Pure, so any thread may call it."""

    vocab: CoordVocab
    matching: MatchingConfig

    def __call__(self, sample: Sample, rollout: Rollout) -> MatchedAnswer:
        """Check the prompt, parse, match. Raises AlignmentError if the answer has other prompt tokens."""
        request = sample.request
        check_prompt(sample.record.sample_id, request.prompt_token_ids, rollout.prompt_token_ids, self.vocab.decode)
        parsed = parse_rollout(rollout.response_token_ids, self.vocab, ended=not rollout.truncated)
        return MatchedAnswer(
            sample, rollout, parsed, match_objects(parsed.objects, sample.record.objects, self.matching)
        )


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How targets are written. ``weights``: which of their tokens each loss term trains on. ``drop_unclosed``: an
    answer to which nothing can be appended gets an empty target (Channel-B), instead of ending the run."""

    vocab: CoordVocab
    field_order: FieldOrder
    transport: TransportConfig
    policy: TargetPolicy
    weights: SupervisionWeights = field(default_factory=SupervisionWeights)
    drop_unclosed: bool = False

    def ground_truth(self, sample: Sample) -> TrainingTarget:
        """The whole answer, as annotated: stage 1 and Channel-A."""
        record = sample.record
        return build_gt_target(
            record.objects,
            self.vocab,
            sample_id=record.sample_id,
            field_order=self.field_order,
            weights=self.weights,
        )

    def corrected(self, answer: MatchedAnswer, policy: TargetPolicy, complete: bool) -> SampleOutcome:
        """Build the target: found objects corrected, missed ones appended. Raises AppendError if that is impossible."""
        record = answer.sample.record
        try:
            target = build_target(
                answer.parsed,
                answer.match,
                record.objects,
                self.vocab,
                sample_id=record.sample_id,
                field_order=self.field_order,
                transport=self.transport,
                policy=policy,
                weights=self.weights,
            )
        except AppendError:
            if not self.drop_unclosed:
                raise
            target = empty_target(record.sample_id)  # the sample trains nothing in this step
        mixed = count_mixed_kind(answer.parsed, answer.match, record.objects)
        return SampleOutcome(answer.rollout, answer.parsed, answer.match, target, policy, complete, mixed)


def decide_policy(policy: TargetPolicy, answers: Sequence[MatchedAnswer]) -> tuple[TargetPolicy, bool]:
    """The step's target policy, and whether annotations count as complete.

    With ``complete_above`` they are, if at least that share of the predicted objects of all ranks matches an
    annotation. Unmatched predictions then count as wrong instead of unannotated. A match with soft ground truth, which
    is not an annotation, does not count. A collective call with ``complete_above``.
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


def rollout_metrics(outcomes: Sequence[SampleOutcome], counted: Mapping[str, float], step: int) -> dict[str, float]:
    """Metrics of the step's answers. ``counted``: the backend's metrics."""
    lengths = [len(outcome.rollout.response_token_ids) for outcome in outcomes]
    oldest = min((outcome.rollout.weight_version for outcome in outcomes), default=step)
    return {
        **rollout_counters(outcomes),
        "rollout/repeat_terminate_active": 0,  # unless the backend counted otherwise
        **counted,
        "rollout/gen_new_tokens_p99": float(np.percentile(lengths, 99)) if lengths else 0.0,
        "rollout/staleness_steps": step - oldest,
    }


@dataclass(frozen=True, slots=True)
class StepAnswers:
    """All answers of one step on this rank.

    ``by_micro_step``: in the order of the samples. ``rollout_s``: from the first request to the last answer.
    ``read_s``: seconds of parsing and matching. ``report``, ``counted``: the backend's log entry and metrics.
    """

    by_micro_step: Sequence[Sequence[MatchedAnswer]]
    rollout_s: float
    read_s: float
    report: Mapping[str, Any] = field(default_factory=dict)
    counted: Mapping[str, float] = field(default_factory=dict)

    @property
    def all(self) -> list[MatchedAnswer]:
        """The answers of all micro-steps, in order."""
        return [answer for answers in self.by_micro_step for answer in answers]


@dataclass(frozen=True, slots=True, eq=False)
class PendingAnswers:
    """Requested answers: in progress, received, or failed."""

    step: int
    version: int
    future: Future[StepAnswers]


@dataclass(frozen=True, slots=True)
class SavedAnswers:
    """The queue's answers on this rank, as stored in a checkpoint. ``rounds``: rollouts by micro-step, in order.

    ``step``: the step that trains on them, counted from 0. ``version``: of the weights that wrote them.
    """

    step: int
    version: int
    rounds: tuple[tuple[Rollout, ...], ...]
    rollout_s: float
    report: Mapping[str, Any]
    counted: Mapping[str, float]

    def __post_init__(self) -> None:
        versions = {rollout.weight_version for one in self.rounds for rollout in one}
        if versions - {self.version}:
            raise ValueError(f"answers have weight versions {sorted(versions)}; all must have version {self.version}")


@dataclass(eq=False)
class RolloutQueue:
    """Requests answers, and with ``ahead`` holds those of the next step.

    ``content``: the answers of the next step; assign it to undo a step or to restore a checkpoint.
    ``decode_metric``: the 0/1 metric that names the decoding mode."""

    backend: RolloutBackend
    read: AnswerReader
    training_seed: int
    ahead: bool = False
    decode_metric: str = "rollout/decode_greedy"
    content: PendingAnswers | SavedAnswers | None = None
    _pushed_at: int | None = None  # the step that pushed its weights for its own answers

    def take(self, batches: MicroBatches, step: int, metrics: MutableMapping[str, float]) -> StepAnswers:
        """Return the answers of step ``step``, counted from 0. A collective call; adds to ``metrics``. All ranks raise
        the first error of any rank: RolloutError of the backend, AlignmentError, CheckpointError if saved answers are
        for other samples."""
        content, self.content = self.content, None
        where = f"rollouts of step {step + 1}"
        with phase("rollouts", f"the {where}"), distributed.raise_on_all_ranks(where):
            started = time.perf_counter()
            if content is None:
                self._pushed_at = step
                with rollout_session(self.backend, step):
                    metrics["time/weight_sync_s"] = time.perf_counter() - started
                    answers = self._request(batches, step)
                answers = self._with_report(answers)
                metrics["time/rollout_wait_s"] = answers.rollout_s
            else:
                assert (content.step, content.version) == (step, step - 1), "answers of another step"
                if isinstance(content, PendingAnswers):
                    answers = content.future.result()
                else:
                    answers = self._from_saved(content, batches)
                metrics["time/rollout_wait_s"] = time.perf_counter() - started
        metrics[self.decode_metric] = 1
        return answers

    def submit(self, batches: MicroBatches, step: int, metrics: MutableMapping[str, float]) -> None:
        """Push the weights with which step ``step`` (counted from 0) begins, and request the answers of step ``step`` +
        1 for ``batches``. A collective call; adds to ``metrics``. Raises RolloutError if the push fails."""
        assert self.content is None, "answers that no step took"
        if self._pushed_at != step:
            started = time.perf_counter()
            with phase("rollouts", f"the push of weights in step {step + 1}"):
                self.backend.sync_weights(step)
            metrics["time/weight_sync_s"] = time.perf_counter() - started
        future = in_background(
            lambda: self._with_report(self._request(batches, step + 1)), name="rollouts one step ahead"
        )
        self.content = PendingAnswers(step + 1, step, future)

    def wait(self) -> None:
        """Wait until no request is in progress. Call it before a weight push or a checkpoint. Each request has its own
        timeout. :meth:`take` raises errors, in the step that needs the answers."""
        if isinstance(self.content, PendingAnswers):
            wait([self.content.future])

    def saved(self) -> SavedAnswers | None:
        """Return the content for a checkpoint, after :meth:`wait`; None if the queue is empty or the request failed."""
        content = self.content
        if not isinstance(content, PendingAnswers):
            return content
        if content.future.exception() is not None:
            return None
        answers = content.future.result()
        rounds = tuple(tuple(answer.rollout for answer in one) for one in answers.by_micro_step)
        return SavedAnswers(content.step, content.version, rounds, answers.rollout_s, answers.report, answers.counted)

    def _request(self, batches: MicroBatches, step: int) -> StepAnswers:
        """Request everything at once, with the seeds of ``step``. Answers are parsed and matched in a thread while
        others still decode. No collective call, so any thread may make it."""
        started = time.perf_counter()
        rounds = [
            RolloutRound(
                tuple(sample.request for sample in batch),
                SeedContext(self.training_seed, step, micro_step, distributed.rank()),
            )
            for micro_step, batch in enumerate(batches)
        ]

        def timed_read(sample: Sample, rollout: Rollout) -> tuple[MatchedAnswer, float]:
            started = time.perf_counter()
            return self.read(sample, rollout), time.perf_counter() - started

        reading: dict[tuple[int, int], Future[tuple[MatchedAnswer, float]]] = {}
        with ThreadPoolExecutor(1, thread_name_prefix="parse and match") as reader:
            try:
                for answer in self.backend.generate_rounds(rounds):
                    place = (answer.round_idx, answer.index)
                    assert place not in reading, f"two answers to request {place}"
                    sample = batches[answer.round_idx][answer.index]
                    reading[place] = reader.submit(timed_read, sample, answer.rollout)
                rollout_s = time.perf_counter() - started
                done = {place: future.result() for place, future in reading.items()}
            except BaseException:
                reader.shutdown(cancel_futures=True)  # the first failure ends the step, so pending work is useless
                raise
        by_micro_step = [[done[i, k][0] for k in range(len(batch))] for i, batch in enumerate(batches)]
        return StepAnswers(by_micro_step, rollout_s, sum(seconds for _, seconds in done.values()))

    def _with_report(self, answers: StepAnswers) -> StepAnswers:
        return replace(answers, report=self.backend.last_report(), counted=self.backend.take_metrics())

    def _from_saved(self, saved: SavedAnswers, batches: MicroBatches) -> StepAnswers:
        answered = [[rollout.sample_id for rollout in one] for one in saved.rounds]
        wanted = [[sample.record.sample_id for sample in batch] for batch in batches]
        if answered != wanted:
            raise CheckpointError(
                f"the checkpoint has answers to samples {str(answered)[:200]}, and its next step reads "
                f"{str(wanted)[:200]}; resume with the same data, batch size and seed, or start a new run"
            )
        started = time.perf_counter()
        by_micro_step = [
            [self.read(sample, rollout) for sample, rollout in zip(batch, one, strict=True)]
            for batch, one in zip(batches, saved.rounds, strict=True)
        ]
        read_s = time.perf_counter() - started
        return StepAnswers(by_micro_step, saved.rollout_s, read_s, saved.report, saved.counted)
