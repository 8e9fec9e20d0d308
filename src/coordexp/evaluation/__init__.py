"""Rollouts on a validation set → detection figures, tables and pictures."""

from coordexp.evaluation.detection import Prediction, detection_counts, detection_metrics, match_by_desc
from coordexp.evaluation.predict import evaluate_dataset, predict

__all__ = ["Prediction", "detection_counts", "detection_metrics", "evaluate_dataset", "match_by_desc", "predict"]
