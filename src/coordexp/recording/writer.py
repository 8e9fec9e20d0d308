"""Writes rollout records while training goes on, and never makes it wait.

A record is written when its target is built; what its tokens cost is known only after its forward pass, maybe steps
later, and goes into a file of its own, which readers join to the first. A worker thread takes lines to be made from a
bounded queue and appends them. Where it cannot keep up, the disk is nearly full, or a write fails, the line is lost,
counted and (once) warned of.

The rollout log is written beside them: a line of JSON per step and rank on what each round of rollouts did, enough to
ask for the same answers again.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordexp import distributed
from coordexp.config.rollout import MonitorDumpConfig
from coordexp.data.dataset import Sample
from coordexp.data.files import append_line
from coordexp.metrics import SampleOutcome
from coordexp.recording.rollout_record import (
    LossRecord,
    Settings,
    WhereInTraining,
    loss_path,
    make_record,
)
from coordexp.recording.token_losses import TokenLosses
from coordexp.records import ImageRecord, Segment
from coordexp.records_json import to_json

logger = logging.getLogger("coordexp")

WRITTEN = "rollout/records_written_total"
DROPPED = "rollout/records_dropped_total"  # the queue was full, the disk was nearly full, or time ran out at the end
FAILED = "rollout/records_failed_total"  # the write itself failed
COUNTERS = (WRITTEN, DROPPED, FAILED)
_POLL_S = 0.2


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
    :meth:`take_counters` hands them over.

    The thread is no daemon, so that a normal exit loses nothing: it ends by itself when the main thread has.
    """

    def __init__(self, folder: Path, rank: int, settings: Settings, config: MonitorDumpConfig) -> None:
        self.path = folder / f"rollouts_rank{rank}.jsonl"
        self._rank = rank
        self._settings = settings
        self._config = config
        self._queue: queue.Queue[tuple[Path, Callable[[], bytes]]] = queue.Queue(config.max_pending)
        self._untrained: dict[str, WhereInTraining] = {}  # recorded, but its loss is not known yet
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._counters = Counter({name: 0 for name in COUNTERS})
        self._warned: set[str] = set()

    def offer(
        self,
        global_step: int,
        logging_steps: int,
        micro_batches: Sequence[Sequence[Sample]],
        outcomes: Sequence[SampleOutcome],
    ) -> None:
        """Queue the step's first samples if the step is due. ``outcomes`` stand in the order of ``micro_batches``."""
        if not is_due(self._config, global_step, logging_steps):
            return
        samples = [(micro_step, sample) for micro_step, batch in enumerate(micro_batches) for sample in batch]
        for idx, ((micro_step, sample), outcome) in enumerate(zip(samples, outcomes, strict=True)):
            if idx >= self._config.max_samples:
                return
            where = WhereInTraining(global_step, micro_step, self._rank, idx, len(samples))
            if outcome.target.token_ids:  # an answer that cannot be closed is dropped, and never trained on
                self._untrained[sample.record.sample_id] = where
            self._put(self.path, partial(_record_line, sample.record, outcome, where, self._settings))

    def wants_losses(self, segments: Sequence[Segment]) -> bool:
        """Whether one of ``segments`` is of a recorded sample, so that its tokens' losses are worth a look."""
        return bool(self._untrained) and any(segment.sample_id in self._untrained for segment in segments)

    def offer_losses(self, global_step: int, segments: Sequence[Segment], losses: Sequence[TokenLosses]) -> None:
        """Queue what the recorded ones among ``segments``, which the step after ``global_step`` trained on, cost."""
        for segment, loss in zip(segments, losses, strict=True):
            if not segment.target.token_ids:
                continue  # a blank row, which borrows its prompt from a sample that may be recorded
            where = self._untrained.pop(segment.sample_id, None)
            if where is not None and segment.target.context == "rollout":
                line = LossRecord.from_segment(segment, where, global_step, loss.position_P, loss.loss_P)
                self._put(loss_path(self.path), partial(to_json, line))

    def _put(self, path: Path, make_line: Callable[[], bytes]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollout-records", daemon=False)
            self._thread.start()
        try:
            self._queue.put_nowait((path, make_line))
        except queue.Full:
            self._lose(
                DROPPED,
                "queue",
                "rollout records are made faster than they are written; raise "
                "rollout_matching.monitor_dump.max_pending or record fewer samples",
            )

    def take_counters(self) -> Counter[str]:
        """What happened since the last call."""
        with self._lock:
            taken = self._counters
            self._counters = Counter({name: 0 for name in COUNTERS})
        return taken

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits and end the thread; what is not written within ``timeout_s`` is dropped, and said."""
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandoned.set()
            logger.warning(
                "%d rollout records were not written within %.0f s and are lost: %s answers slowly",
                self._queue.qsize(),
                timeout_s,
                self.path.parent,
            )

    def _work(self) -> None:
        while True:
            try:
                path, make_line = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                # Without close(), the interpreter waits for this thread after the main thread has ended.
                if self._closing.is_set() or not threading.main_thread().is_alive():
                    return
                continue
            if self._abandoned.is_set():
                self._lose(DROPPED, "end", "rollout records were dropped at the end of training")
                continue
            self._write(path, make_line)

    def _write(self, path: Path, make_line: Callable[[], bytes]) -> None:
        try:
            line = make_line()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free_gb = shutil.disk_usage(self.path.parent).free / 1e9
            if free_gb < self._config.min_free_gb:
                self._lose(
                    DROPPED,
                    "disk",
                    f"{self.path.parent}: {free_gb:.1f} GB free, less than rollout_matching.monitor_dump.min_free_gb; "
                    "no rollout records until there is more",
                )
                return
            append_line(path, line + b"\n")
        except (OSError, UnicodeEncodeError) as error:
            self._lose(FAILED, "write", f"{path}: a rollout record was not written: {error}")
            return
        if path == self.path:
            with self._lock:
                self._counters[WRITTEN] += 1

    def _lose(self, counter: str, cause: str, message: str) -> None:
        with self._lock:
            self._counters[counter] += 1
            if cause in self._warned:
                return
            self._warned.add(cause)
        logger.warning("%s (counted in %s from here on)", message, counter)


def _record_line(image: ImageRecord, outcome: SampleOutcome, where: WhereInTraining, settings: Settings) -> bytes:
    return to_json(make_record(image, outcome, where, settings))


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
