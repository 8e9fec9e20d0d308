"""One optimizer step, from samples to new weights, in reading order.

    samples  -> answers           the model writes its own, no gradient; in stage 1 and Channel-A the ground truth
    answers  -> parsed, matched   pure functions, in a thread while other answers still decode
             -> policy            what the whole step decides over all ranks (target.complete_above)
    matched  -> targets           Y_train with its supervision, built once
    targets  -> rows              packed; segments that do not fit wait in the carry buffer
    rows     -> totals            supervised positions of the whole step on all ranks, before the first backward
    row      -> loss, gradient    one forward and one backward a row; gradients are exchanged with the last row
             -> new weights       clipping, optimizer, learning-rate schedule

Stage 1, rollout matching, Channel-A, Channel-B and rollouts one step ahead differ only in their :class:`Task`.

Errors: code that may fail on a single rank runs inside :func:`coordexp.distributed.raise_on_all_ranks`, so that all
ranks raise the same error and none waits for another. The weights change only in :meth:`TrainStep.update`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch

from coordexp import distributed
from coordexp.config.objective import Channel
from coordexp.data.dataset import LEFT_OUT
from coordexp.errors import TrainingDiverged
from coordexp.objective import HeadScores, RowObjective, RowTensors
from coordexp.out_of_memory import phase
from coordexp.recording.writer import RolloutLog, RolloutRecorder, token_losses
from coordexp.records import ImageRecord, PackedRow
from coordexp.targets import SampleOutcome, count_terms, is_closed
from coordexp.training.batches import ChannelSchedule, MicroBatches, StepBatches
from coordexp.training.optimizer import needs_metric
from coordexp.training.rows import (
    DeviceMetrics,
    PrefetchedRows,
    RowBuilder,
    RowPlanner,
    blank_row,
    num_patches,
    segment_of,
)
from coordexp.training.state import RunState
from coordexp.training.step_answers import RolloutQueue, TargetOptions, decide_policy, rollout_metrics


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of training step. ``rollouts``: the model's own answers; None if answers are written from ground truth.
    ``channel``: None outside of two-channel training."""

    objective: RowObjective
    planner: RowPlanner
    targets: TargetOptions
    rollouts: RolloutQueue | None = None
    channel: Channel | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """A step's packed rows on this rank. ``totals``: positions of each loss term in the whole step, on all ranks."""

    rows: list[PackedRow]
    totals: Mapping[str, int]
    outcomes: list[SampleOutcome]


def prepare_step(
    task: Task, samples: MicroBatches, step: int, metrics: MutableMapping[str, float], rollout_log: RolloutLog
) -> PreparedStep:
    """Build the rows of step ``step`` (counted from 0) and its totals. A collective call; adds to ``metrics``. Raises
    on all ranks AlignmentError, AppendError, SegmentTooLong, CarryBufferOverflow, RolloutError."""
    where = f"step {step + 1}"

    # Answers, parsed and matched; then what the whole step decides about them.
    answers, policy, complete = None, task.targets.policy, False
    if task.rollouts is not None:
        answers = task.rollouts.take(samples, step, metrics)
        policy, complete = decide_policy(policy, answers.all)

    # Targets, each built once.
    with distributed.raise_on_all_ranks(f"targets of {where}"):
        started = time.perf_counter()
        outcomes: list[SampleOutcome] = []
        if answers is None:
            targets = [task.targets.ground_truth(sample) for batch in samples for sample in batch]
        else:
            rollout_log.write(step, answers.report)
            outcomes = [task.targets.corrected(answer, policy, complete) for answer in answers.all]
            targets = [outcome.target for outcome in outcomes]
            metrics.update(rollout_metrics(outcomes, answers.counted, step))
            metrics["time/rollout_s"] = answers.rollout_s
            metrics["time/target_build_s"] = answers.read_s + time.perf_counter() - started

        # Segments: prompt, images and target of a sample; and the packed rows that they fill.
        packing = time.perf_counter()
        remaining, segments, drops = iter(targets), [], task.targets.drop_unclosed
        for batch in samples:
            pairs = [(sample, next(remaining)) for sample in batch]
            segments.append([segment_of(sample, target) for sample, target in pairs if is_closed(target) or not drops])
        if drops:
            metrics["stage2/closure_dropped_total"] = len(targets) - sum(map(len, segments))
        rows = task.planner(segments, step, metrics)
        counts = count_terms(segment.target for row in rows for segment in row.segments)

    # Totals over all ranks: each term's denominator, so that packing and spreading change no gradient.
    summed = distributed.all_reduce(list(counts.values()), "sum")
    totals = {term: int(total) for term, total in zip(counts, summed, strict=True)}
    # Counted before blank rows, which train nothing.
    metrics["packing/segments_total"] = sum(len(row.segments) for row in rows)
    metrics["train/tokens_total"] = sum(row.length for row in rows)
    metrics["train/patches_total"] = sum(num_patches(segment) for row in rows for segment in row.segments)
    if task.planner.drain:  # equally many rows on every rank; blank ones first, so that the last is a real one
        (most,) = distributed.all_reduce([len(rows)], "max")
        if missing := max(1, int(most)) - len(rows):
            metrics["packing/blank_rows_total"] = missing
            rows = [*[blank_row(samples)] * missing, *rows]
    metrics["time/pack_s"] = time.perf_counter() - packing
    metrics["train/samples_total"] = len(targets)
    left_out = [sample.record.metadata.get(LEFT_OUT) for batch in samples for sample in batch]
    if any(count is not None for count in left_out):
        metrics["train/augment_left_out_total"] = sum(count or 0 for count in left_out)
    return PreparedStep(rows, totals, outcomes)


@dataclass(eq=False)
class TrainStep:
    """Trains on one step's samples: :meth:`accumulate` the gradient, then :meth:`update` the weights.

    ``schedule``: chooses between the tasks of two channels; None where there is one task. ``prepared`` and ``outcomes``
    (answers with their records) belong to the current step.
    """

    run: RunState
    tasks: Mapping[Channel | None, Task]
    schedule: ChannelSchedule | None
    _: KW_ONLY
    build_row: RowBuilder
    max_grad_norm: float
    rollout_log: RolloutLog
    recorder: RolloutRecorder | None = None
    notify: Callable[[str], None] = lambda event: None  # runs callbacks' event of that name
    logging_steps: int = 1
    last_step: int | None = None  # no answers are requested for steps after it
    prepared: PreparedStep | None = None
    outcomes: list[tuple[ImageRecord, SampleOutcome]] = field(default_factory=list)

    def task_of(self, step: int) -> Task:
        """The task of step ``step``, counted from 0."""
        return self.tasks[None if self.schedule is None else self.schedule.channel(step)]

    def accumulate(self, batches: StepBatches, step: int) -> None:
        """Run step ``step`` (counted from 0) up to its gradient. A collective call."""
        where, task, run = f"step {step + 1}", self.task_of(step), self.run
        metrics: defaultdict[str, float] = defaultdict(float)
        began = time.perf_counter()
        samples = batches.take()
        started = time.perf_counter()
        metrics["time/data_wait_s"] = started - began
        with phase("training", f"the targets of {where}"):
            prepared = self.prepared = prepare_step(task, samples, step, metrics, self.rollout_log)
        records = [sample.record for batch in samples for sample in batch]
        self.outcomes = list(zip(records, prepared.outcomes, strict=True)) if task.rollouts is not None else []
        with PrefetchedRows(lambda row: self.build_row(row, task.objective), prepared.rows) as rows:
            self._request_ahead(batches, step, metrics)
            with distributed.raise_on_all_ranks(f"records of {where}"):
                if self.recorder is not None and prepared.outcomes:
                    self.recorder.offer(step, self.logging_steps, samples, prepared.outcomes)
                    metrics |= self.recorder.take_counters()
            metrics["time/window_prepare_s"] = time.perf_counter() - started
            run.sums.add({**metrics, **self._channel_metrics(task, step)})
            run.sums.count_step(task.channel, has_slots=prepared.totals["coord"] > 0)
            self.notify("on_step_begin")

            # Forward and backward, row by row.
            started, forward_s, on_device = time.perf_counter(), 0.0, DeviceMetrics()
            run.model.train()
            with phase("training", f"forward and backward of {where}"), run.together(where) as agree:
                for number, row in enumerate(self._on_device(rows, where), start=1):
                    is_last = number == len(prepared.rows)
                    run.accelerator.sync_gradients = is_last
                    with nullcontext() if is_last or run.shards else run.accelerator.no_sync(run.model):
                        begun = time.perf_counter()
                        scores = run.model(forward_fn=partial(task.objective.scores, row=row))
                        result = task.objective.result(row.supervision, scores, prepared.totals)
                        on_device.add(result.named(task.channel), scores, row.queries)
                        self._record_losses(row, scores, step)
                        forward_s += time.perf_counter() - begun
                        if is_last:
                            agree()  # an error of one rank must reach the others before they exchange gradients
                        # DDP, FSDP and DeepSpeed average over ranks, and the sum is wanted. DeepSpeed would also divide
                        # by micro-steps, which the totals have done.
                        scaling = {"scale_wrt_gas": False} if run.is_deepspeed else {}
                        run.accelerator.backward(result.loss * distributed.world_size(), **scaling)
            with distributed.raise_on_all_ranks(where):
                self._take_metrics(on_device, step)
        run.sums.add(
            {
                "train/micro_steps": len(prepared.rows),
                "time/forward_s": forward_s,
                "time/learner_s": time.perf_counter() - started,
                "time/row_wait_s": rows.wait_s,
                "time/row_build_s": rows.build_s,
            }
        )

    def update(self) -> dict[str, Any]:
        """Clip, step the optimizer and the schedule, clear gradients. Returns: the gradient's norm before clipping, and
        the learning rate that was used."""
        run, began = self.run, time.perf_counter()
        with phase("optimizer", f"the optimizer of step {run.progress.global_step + 1}"):
            norm = run.accelerator.clip_grad_norm_(run.model.parameters(), self.max_grad_norm or float("inf"))
            self.notify("on_pre_optimizer_step")
            run.optimizer.step()
        self.notify("on_optimizer_step")
        rate = run.optimizer.param_groups[0]["lr"]
        if not (run.accelerator.optimizer_step_was_skipped or needs_metric(run.scheduler)):
            run.scheduler.step()
        run.optimizer.zero_grad()
        run.sums.add({"time/optimizer_s": time.perf_counter() - began, **_peak_memory()})
        return {"grad_norm": norm, "learning_rate": rate}  # a tensor stays on its device until it is logged

    def _on_device(self, rows: Iterable[RowTensors], where: str) -> Iterator[RowTensors]:
        device, waiting = self.run.accelerator.device, iter(rows)
        # Sharded ranks, and DDP's in the second step, wait for each other inside a forward. So a rank without its first
        # row notifies the others before they begin one.
        with distributed.raise_on_all_ranks(where):
            first = next(waiting).to(device)
        yield first
        for row in waiting:
            yield row.to(device)

    def _request_ahead(self, batches: StepBatches, step: int, metrics: MutableMapping[str, float]) -> None:
        """With ``rollouts_ahead``: request the next step's answers from the current weights, while this step trains."""
        if self.last_step is not None and step + 1 >= self.last_step:
            return
        queue = self.task_of(step + 1).rollouts
        if queue is not None and queue.ahead and (samples := batches.peek()) is not None:
            queue.submit(samples, step, metrics)

    def _channel_metrics(self, task: Task, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        buffers = [one.planner.buffer for one in self.tasks.values() if one.planner.buffer is not None]
        if buffers:
            metrics["packing/buffer_segments"] = len(buffers[0])
        if self.schedule is not None:
            metrics["stage2/channel_a"] = int(task.channel == "A")
            metrics["stage2/channel_b"] = int(task.channel == "B")
            metrics["stage2/b_ratio_realised"] = self.schedule.realised(step)
        return metrics

    def _record_losses(self, row: RowTensors, scores: Sequence[HeadScores], step: int) -> None:
        # Only of recorded samples: reading the losses waits for the device.
        segments = row.row.segments
        if self.recorder is not None and len(scores) == 1 and self.recorder.wants_losses(segments):
            losses = token_losses(row.row, row.supervision, row.queries[0], scores[0])
            self.recorder.offer_losses(step, segments, losses)

    def _take_metrics(self, on_device: DeviceMetrics, step: int) -> None:
        for row in on_device.sync():
            self.run.sums.add(
                {
                    "train/supervised_total": row.num_scored,
                    "train/nonfinite_positions_total": row.nonfinite,
                    "train/clamped_positions_total": row.clamped,
                }
            )
            # The objective replaces NaN and infinity, so that one broken logit cannot erase a step. That must not hide
            # a diverged model, whose loss would look finite.
            if row.all_broken:
                raise TrainingDiverged(
                    f"step {step + 1}: every supervised position has NaN or infinite logits; {TrainingDiverged.ADVICE}"
                )
            self.run.sums.add(row.shares)


def _peak_memory() -> dict[str, float]:
    """The GPU memory of this process since it started; {} without one. Reads the host's counters, without waiting."""
    if not torch.cuda.is_available():
        return {}
    return {
        "memory/allocated_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "memory/reserved_peak_gb": torch.cuda.max_memory_reserved() / 1e9,
    }
