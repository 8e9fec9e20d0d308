"""Packed rows as their forwards take them, each built in a second thread while the row before it computes.

Building a row is work for the host alone: pixels joined and cast, positions, masks; and, for a GPU, page-locked copies
of it all, which travel without holding anybody up. It takes about as long as a small model's forward and backward.

At most one row waits, also across the micro-steps of a window, so memory holds two: the one that computes and the next.
The thread draws no random number and calls no other rank, and ends with its window, so nothing is left running between
windows; what it raises is raised where its row is taken, in the row's own micro-step.

What rows leave on the device is looked at all at once, because every look waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordexp.background import PreparedAhead
from coordexp.errors import RowLate
from coordexp.modeling.inputs import RopeIndex, VisionTower, pinned, row_inputs
from coordexp.objective import HeadQuery, HeadScores, SupervisionTensors
from coordexp.objective.supervision import tree_map
from coordexp.records import PackedRow
from coordexp.training.objective_step import TrainingObjective


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One row: its share of each term, and how many of its scored positions were broken or clamped, as the host knows
    them."""

    shares: Mapping[str, float]
    num_scored: int
    nonfinite: int
    clamped: int

    @property
    def all_broken(self) -> bool:
        """Whether no supervised position of the row has a finite loss."""
        return self.num_scored > 0 and self.nonfinite == self.num_scored


class FiguresOnDevice:
    """The rows of one step, until the host looks."""

    def __init__(self) -> None:
        self._rows: list[tuple[tuple[str, ...], int, torch.Tensor]] = []

    def note(
        self, terms: Mapping[str, torch.Tensor], scores: Sequence[HeadScores], queries: Sequence[HeadQuery]
    ) -> None:
        """Keep a row's figures where they are. ``terms``: name → scalar."""
        counted = [
            torch.stack([getattr(one, name).sum() for one in scores]).sum() for name in ("nonfinite_N", "clamped_N")
        ]
        figures_F = torch.stack([value.detach().to(torch.float64) for value in (*counted, *terms.values())])
        self._rows.append((tuple(terms), sum(query.num_scored for query in queries), figures_F))

    def look(self) -> Iterator[RowFigures]:
        """Each row that was noted since the last look, in order. Waits for the device once."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        figures = iter(torch.cat([figures_F for _, _, figures_F in rows]).tolist())
        for names, num_scored, _ in rows:
            nonfinite, clamped = int(next(figures)), int(next(figures))
            yield RowFigures({name: next(figures) for name in names}, num_scored, nonfinite, clamped)


ROW_DEADLINE_S = 600.0  # far beyond what any row needs: a machine that swaps, or a driver that hangs


@dataclass(frozen=True, slots=True, eq=False)
class RowBuilder:
    """How the rows of a window are built: read off the model before its first forward, since a wrapper may show other
    parameters within one. ``device``: where the rows will go."""

    rope_index: RopeIndex
    tower: VisionTower
    image_token_id: int
    attention: str
    dtype: torch.dtype
    objective: TrainingObjective
    device: torch.device

    def __call__(self, row: PackedRow) -> dict[str, Any]:
        """``model``: the forward's arguments; ``supervision``; ``queries``: what each forward asks of the head;
        ``row`` itself. All on the CPU."""
        inputs = row_inputs(row, self.rope_index, self.image_token_id, self.attention, self.dtype, self.tower)
        supervision = SupervisionTensors.from_row(row)
        queries = self.objective.queries(supervision)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # a thread begins on the first GPU, whatever its process uses
                inputs = pinned(inputs)
                supervision, queries = tree_map(torch.Tensor.pin_memory, (supervision, queries))
        return {"model": inputs, "supervision": supervision, "queries": queries, "row": row}


class RowPrefetch:
    """The rows of one window, in the order in which they are trained on. As a context: what fails within stops it."""

    def __init__(
        self, build: Callable[[PackedRow], dict[str, Any]], micro_steps: Sequence[Sequence[PackedRow]]
    ) -> None:
        """The first row is begun at once."""
        self.micro_steps = [MicroStep(self, len(rows)) for rows in micro_steps]
        self.waited_s = 0.0
        self.built_s = 0.0
        self._build = build
        rows = [row for rows in micro_steps for row in rows]
        self._ahead = PreparedAhead(rows, self._timed, ahead=1, deadline_s=ROW_DEADLINE_S, late=_late, name="rows")

    def take(self) -> dict[str, Any]:
        """The next row, for which this waits where it must; the one behind it is begun.

        Raises:
            RowLate: it is not there after :data:`ROW_DEADLINE_S`. Whatever building the row raised.
        """
        started = time.perf_counter()
        _, (inputs, seconds) = self._ahead.take()
        self.waited_s += time.perf_counter() - started
        self.built_s += seconds
        return inputs

    def __enter__(self) -> RowPrefetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()

    def stop(self) -> None:
        """Begin no further row, and wait, not for long, until none is being built."""
        self._ahead.stop()

    def take_seconds(self) -> dict[str, float]:
        """Metrics since the last call: what the main thread waited for rows, and what building them took."""
        seconds = {"time/row_wait_s": self.waited_s, "time/row_build_s": self.built_s}
        self.waited_s = self.built_s = 0.0
        return seconds

    def _timed(self, row: PackedRow) -> tuple[dict[str, Any], float]:
        started = time.perf_counter()
        return self._build(row), time.perf_counter() - started


def _late(row: PackedRow) -> RowLate:
    samples = ", ".join(segment.sample_id for segment in row.segments)
    return RowLate(
        f"the row of samples {samples[:200]} is not built after {ROW_DEADLINE_S:.0f} s; see whether the machine swaps "
        "or its GPU driver hangs, and start again with training.resume_from_checkpoint: true"
    )


class MicroStep:
    """The rows of one micro-step, each there once it is come to."""

    def __init__(self, rows: RowPrefetch, count: int) -> None:
        self._rows = rows
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._count):
            yield self._rows.take()
