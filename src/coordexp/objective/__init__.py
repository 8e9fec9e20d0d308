"""The loss: declared modules over one packed row, each term normalised over the whole optimizer step."""

from coordexp.objective.coord_math import coord_gate
from coordexp.objective.head import HeadQuery, HeadScores, SupervisionTensors, score_head
from coordexp.objective.pipeline import (
    MODULES,
    LogitRequest,
    ObjectivePipeline,
    ObjectiveResult,
    RowObjective,
    RowTensors,
    build_pipeline,
    sft_pipeline,
)

__all__ = [
    "MODULES",
    "HeadQuery",
    "HeadScores",
    "LogitRequest",
    "ObjectivePipeline",
    "ObjectiveResult",
    "RowObjective",
    "RowTensors",
    "SupervisionTensors",
    "build_pipeline",
    "coord_gate",
    "score_head",
    "sft_pipeline",
]
