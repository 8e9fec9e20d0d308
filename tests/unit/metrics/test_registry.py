"""The table of metrics: every line says how it is combined, and a name falls under one line."""

from __future__ import annotations

import pytest

from coordexp.metrics.registry import all_metrics, find_metric, rule_of
from coordexp.metrics.rules import Metric, Rule


@pytest.mark.parametrize("metric", list(all_metrics()), ids=lambda metric: metric.name)
def test_every_line_is_complete_and_found_by_its_name(metric: Metric) -> None:
    assert metric.meaning
    assert find_metric(metric.name.replace("<", "").replace(">", "")) is metric
    if metric.ratio is not None:
        assert {rule_of(counter) for counter in metric.ratio} == {Rule.COUNT}, "a rate divides two global sums"
    if metric.name.startswith("time/"):
        assert metric.rule is Rule.SECONDS and metric.name.endswith("_s") and metric.unit == "seconds"
    if metric.name.endswith("_total"):
        assert metric.rule is Rule.COUNT
    if metric.name.endswith(("_p90", "_p99")):
        assert metric.rule is Rule.PEAK
    assert "iou" not in metric.name or metric.name.startswith(("eval_", "loss/")), "IoU figures are evaluation's"


@pytest.mark.parametrize("ratio", [None, ("rollout/a_total", "rollout/b_total")])
def test_a_rate_and_nothing_else_names_its_counters(ratio: tuple[str, str] | None) -> None:
    rule = Rule.COUNT if ratio else Rule.RATE
    with pytest.raises(ValueError, match="a rate, and only a rate"):
        Metric("rollout/x", "0..1", rule, "x", ratio)
