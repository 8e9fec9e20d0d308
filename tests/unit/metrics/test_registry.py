"""The table of metrics: every line says how it is combined, and a name falls under one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordexp.metrics.table import Metric, Rule, all_metrics, find_metric, rule_of


def test_every_metric_is_complete_and_found_by_its_name() -> None:
    wrong = {metric.name: list(complaints(metric)) for metric in all_metrics()}
    assert {name: found for name, found in wrong.items() if found} == {}


def complaints(metric: Metric) -> Iterator[str]:
    if not metric.meaning:
        yield "has no meaning"
    if find_metric(metric.name.replace("<", "").replace(">", "")) is not metric:
        yield "is not found by its name"
    if metric.ratio is not None and {rule_of(counter) for counter in metric.ratio} != {Rule.COUNT}:
        yield "is a rate that does not divide two global sums"
    if metric.name.startswith("time/") and not (
        metric.rule is Rule.SECONDS and metric.name.endswith("_s") and metric.unit == "seconds"
    ):
        yield "is a time, and not in seconds"
    if metric.name.endswith("_total") and metric.rule is not Rule.COUNT:
        yield "is a total, and no count"
    if metric.name.endswith(("_p90", "_p99")) and metric.rule is not Rule.PEAK:
        yield "is a percentile, and no peak"
    if "iou" in metric.name and not metric.name.startswith(("eval_", "loss/")):
        yield "is an IoU figure outside of evaluation"


@pytest.mark.parametrize("ratio", [None, ("rollout/a_total", "rollout/b_total")])
def test_only_a_rate_names_its_counters(ratio: tuple[str, str] | None) -> None:
    rule = Rule.COUNT if ratio else Rule.RATE
    with pytest.raises(ValueError, match="rollout/x"):
        Metric("rollout/x", "0..1", rule, "x", ratio)
