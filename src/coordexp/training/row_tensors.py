"""A packed row as its forward takes it, built in a second thread while the row before it computes; and the numbers that
rows leave on the device until the host reads them all at once.

Building a row is work for the host alone: joining and casting pixels, positions, masks and, for a GPU, page-locked
copies. It takes about as long as a small model's forward and backward (``benchmarks/learner_rows.py``). At most one
built row waits, so memory holds two. The thread draws no random number and calls no other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coordexp.background import PreparedAhead
from coordexp.errors import RowLate
from coordexp.modeling.inputs import RopeIndex, VisionTower, pinned, row_inputs, to_device
from coordexp.objective import HeadQuery, HeadScores, SupervisionTensors
from coordexp.objective.supervision import tensors_to_device, tree_map
from coordexp.records import PackedRow
from coordexp.training.objective_step import TrainingObjective

ROW_DEADLINE_S = 600.0  # far beyond what any row needs: a machine that swaps, or a driver that hangs


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """``inputs``: the forward's arguments. ``queries``: what each of its forwards needs of the language head."""

    row: PackedRow
    inputs: Mapping[str, Any]
    supervision: SupervisionTensors
    queries: tuple[HeadQuery, ...]

    def to(self, device: torch.device) -> RowTensors:
        """The same on ``device``; copied while the host goes on, where memory is page-locked."""
        return replace(
            self,
            inputs=to_device(self.inputs, device),
            supervision=tensors_to_device(self.supervision, device),
            queries=tensors_to_device(self.queries, device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowBuilder:
    """How rows become tensors: read off the model before its first forward, since a wrapper may show other parameters
    within one. ``device``: where the rows will go."""

    rope_index: RopeIndex
    tower: VisionTower
    image_token_id: int
    attention: str
    dtype: torch.dtype
    device: torch.device

    def __call__(self, row: PackedRow, objective: TrainingObjective) -> RowTensors:
        """On the CPU, page-locked for a GPU."""
        inputs = row_inputs(row, self.rope_index, self.image_token_id, self.attention, self.dtype, self.tower)
        supervision = SupervisionTensors.from_row(row)
        queries = objective.queries(supervision)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # a thread begins on the first GPU, whatever its process uses
                inputs = pinned(inputs)
                supervision, queries = tree_map(torch.Tensor.pin_memory, (supervision, queries))
        return RowTensors(row, inputs, supervision, queries)


class PrefetchedRows:
    """Iterates over the tensors of ``rows``; the next row is built meanwhile. Use it as a context: leaving it ends the
    thread. ``build_s``, ``wait_s``: seconds of building, and of waiting for it."""

    def __init__(self, build: Callable[[PackedRow], RowTensors], rows: Sequence[PackedRow]) -> None:
        """The first row is begun at once."""
        self.build_s = self.wait_s = 0.0
        self._build = build
        self._rows = PreparedAhead(rows, self._timed, ahead=1, deadline_s=ROW_DEADLINE_S, late=_late, name="rows")

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

    def _timed(self, row: PackedRow) -> tuple[RowTensors, float]:
        started = time.perf_counter()
        return self._build(row), time.perf_counter() - started


def _late(row: PackedRow) -> RowLate:
    samples = ", ".join(segment.sample_id for segment in row.segments)
    return RowLate(
        f"the row of samples {samples[:200]} is not built after {ROW_DEADLINE_S:.0f} s; see whether the machine swaps "
        "or its GPU driver hangs, and start again with training.resume_from_checkpoint: true"
    )


@dataclass(frozen=True, slots=True)
class RowMetrics:
    """One row: its share of the loss and of each term, and how many scored positions were broken or clamped."""

    shares: Mapping[str, float]
    num_scored: int
    nonfinite: int
    clamped: int

    @property
    def all_broken(self) -> bool:
        """No supervised position of the row has a finite loss."""
        return self.num_scored > 0 and self.nonfinite == self.num_scored


class DeviceMetrics:
    """Numbers of a step's rows, left on the device so that the host can run ahead of it."""

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
