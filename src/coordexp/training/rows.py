"""The packed rows of a step: which segments share a row, the row's tensors, and its metrics on the device.

Building a row's tensors is CPU work: joining pixels, positions, masks and, for a GPU, page-locked
copies. It takes about as long as a small model's forward and backward (``benchmarks/trainer_rows.py``), so
a second thread builds the next row while one computes. That thread draws no random number and calls no other rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from coordexp import distributed
from coordexp.background import Prefetcher
from coordexp.data.dataset import Sample
from coordexp.errors import RowLate
from coordexp.modeling.inputs import RopeIndex, VisionTower, row_inputs
from coordexp.modeling.load import LoadedModel
from coordexp.objective import HeadQuery, HeadScores, RowObjective, RowTensors, SupervisionTensors
from coordexp.packing import CarryBuffer, build_row
from coordexp.records import PackedRow, Segment, TrainingTarget
from coordexp.targets import empty_target
from coordexp.transfer import pinned

logger = logging.getLogger("coordexp")

ROW_DEADLINE_S = 600.0  # far more than any row needs; exceeded if the machine swaps or a driver hangs


class RowPlanner:
    """Segments by micro-step → the rows of one optimizer step.

    * With a carry buffer each micro-step takes one packed row, and what does not fit waits.
    * ``drain`` (Channel-B) takes all segments in their own step, in as many rows as they need: the next rollouts come
      from other weights.
    * Without ``capacity`` (``training.packing: false``) each micro-step's segments form one row, however long.
    """

    def __init__(
        self, buffer: CarryBuffer | None, *, capacity: int | None, drain: bool = False, min_fill_ratio: float = 0.0
    ) -> None:
        self.buffer = buffer
        self.drain = drain
        self._capacity = capacity
        self._min_fill_ratio = min_fill_ratio
        self._warned_of_fill = self._warned_of_overflow = False  # once a run; metrics count the rest
        self._first_waiting: tuple[int, int] | None = None  # (finished steps, waiting segments) when first seen

    def __call__(
        self, segments: Sequence[Sequence[Segment]], step: int, metrics: MutableMapping[str, float]
    ) -> list[PackedRow]:
        """The rows of step ``step`` (counted from 0), in training order. Raises
        AlignmentError, SegmentTooLong, CarryBufferOverflow."""
        if self._capacity is None:
            return [build_row(new) for new in segments if new or not self.drain]
        chosen: list[Sequence[Segment]] = []
        if self.drain:
            everything = [segment for new in segments for segment in new]
            buffer = CarryBuffer(self._capacity, max(1, len(everything)))
            buffer.insert(*everything)
            while len(buffer):
                chosen.append(buffer.pop())
        else:
            assert self.buffer is not None, "packing without a carry buffer"
            for new in segments:
                self.buffer.insert(*new)
                chosen.append(self.buffer.pop())
            self._foresee_overflow(self.buffer, step)
        for row in chosen:
            taken = sum(segment.length for segment in row)
            metrics["packing/selected_tokens_total"] += taken
            metrics["packing/capacity_tokens_total"] += self._capacity
            if taken < self._min_fill_ratio * self._capacity:
                metrics["packing/underfilled_rows_total"] += 1
                if not (self._warned_of_fill or self.drain):
                    self._warned_of_fill = True
                    logger.warning(
                        f"a packed row is filled to {taken / self._capacity:.2f} of global_max_length, below "
                        f"training.packing_min_fill_ratio {self._min_fill_ratio}; raise per_device_train_batch_size "
                        "or lower global_max_length"
                    )
        return [build_row(one) for one in chosen]

    def _foresee_overflow(self, buffer: CarryBuffer, step: int) -> None:
        """Warn once when the buffer is more than half full and growing, long before :class:`CarryBufferOverflow` ends
        the run."""
        waiting, most = len(buffer), buffer.max_segments
        if self._first_waiting is None:
            self._first_waiting = (step, waiting)
        since, before = self._first_waiting
        if self._warned_of_overflow or waiting <= before or 2 * waiting <= most:
            return
        self._warned_of_overflow = True
        steps = max(1, round((most - waiting) * (step - since) / (waiting - before)))
        logger.warning(
            f"{waiting:,} segments wait for a row, of {most:,} that training.packing_buffer allows: micro-steps bring "
            f"more than rows take, and training ends in about {steps:,} steps; raise global_max_length or "
            "training.packing_buffer, or lower per_device_train_batch_size"
        )


def untrained_note(buffer: CarryBuffer | None, samples: int) -> str | None:
    """A sentence on the samples that the end of a run leaves in the carry buffers, of ``samples`` that it read; None
    without any. A collective call."""
    waiting = 0 if buffer is None else len(buffer)
    waiting = int(distributed.all_reduce([waiting], "sum")[0])
    if not waiting:
        return None
    return (
        f"{waiting:,} of {samples:,} samples were not trained on: they still wait for a packed row "
        "(packing/buffer_segments); to train on more of them, raise global_max_length, lower "
        "training.per_device_train_batch_size, or set training.packing: false"
    )


def blank_row(batches: Sequence[Sequence[Sample]]) -> PackedRow:
    """The step's shortest prompt without an answer. It uses every weight and supervises nothing. A rank with
    fewer rows than the others runs it, so that all ranks exchange gradients equally often."""
    sample = min((sample for batch in batches for sample in batch), key=lambda one: len(one.request.prompt_token_ids))
    return build_row([segment_of(sample, empty_target(sample.record.sample_id))])


def segment_of(sample: Sample, target: TrainingTarget) -> Segment:
    """The sample's prompt and images, and its target."""
    request = sample.request
    return Segment(sample.record.sample_id, request.prompt_token_ids, target, request.model_inputs)


def num_patches(segment: Segment) -> int:
    """Image patches that the vision tower computes for ``segment``; 0 without an image."""
    grid = segment.model_inputs.get("image_grid_thw")
    return 0 if grid is None else int(grid.prod(-1).sum())


@dataclass(frozen=True, slots=True, eq=False)
class RowBuilder:
    """Builds the tensors of rows. Create it before the model's first forward, because a wrapper may expose other
    parameters during a forward. ``device``: the device that the rows will be moved to."""

    rope_index: RopeIndex
    tower: VisionTower
    image_token_id: int
    attention: str
    device: torch.device

    @classmethod
    def from_model(cls, loaded: LoadedModel, device: torch.device) -> RowBuilder:
        """For rows that go to ``loaded``'s bare model."""
        model = loaded.model
        return cls(
            rope_index=model.model.get_rope_index,
            tower=VisionTower.from_model(model),
            image_token_id=loaded.image_token_id,
            attention=loaded.attention,
            device=device,
        )

    def __call__(self, row: PackedRow, objective: RowObjective) -> RowTensors:
        """Returns tensors on the CPU, in page-locked memory if the device is a GPU."""
        inputs = row_inputs(row, self.rope_index, self.image_token_id, self.attention, self.tower)
        supervision = SupervisionTensors.from_row(row)
        tensors = RowTensors(row, inputs, supervision, objective.queries(supervision))
        if self.device.type != "cuda":
            return tensors
        with torch.cuda.device(self.device):  # a thread begins on the first GPU, whatever its process uses
            return tensors.moved(pinned)


class PrefetchedRows:
    """Iterates over the tensors of ``rows``; a thread builds the next row meanwhile. As a context manager, it ends the
    thread on exit. ``build_s``, ``wait_s``: seconds of building, and of waiting for it."""

    def __init__(self, build: Callable[[PackedRow], RowTensors], rows: Sequence[PackedRow]) -> None:
        """Starts building the first row."""
        self.build_s = self.wait_s = 0.0

        def timed(row: PackedRow) -> tuple[RowTensors, float]:
            started = time.perf_counter()
            return build(row), time.perf_counter() - started

        def timeout_error(row: PackedRow) -> RowLate:
            samples = ", ".join(segment.sample_id for segment in row.segments)
            return RowLate(
                f"the row of samples {samples[:200]} is not built after {ROW_DEADLINE_S:.0f} s; see whether the "
                "machine swaps or its GPU driver hangs, and start again with training.resume_from_checkpoint: true"
            )

        self._rows = Prefetcher(
            rows, timed, ahead=1, deadline_s=ROW_DEADLINE_S, timeout_error=timeout_error, name="rows"
        )

    def __enter__(self) -> PrefetchedRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.stop()

    def __iter__(self) -> Iterator[RowTensors]:
        """Raises: RowLate if a row is not built after :data:`ROW_DEADLINE_S`; whatever building it raised."""
        while len(self._rows):
            started = time.perf_counter()
            _, (tensors, seconds) = self._rows.take()
            self.wait_s += time.perf_counter() - started
            self.build_s += seconds
            yield tensors


@dataclass(frozen=True, slots=True)
class RowMetrics:
    """Metrics of one row: its share of the loss and of each term, and its numbers of non-finite and clamped
    positions."""

    shares: Mapping[str, float]
    num_scored: int
    nonfinite: int
    clamped: int

    @property
    def all_broken(self) -> bool:
        """No supervised position of the row has a finite loss."""
        return self.num_scored > 0 and self.nonfinite == self.num_scored


class DeviceMetrics:
    """Metrics of a step's rows. They stay on the device until :meth:`sync`, so the host does not wait after each
    row."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[str, ...], int, torch.Tensor]] = []

    def add(
        self, shares: Mapping[str, torch.Tensor], scores: Sequence[HeadScores], queries: Sequence[HeadQuery]
    ) -> None:
        """Keep one row's numbers. ``shares``: name → scalar."""
        counted = [
            torch.stack([getattr(one, name).sum() for one in scores]).sum() for name in ("nonfinite_N", "clamped_N")
        ]
        numbers_F = torch.stack([value.detach().to(torch.float64) for value in (*counted, *shares.values())])
        self._rows.append((tuple(shares), sum(query.num_scored for query in queries), numbers_F))

    def sync(self) -> list[RowMetrics]:
        """Every row since the last call, in order. Waits for the device once."""
        rows, self._rows = self._rows, []
        if not rows:
            return []
        numbers = iter(torch.cat([numbers_F for _, _, numbers_F in rows]).tolist())
        taken = []
        for names, num_scored, _ in rows:
            nonfinite, clamped = int(next(numbers)), int(next(numbers))
            taken.append(RowMetrics({name: next(numbers) for name in names}, num_scored, nonfinite, clamped))
        return taken
