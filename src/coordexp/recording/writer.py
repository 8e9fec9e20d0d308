"""Rollout records, the rollout log and TensorBoard's pictures, written while training runs.

A record is written when its target is built; its token losses are known only after its forward pass, maybe steps later,
and go into a file of their own. If a write fails, the line is dropped, counted and (once) warned about, and training
continues. A record of 100 objects takes 2 ms, so no thread writes it.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coordexp.config.rollout import MonitorDumpConfig
from coordexp.data.dataset import Sample
from coordexp.data.files import append_line
from coordexp.data.images import open_rgb
from coordexp.evaluation.drawing import draw_objects
from coordexp.objective import HeadQuery, HeadScores, SupervisionTensors
from coordexp.recording.rollout_record import LossRecord, Settings, WhereInTraining, loss_path, make_record
from coordexp.records import NUM_BINS, ImageRecord, PackedRow, Segment, TrainingTarget, to_json
from coordexp.targets import SampleOutcome

logger = logging.getLogger("coordexp")

WRITTEN = "rollout/records_written_total"
RECORDS_FAILED = "rollout/records_failed_total"
COUNTERS = (WRITTEN, RECORDS_FAILED)

MAX_PICTURES = 4  # per recorded step, so that their cost is bounded
SIDE = 384
FOUND, MISSED, MATCHED, UNMATCHED = "#00a000", "#d9730d", "#2060ff", "#e00000"


def is_due(config: MonitorDumpConfig, global_step: int, logging_steps: int) -> bool:
    """Whether the step after ``global_step`` finished ones is recorded: with every N, steps 1, N, 2N, …

    ``logging_steps``: the run's, known only to the trainer, because the YAML may give a share of all steps.
    """
    every = logging_steps if config.every_steps is None else config.every_steps
    return global_step == 0 or (global_step + 1) % max(1, every) == 0


class RolloutRecorder:
    """The files ``rollouts_rank0.jsonl`` and ``losses_rank0.jsonl``, of the samples of rank 0."""

    def __init__(self, folder: Path, settings: Settings, config: MonitorDumpConfig) -> None:
        self.path = folder / "rollouts_rank0.jsonl"
        self._settings = settings
        self._config = config
        # Recorded, but the loss is not known yet. By target: a sample may be in a step twice, or wait more than once.
        self._untrained: dict[TrainingTarget, WhereInTraining] = {}
        self._counters = Counter({name: 0 for name in COUNTERS})
        self._has_warned = False

    def offer(
        self,
        global_step: int,
        logging_steps: int,
        micro_batches: Sequence[Sequence[Sample]],
        outcomes: Sequence[SampleOutcome],
    ) -> None:
        """Record the step's first samples if the step is due. ``outcomes`` are in the order of ``micro_batches``."""
        if not is_due(self._config, global_step, logging_steps):
            return
        samples = [(micro_step, sample) for micro_step, batch in enumerate(micro_batches) for sample in batch]
        for idx, ((micro_step, sample), outcome) in enumerate(zip(samples, outcomes, strict=True)):
            if idx >= self._config.max_samples:
                return
            where = WhereInTraining(global_step, micro_step, 0, idx, len(samples))
            written = self._write(self.path, partial(make_record, sample.record, outcome, where, self._settings))
            if written and outcome.target.token_ids:  # an answer that cannot be closed is dropped, and never trained on
                self._untrained[outcome.target] = where

    def wants_losses(self, segments: Sequence[Segment]) -> bool:
        """Whether one of ``segments`` is of a recorded answer, so that its tokens' losses are needed."""
        return any(segment.target in self._untrained for segment in segments)

    def offer_losses(
        self, global_step: int, segments: Sequence[Segment], losses: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        """Record the :func:`token_losses` of recorded ones among the ``segments`` of the step after ``global_step``."""
        for segment, loss in zip(segments, losses, strict=True):
            if (where := self._untrained.pop(segment.target, None)) is not None:
                self._write(loss_path(self.path), partial(LossRecord.from_segment, segment, where, global_step, loss))

    def take_counters(self) -> Counter[str]:
        taken, self._counters = self._counters, Counter({name: 0 for name in COUNTERS})
        return taken

    def _write(self, path: Path, make: Callable[[], object]) -> bool:
        # Whether it was written: a lost record is counted once, so it gets no losses either.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, to_json(make()) + b"\n")
        except (OSError, UnicodeEncodeError) as error:
            self._counters[RECORDS_FAILED] += 1
            if not self._has_warned:
                text = "%s: a rollout record was not written: %s (counted in %s from here on)"
                logger.warning(text, path, error, RECORDS_FAILED)
            self._has_warned = True
            return False
        if path == self.path:
            self._counters[WRITTEN] += 1
        return True


def token_losses(
    row: PackedRow, supervision: SupervisionTensors, query: HeadQuery, scores: HeadScores
) -> list[tuple[tuple[int, float], ...]]:
    """(position in the target, loss in nats) pairs per segment of ``row``, ascending; positions that no module scored
    are left out.

    A text token's loss is its cross-entropy over the vocabulary. A coordinate's is −log of the probability of its
    target's nearest bin among the 1000 bins, independent of the objective's distance, so that tokens can be compared.
    """
    in_N, losses = [], []
    with torch.no_grad():
        if 1.0 in scores.vocab_lse_N:
            in_N.append(query.vocab_in_N_U)
            losses.append(scores.cross_entropy_N()[query.vocab_in_N_U])
        # Coordinates that both score (stage 1 without a coordinate loss) keep the later value, that among the bins.
        if scores.coord_logit_KB is not None:
            bin_K1 = supervision.coord_bin_K.round().long().clamp(0, NUM_BINS - 1)[:, None]
            in_N.append(supervision.coord_in_N_K)
            losses.append(-scores.coord_logit_KB.log_softmax(dim=-1).gather(1, bin_K1)[:, 0])
        position_P = supervision.position_N[torch.cat(in_N)].tolist() if in_N else []
        loss_P = torch.cat([loss.double() for loss in losses]).tolist() if losses else []
    at = sorted(dict(zip(position_P, loss_P, strict=True)).items())
    found = []
    for segment, start, end in zip(row.segments, row.offsets[:-1], row.offsets[1:], strict=True):
        first = start + len(segment.prompt_token_ids)
        found.append(tuple((position - first, round(loss, 4)) for position, loss in at if first <= position < end))
    return found


class RolloutLog:
    """One rank's rollout log: a line of JSON per step about its rollouts, enough to request the same answers again."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rollout_log_rank{rank}.jsonl"
        self.superseded = folder / f"rollout_log_rank{rank}.superseded.jsonl"
        self._rank = rank
        self._written = False

    def write(self, global_step: int, report: Mapping[str, Any]) -> None:
        """Append ``report`` on the rollouts after ``global_step`` finished steps; the first rank logs it too."""
        line = json.dumps({"global_step": global_step, "rank": self._rank, **report})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._written and self.path.exists():
                # This process repeats steps from global_step on: move the lines of earlier processes about them.
                lines = self.path.read_bytes().splitlines(keepends=True)
                kept = next((at for at, old in enumerate(lines) if _step_of(old) >= global_step), len(lines))
                if again := b"".join(lines[kept:]):
                    append_line(self.superseded, again.rstrip(b"\n") + b"\n")
                    os.truncate(self.path, sum(map(len, lines[:kept])))
            self._written = True
            append_line(self.path, line.encode() + b"\n")
        except OSError as error:
            logger.warning("%s was not written (%s); it should hold: %s", self.path, error, line)
            return
        if self._rank == 0:
            logger.info("rollouts: %s", line)


def _step_of(line: bytes) -> int:
    try:
        return int(json.loads(line)["global_step"])
    except (ValueError, TypeError, KeyError):  # a line that a kill left unfinished
        return -1


class RolloutPictures(TrainerCallback):
    """Draws the first samples of a recorded step for TensorBoard, before the step trains on them, and histograms.
    ``outcomes``: of that step on this rank, each with its sample's record, the objects in the order that was matched;
    none in a step without rollouts. ``writer``: TensorBoard's ``SummaryWriter``; None if this process has none
    (yet)."""

    def __init__(
        self,
        config: MonitorDumpConfig,
        outcomes: Callable[[], Sequence[tuple[ImageRecord, SampleOutcome]]],
        writer: Callable[[], Any],
    ) -> None:
        self._config = config
        self._outcomes = outcomes
        self._writer = writer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        writer, outcomes = self._writer(), self._outcomes()
        if writer is None or not outcomes or not is_due(self._config, state.global_step, int(state.logging_steps or 1)):
            return
        step = state.global_step + 1
        for number, (record, outcome) in enumerate(outcomes[: min(MAX_PICTURES, self._config.max_samples)]):
            writer.add_image(f"rollouts/sample_{number}", draw_rollout(record, outcome), step, dataformats="HWC")
        for name, values in (
            ("rollouts/answer_tokens", [len(outcome.rollout.response_token_ids) for _, outcome in outcomes]),
            ("rollouts/objects_per_answer", [len(outcome.parsed.objects) for _, outcome in outcomes]),
            ("rollouts/missed_per_image", [len(outcome.match.fn_gt_idx) for _, outcome in outcomes]),
        ):
            writer.add_histogram(name, np.array(values), step)


def draw_rollout(record: ImageRecord, outcome: SampleOutcome) -> np.ndarray:
    """The image, ``SIDE`` pixels long, as (H, W, 3) uint8: found objects of its annotation in green and without label,
    as their prediction has one; missed ones in orange, matched predictions in blue and the others in red."""
    image = open_rgb(record.image)
    scale = SIDE / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    image = image.resize(size, Image.Resampling.BILINEAR)
    missed, unmatched = set(outcome.match.fn_gt_idx), set(outcome.match.fp_pred_idx)
    draw_objects(image, [(obj, FOUND) for k, obj in enumerate(record.objects) if k not in missed], labels=False)
    draw_objects(image, [(obj, MISSED) for k, obj in enumerate(record.objects) if k in missed])
    predicted = [(obj, UNMATCHED if k in unmatched else MATCHED) for k, obj in enumerate(outcome.parsed.objects)]
    draw_objects(image, predicted)
    return np.asarray(image)
