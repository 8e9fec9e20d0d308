"""Writes rollout records and the rollout log while training runs.

A record is written when its target is built. What its tokens cost is known only after its forward pass, maybe steps
later, and goes into a file of its own, which readers join to the first. Records are for people: where the disk is
nearly full or a write fails, the line is lost, counted and (once) warned of, and training continues. A record of 100
objects takes 2 ms, so no thread writes it.

The rollout log is next to them: a line of JSON per step and rank on what each round of rollouts did, enough to ask for
the same answers again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config.rollout import MonitorDumpConfig
from coordexp.data.dataset import Sample
from coordexp.data.files import append_line
from coordexp.recording.rollout_record import LossRecord, Settings, WhereInTraining, loss_path, make_record
from coordexp.recording.token_losses import TokenLosses
from coordexp.records import Segment
from coordexp.records_json import to_json
from coordexp.targets import SampleOutcome

logger = logging.getLogger("coordexp")

WRITTEN = "rollout/records_written_total"
DROPPED = "rollout/records_dropped_total"  # the disk was nearly full
FAILED = "rollout/records_failed_total"  # the write itself failed
COUNTERS = (WRITTEN, DROPPED, FAILED)


def is_due(config: MonitorDumpConfig, global_step: int, logging_steps: int) -> bool:
    """Whether the step after ``global_step`` finished ones is recorded: with every N, steps N, 2N, …

    ``logging_steps``: those of the run, which only the trainer knows, as the YAML may give a share of all steps.
    """
    if global_step == 0 and config.dump_first_step:
        return True
    every = logging_steps if config.every_steps is None else config.every_steps
    return (global_step + 1) % max(1, every) == 0


class RolloutRecorder:
    """The files ``rollouts_rank{rank}.jsonl`` and ``losses_rank{rank}.jsonl`` of one rank. Counters are additive;
    :meth:`take_counters` hands them over."""

    def __init__(self, folder: Path, rank: int, settings: Settings, config: MonitorDumpConfig) -> None:
        self.path = folder / f"rollouts_rank{rank}.jsonl"
        self._rank = rank
        self._settings = settings
        self._config = config
        self._untrained: dict[str, WhereInTraining] = {}  # recorded, but its loss is not known yet
        self._counters = Counter({name: 0 for name in COUNTERS})
        self._warned: set[str] = set()

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
            where = WhereInTraining(global_step, micro_step, self._rank, idx, len(samples))
            if outcome.target.token_ids:  # an answer that cannot be closed is dropped, and never trained on
                self._untrained[sample.record.sample_id] = where
            self._write(self.path, partial(make_record, sample.record, outcome, where, self._settings))

    def wants_losses(self, segments: Sequence[Segment]) -> bool:
        """Whether one of ``segments`` is of a recorded sample, so that its tokens' losses are needed."""
        return any(segment.sample_id in self._untrained for segment in segments)

    def offer_losses(self, global_step: int, segments: Sequence[Segment], losses: Sequence[TokenLosses]) -> None:
        """Record what the recorded ones among ``segments``, which the step after ``global_step`` trained on, cost."""
        for segment, loss in zip(segments, losses, strict=True):
            if not segment.target.token_ids:
                continue  # a blank row, which borrows its prompt from a sample that may be recorded
            where = self._untrained.pop(segment.sample_id, None)
            if where is not None and segment.target.context == "rollout":
                line = partial(LossRecord.from_segment, segment, where, global_step, loss.position_P, loss.loss_P)
                self._write(loss_path(self.path), line)

    def take_counters(self) -> Counter[str]:
        """The counts since the last call."""
        taken, self._counters = self._counters, Counter({name: 0 for name in COUNTERS})
        return taken

    def _write(self, path: Path, make: Callable[[], object]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free_gb = shutil.disk_usage(self.path.parent).free / 1e9
            if free_gb < self._config.min_free_gb:
                self._lose(
                    DROPPED,
                    f"{self.path.parent}: {free_gb:.1f} GB free, less than rollout_matching.monitor_dump.min_free_gb; "
                    "no rollout records until there is more",
                )
                return
            append_line(path, to_json(make()) + b"\n")
        except (OSError, UnicodeEncodeError) as error:
            self._lose(FAILED, f"{path}: a rollout record was not written: {error}")
            return
        if path == self.path:
            self._counters[WRITTEN] += 1

    def _lose(self, counter: str, message: str) -> None:
        self._counters[counter] += 1
        if counter not in self._warned:
            logger.warning("%s (counted in %s from here on)", message, counter)
        self._warned.add(counter)


def build_recorder(config: MonitorDumpConfig, settings: Settings | None, output_dir: Path) -> RolloutRecorder | None:
    """The recorder that ``rollout_matching.monitor_dump`` asks for on this rank; None for none.

    ``settings``: what targets are built with; None in a training without rollouts.
    """
    if not config.enabled or (config.only_world_process_zero and not distributed.is_main()):
        return None
    assert settings is not None, "the schema refuses monitor_dump without rollouts"
    folder = config.out_dir or output_dir / "rollout_records"
    return RolloutRecorder(folder, distributed.rank(), settings, config)


class RolloutLog:
    """One rank's file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rollout_log_rank{rank}.jsonl"
        self.superseded = folder / f"rollout_log_rank{rank}.superseded.jsonl"
        self._rank = rank
        self._written = False

    def write(self, global_step: int, report: Mapping[str, Any]) -> None:
        """Append what the rollouts after ``global_step`` finished steps did; the first rank says it in the log too."""
        line = json.dumps({"global_step": global_step, "rank": self._rank, **report})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._written:
                self._set_aside(global_step)
            self._written = True
            append_line(self.path, line.encode() + b"\n")
        except OSError as error:
            logger.warning("%s was not written (%s); it should hold: %s", self.path, error, line)
            return
        if self._rank == 0:
            logger.info("rollouts: %s", line)

    def _set_aside(self, first_step: int) -> None:
        """What processes before this one wrote of the steps that it does again."""
        if not self.path.exists():
            return
        kept = 0
        with self.path.open("rb") as file:
            for line in file:
                if (step := _step_of(line)) is not None and step >= first_step:
                    break
                kept += len(line)
            file.seek(kept)
            again = file.read()
        if again:
            append_line(self.superseded, again.rstrip(b"\n") + b"\n")
            os.truncate(self.path, kept)


def _step_of(line: bytes) -> int | None:
    """None of a line that a kill left unfinished."""
    try:
        return int(json.loads(line)["global_step"])
    except (ValueError, TypeError, KeyError):
        return None
