"""The loss: declared modules over one packed row, each term normalised over the whole optimizer step."""

from coordexp.objective.context import ObjectiveContext, SupervisionCounts, SupervisionTensors
from coordexp.objective.coord_math import coord_gate
from coordexp.objective.pipeline import MODULES, ObjectivePipeline, build_pipeline, sft_pipeline

__all__ = [
    "MODULES",
    "ObjectiveContext",
    "ObjectivePipeline",
    "SupervisionCounts",
    "SupervisionTensors",
    "build_pipeline",
    "coord_gate",
    "sft_pipeline",
]
