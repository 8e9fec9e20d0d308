"""A packed row on its way through the model: as tensors, its forwards, the scores that the loss needs, and the numbers
that it leaves on the device.

Every training but Channel-A has one forward, which all modules of its pipeline score. Channel-A with self-context has
several: cross-entropy belongs to the first, which reads the ground truth; everything about coordinates, the text gate
included, belongs to the last, which reads the model's own.

Building a row's tensors is work for the host alone: joining and casting pixels, positions, masks and, for a GPU,
page-locked copies. It takes about as long as a small model's forward and backward (``benchmarks/learner_rows.py``), so
a second thread builds the next row while one computes. That thread draws no random number and calls no other rank.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from coordexp.background import Prefetcher
from coordexp.config.objective import Channel
from coordexp.errors import RowLate
from coordexp.modeling.coord_offset import OutputHead, output_head
from coordexp.modeling.forward import SelfContext, self_context_states, supervised_hidden
from coordexp.modeling.inputs import RopeIndex, VisionTower, pinned, row_inputs, to_device
from coordexp.modeling.load import LoadedModel
from coordexp.objective import (
    HeadQuery,
    HeadScores,
    ObjectivePipeline,
    ObjectiveResult,
    SupervisionTensors,
    score_head,
)
from coordexp.objective.head import coord_ids_on
from coordexp.objective.supervision import tensors_to_device, tree_map
from coordexp.records import PackedRow

FIRST_FORWARD = ("token_ce",)
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
class ScoreRow:
    """``model(forward_fn=ScoreRow(…))``: what ``query`` asks of the head at one row's supervised positions."""

    inputs: Mapping[str, Any]
    supervision: SupervisionTensors
    query: HeadQuery
    coord_ids: Sequence[int]

    def __call__(self, model: Any) -> HeadScores:
        hidden_NH = supervised_hidden(model, self.inputs, self.supervision.position_N)
        return _scored(hidden_NH, model, self.query, self.supervision, self.coord_ids)


@dataclass(frozen=True, slots=True)
class TrainingObjective(ABC):
    """What one training, or one channel of it, learns from a row: what it asks of the head, what the wrapped model runs
    as its forward, and the loss. ``coord_ids``: the 1000 coordinate tokens, by bin."""

    pipeline: ObjectivePipeline
    coord_ids: tuple[int, ...]

    def forwards(self) -> tuple[ObjectivePipeline, ...]:
        """The modules that score each forward of a row, in the order of the forwards."""
        return (self.pipeline,)

    def queries(self, supervision: SupervisionTensors) -> tuple[HeadQuery, ...]:
        """What each forward asks of the head."""
        return tuple(part.query(supervision) for part in self.forwards())

    @abstractmethod
    def forward_fn(self, row: RowTensors) -> Callable[[Any], tuple[HeadScores, ...]]:
        """What the wrapped model runs in place of its own forward: bare model → the scores of each forward."""

    def result(
        self,
        supervision: SupervisionTensors,
        scores: Sequence[HeadScores],
        totals: Mapping[str, int],
    ) -> ObjectiveResult:
        """The row's share of the step's loss and terms. ``totals``: positions of each term in the whole step."""
        results = [
            part(supervision, head_scores, totals) for part, head_scores in zip(self.forwards(), scores, strict=True)
        ]
        loss = results[0].loss
        for further in results[1:]:
            loss = loss + further.loss
        return ObjectiveResult(loss, {name: term for one in results for name, term in one.terms.items()})


@dataclass(frozen=True, slots=True)
class TeacherForcing(TrainingObjective):
    """One forward on the row as it is."""

    def forward_fn(self, row: RowTensors) -> Callable[[Any], tuple[HeadScores, ...]]:
        (query,) = row.queries
        score = ScoreRow(row.inputs, row.supervision, query, self.coord_ids)
        return lambda model: (score(model),)


@dataclass(frozen=True, slots=True)
class SelfContextObjective(TrainingObjective):
    """Channel-A with at least two forwards: the first reads the ground truth, the last the model's own coordinates."""

    settings: SelfContext

    def forwards(self) -> tuple[ObjectivePipeline, ...]:
        """Cross-entropy, for the first forward; everything else, for the last."""
        return self.pipeline.split(*FIRST_FORWARD)

    def forward_fn(self, row: RowTensors) -> Callable[[Any], tuple[HeadScores, ...]]:
        supervision = row.supervision

        def score(model: Any) -> tuple[HeadScores, ...]:
            coord_ids_B = coord_ids_on(self.coord_ids, supervision.position_N.device)
            coord_pos_K = supervision.position_N[supervision.coord_in_N_K]
            columns: list[_CoordColumns] = []

            def coord_logits(hidden_KH: torch.Tensor) -> torch.Tensor:
                if not columns:  # not before the first forward, with which FSDP gathers the table
                    columns.append(_CoordColumns.from_head(output_head(model), coord_ids_B))
                return columns[0](hidden_KH)

            states = self_context_states(model, row.inputs, coord_pos_K, coord_logits, coord_ids_B, self.settings)
            return tuple(
                _scored(hidden_LH[supervision.position_N - 1], model, query, supervision, self.coord_ids)
                for hidden_LH, query in zip(states, row.queries, strict=True)
            )

        return score


def _scored(
    hidden_NH: torch.Tensor, model: Any, query: HeadQuery, supervision: SupervisionTensors, coord_ids: Sequence[int]
) -> HeadScores:
    head = output_head(model)
    return score_head(hidden_NH, head.weight_VH, query, supervision.label_N, coord_ids, head.offset_BH)


@dataclass(frozen=True, slots=True, eq=False)
class _CoordColumns:
    """The head on the coordinate tokens alone; made once a row, as the gradient of a selection of rows is as large as
    the head."""

    rows_BH: torch.Tensor
    offset_BH: torch.Tensor | None

    @classmethod
    def from_head(cls, head: OutputHead, coord_ids_B: torch.Tensor) -> _CoordColumns:
        return cls(head.weight_VH[coord_ids_B], head.offset_BH)

    def __call__(self, hidden_KH: torch.Tensor) -> torch.Tensor:
        z_KB = hidden_KH @ self.rows_BH.T
        return z_KB if self.offset_BH is None else z_KB + hidden_KH.to(self.offset_BH.dtype) @ self.offset_BH.T


def name_channel(name: str, channel: Channel | None) -> str:
    """``loss/token_ce/struct_ce`` → ``loss/A/token_ce/struct_ce``; unchanged outside two-channel training."""
    if channel is None:
        return name
    family, _, rest = name.partition("/")
    return f"{family}/{channel}/{rest}"


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

    @classmethod
    def from_model(cls, loaded: LoadedModel, device: torch.device, dtype: torch.dtype | None = None) -> RowBuilder:
        """For rows that go to ``loaded``'s bare model; ``dtype``: of pixels, None for the model's own."""
        model = loaded.model
        return cls(
            rope_index=model.model.get_rope_index,
            tower=VisionTower.from_model(model),
            image_token_id=loaded.image_token_id,
            attention=loaded.attention,
            dtype=next(model.parameters()).dtype if dtype is None else dtype,
            device=device,
        )

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
        self._rows = Prefetcher(
            rows, self._timed, ahead=1, deadline_s=ROW_DEADLINE_S, timeout_error=_timeout_error, name="rows"
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

    def _timed(self, row: PackedRow) -> tuple[RowTensors, float]:
        started = time.perf_counter()
        return self._build(row), time.perf_counter() - started


def _timeout_error(row: PackedRow) -> RowLate:
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
