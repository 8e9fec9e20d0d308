"""Answers for a dataset → detection figures, comparisons, tables and pictures."""

from coordexp.evaluation.answers import Detection, ImageAnswer, read_answers
from coordexp.evaluation.detection import detection_metrics, match_by_desc
from coordexp.evaluation.summary import Summary, summarise

__all__ = [
    "Detection",
    "ImageAnswer",
    "Summary",
    "detection_metrics",
    "match_by_desc",
    "read_answers",
    "summarise",
]
