"""A packed row through the model and its language head: the function that the wrapped model runs as its forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordexp.modeling.coord_offset import output_head
from coordexp.modeling.forward import supervised_hidden
from coordexp.objective import HeadQuery, HeadScores, SupervisionTensors, score_head


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRow:
    """``model(forward_fn=ScoreRow(…))``: what ``query`` asks of the head at one row's supervised positions."""

    inputs: Mapping[str, Any]
    supervision: SupervisionTensors
    query: HeadQuery
    coord_ids: Sequence[int]

    def __call__(self, model: Any) -> HeadScores:
        hidden_NH = supervised_hidden(model, self.inputs, self.supervision.position_N)
        head = output_head(model)
        return score_head(
            hidden_NH, head.weight_VH, self.query, self.supervision.label_N, self.coord_ids, head.offset_BH
        )
