"""The loss: declared modules over one packed row, each term normalised over the whole optimizer step."""

from coordexp.objective.coord_math import coord_gate
from coordexp.objective.head import HeadQuery, HeadScores, LogitRequest, score_head
from coordexp.objective.pipeline import MODULES, ObjectivePipeline, ObjectiveResult, build_pipeline, sft_pipeline
from coordexp.objective.supervision import SupervisionTensors

__all__ = [
    "MODULES",
    "HeadQuery",
    "HeadScores",
    "LogitRequest",
    "ObjectivePipeline",
    "ObjectiveResult",
    "SupervisionTensors",
    "build_pipeline",
    "coord_gate",
    "score_head",
    "sft_pipeline",
]
