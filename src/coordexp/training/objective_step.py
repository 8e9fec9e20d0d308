"""What is learned from a packed row: the forwards it goes through, and the modules that score each of them.

Every training but Channel-A has one forward, which all modules of its pipeline score. Channel-A with self-context has
several: cross-entropy belongs to the first, which reads the ground truth; everything about coordinates, the text gate
included, belongs to the last, which reads the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from coordexp.config.objective import Channel
from coordexp.modeling.coord_offset import OutputHead, output_head
from coordexp.modeling.self_context import SelfContext, self_context_states
from coordexp.objective import (
    HeadQuery,
    HeadScores,
    ObjectiveContext,
    ObjectivePipeline,
    SupervisionCounts,
    SupervisionTensors,
    score_head,
)
from coordexp.objective.pipeline import ObjectiveResult
from coordexp.training.scoring import ScoreRow

FIRST_FORWARD = ("token_ce",)


class TrainingObjective(Protocol):
    """What one training, or one channel of it, does with a row: what it asks of the head, what the wrapped model runs
    as its forward, and the loss."""

    def queries(self, supervision: SupervisionTensors) -> tuple[HeadQuery, ...]: ...

    def forward_fn(
        self, inputs: Mapping[str, Any], supervision: SupervisionTensors, queries: Sequence[HeadQuery]
    ) -> Callable[[Any], tuple[HeadScores, ...]]: ...

    def result(
        self,
        supervision: SupervisionTensors,
        queries: Sequence[HeadQuery],
        scores: Sequence[HeadScores],
        counts: SupervisionCounts,
    ) -> ObjectiveResult: ...


@dataclass(frozen=True, slots=True)
class TeacherForcing:
    """One forward on the row as it is."""

    pipeline: ObjectivePipeline
    coord_ids: tuple[int, ...]

    def queries(self, supervision: SupervisionTensors) -> tuple[HeadQuery, ...]:
        return (self.pipeline.query(supervision),)

    def forward_fn(
        self, inputs: Mapping[str, Any], supervision: SupervisionTensors, queries: Sequence[HeadQuery]
    ) -> Callable[[Any], tuple[HeadScores, ...]]:
        (query,) = queries
        score = ScoreRow(inputs, supervision, query, self.coord_ids)
        return lambda model: (score(model),)

    def result(
        self,
        supervision: SupervisionTensors,
        queries: Sequence[HeadQuery],
        scores: Sequence[HeadScores],
        counts: SupervisionCounts,
    ) -> ObjectiveResult:
        (query,), (found,) = queries, scores
        return self.pipeline(ObjectiveContext(supervision, query, found, counts))


@dataclass(frozen=True, slots=True)
class SelfContextObjective:
    """Channel-A with at least two forwards."""

    pipeline: ObjectivePipeline
    coord_ids: tuple[int, ...]
    settings: SelfContext

    def _parts(self) -> tuple[ObjectivePipeline, ObjectivePipeline]:
        return self.pipeline.split(*FIRST_FORWARD)

    def queries(self, supervision: SupervisionTensors) -> tuple[HeadQuery, ...]:
        return tuple(part.query(supervision) for part in self._parts())

    def forward_fn(
        self, inputs: Mapping[str, Any], supervision: SupervisionTensors, queries: Sequence[HeadQuery]
    ) -> Callable[[Any], tuple[HeadScores, ...]]:
        def score(model: Any) -> tuple[HeadScores, ...]:
            coord_ids_B = torch.tensor(self.coord_ids, device=supervision.position_N.device)
            coord_pos_K = supervision.position_N[supervision.coord_in_N_K]
            columns: list[_CoordColumns] = []

            def coord_logits(hidden_KH: torch.Tensor) -> torch.Tensor:
                if not columns:  # not before the first forward, with which FSDP gathers the table
                    columns.append(_CoordColumns.from_head(output_head(model), coord_ids_B))
                return columns[0](hidden_KH)

            states = self_context_states(model, inputs, coord_pos_K, coord_logits, coord_ids_B, self.settings)
            head = output_head(model)
            return tuple(
                score_head(
                    hidden_LH[supervision.position_N - 1],
                    head.weight_VH,
                    query,
                    supervision.label_N,
                    self.coord_ids,
                    head.offset_BH,
                )
                for hidden_LH, query in zip(states, queries, strict=True)
            )

        return score

    def result(
        self,
        supervision: SupervisionTensors,
        queries: Sequence[HeadQuery],
        scores: Sequence[HeadScores],
        counts: SupervisionCounts,
    ) -> ObjectiveResult:
        first, last = (
            part(ObjectiveContext(supervision, query, found, counts))
            for part, query, found in zip(self._parts(), queries, scores, strict=True)
        )
        return ObjectiveResult(first.loss + last.loss, {**first.terms, **last.terms})


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
