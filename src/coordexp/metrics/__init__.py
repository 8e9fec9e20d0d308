"""Metrics: counters, global reduction, and the payload that loggers get. Torch-free."""

from coordexp.metrics.counters import SampleOutcome, rollout_counters
from coordexp.metrics.payload_contract import MetricsPayload
from coordexp.metrics.reduce import reduce_metrics

__all__ = ["MetricsPayload", "SampleOutcome", "reduce_metrics", "rollout_counters"]
