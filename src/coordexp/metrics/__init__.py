"""The table of metrics, their counters, and their reduction to one payload per step. Torch-free."""

from coordexp.metrics.reduce import MetricsPayload, MetricSums, reduce_metrics, rollout_counters

__all__ = ["MetricSums", "MetricsPayload", "reduce_metrics", "rollout_counters"]
