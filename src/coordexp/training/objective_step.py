"""What is learned from a packed row: the forwards it goes through, and the modules that score each of them.

Every training but Channel-A has one forward, which all modules of its pipeline score. Channel-A with self-context has
several: cross-entropy belongs to the first, which reads the ground truth; everything about coordinates, the text gate
included, belongs to the last, which reads the model's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordexp.config.objective import Channel
from coordexp.modeling.coord_offset import OutputHead, output_head
from coordexp.modeling.forward import SelfContext, self_context_states, supervised_hidden
from coordexp.objective import (
    HeadQuery,
    HeadScores,
    ObjectivePipeline,
    ObjectiveResult,
    SupervisionTensors,
    score_head,
)
from coordexp.objective.head import coord_ids_on

FIRST_FORWARD = ("token_ce",)


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
    def forward_fn(
        self, inputs: Mapping[str, Any], supervision: SupervisionTensors, queries: Sequence[HeadQuery]
    ) -> Callable[[Any], tuple[HeadScores, ...]]:
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

    def forward_fn(
        self, inputs: Mapping[str, Any], supervision: SupervisionTensors, queries: Sequence[HeadQuery]
    ) -> Callable[[Any], tuple[HeadScores, ...]]:
        """One forward on the row as it is."""
        (query,) = queries
        score = ScoreRow(inputs, supervision, query, self.coord_ids)
        return lambda model: (score(model),)


@dataclass(frozen=True, slots=True)
class SelfContextObjective(TrainingObjective):
    """Channel-A with at least two forwards: the first reads the ground truth, the last the model's own coordinates."""

    settings: SelfContext

    def forwards(self) -> tuple[ObjectivePipeline, ...]:
        """Cross-entropy, for the first forward; everything else, for the last."""
        return self.pipeline.split(*FIRST_FORWARD)

    def forward_fn(
        self, inputs: Mapping[str, Any], supervision: SupervisionTensors, queries: Sequence[HeadQuery]
    ) -> Callable[[Any], tuple[HeadScores, ...]]:
        """As many forwards as the settings say; the first and the last are scored."""

        def score(model: Any) -> tuple[HeadScores, ...]:
            coord_ids_B = coord_ids_on(self.coord_ids, supervision.position_N.device)
            coord_pos_K = supervision.position_N[supervision.coord_in_N_K]
            columns: list[_CoordColumns] = []

            def coord_logits(hidden_KH: torch.Tensor) -> torch.Tensor:
                if not columns:  # not before the first forward, with which FSDP gathers the table
                    columns.append(_CoordColumns.from_head(output_head(model), coord_ids_B))
                return columns[0](hidden_KH)

            states = self_context_states(model, inputs, coord_pos_K, coord_logits, coord_ids_B, self.settings)
            return tuple(
                _scored(hidden_LH[supervision.position_N - 1], model, query, supervision, self.coord_ids)
                for hidden_LH, query in zip(states, queries, strict=True)
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
