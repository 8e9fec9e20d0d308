"""The loss: declared modules over one packed row, each term normalised over the whole optimizer step."""

from coordexp.objective.context import (
    HeadQuery,
    HeadScores,
    ObjectiveContext,
    SupervisionCounts,
    SupervisionTensors,
    Wants,
    head_query,
)
from coordexp.objective.coord_math import coord_gate
from coordexp.objective.head import score_head
from coordexp.objective.pipeline import MODULES, ObjectivePipeline, build_pipeline, sft_pipeline

__all__ = [
    "MODULES",
    "HeadQuery",
    "HeadScores",
    "ObjectiveContext",
    "ObjectivePipeline",
    "SupervisionCounts",
    "SupervisionTensors",
    "Wants",
    "build_pipeline",
    "coord_gate",
    "head_query",
    "score_head",
    "sft_pipeline",
]
