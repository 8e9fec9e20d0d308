"""What a rank adds up between two log lines, and how it becomes global metrics. A metric's line in the table says how:

* counters and shares of a mean: global sum
* seconds, percentiles and 0/1 flags: global maximum
* rates: ratio of globally summed numerator and denominator, never a mean of ratios
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from coordexp import distributed
from coordexp.metrics.rules import Rule
from coordexp.metrics.table import all_metrics, rule_of

RATES: dict[str, tuple[str, str]] = {metric.name: metric.ratio for metric in all_metrics() if metric.ratio is not None}


class MetricSums:
    """What this rank has to say about the steps of one log line."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._channel_steps: Counter[str] = Counter()
        self.steps = 0

    def count_step(self, channel: str | None = None) -> None:
        """One more optimizer step stands in the line; ``channel``: of two-channel training."""
        self.steps += 1
        self._channel_steps[channel or ""] += 1

    def add(self, values: Mapping[str, float]) -> None:
        """Take in the figures of a micro-step, or of any part of a step. Raises ValueError for an unknown name."""
        for name, value in values.items():
            rule = rule_of(name)
            if name not in self._values or rule.over_micro_steps == "last":
                self._values[name] = float(value)
            elif rule.over_micro_steps == "max":
                self._values[name] = max(self._values[name], float(value))
            else:
                self._values[name] += float(value)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of a line that is not full yet; JSON can hold it, exact to the bit."""
        return {"values": dict(self._values), "channel_steps": dict(self._channel_steps), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved line. Raises ValueError for a metric that is no longer known."""
        for name in state["values"]:
            rule_of(name)
        self._values = dict(state["values"])
        self._channel_steps = Counter(state["channel_steps"])
        self.steps = state["steps"]

    def take(self) -> dict[str, float]:
        """Global metrics of the steps since the last call. A collective call: every rank must make it."""
        metrics = reduce_metrics(self._values)
        steps = {
            Rule.SHARE: self.steps,
            Rule.SECONDS: self.steps,
            Rule.SHARE_OF_A: self._channel_steps["A"],
            Rule.SHARE_OF_B: self._channel_steps["B"],
        }
        for name in metrics:
            metrics[name] /= max(1, steps.get(rule_of(name), 1))
        self._values, self.steps = {}, 0
        self._channel_steps.clear()
        return metrics


def reduce_metrics(local: Mapping[str, float]) -> dict[str, float]:
    """Global metrics from this rank's sums and maxima; keys that only some ranks have count as 0 elsewhere.

    A collective call: every rank must make it. Raises ValueError for a name that is not registered.
    """
    total: dict[str, float] = {}
    for part in distributed.gather_json({name: float(value) for name, value in local.items()}):
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif rule_of(name).over_ranks == "max":
                total[name] = max(total[name], value)
            else:
                total[name] += value
    for name, (numerator, denominator) in RATES.items():
        if denominator in total:
            below = total[denominator]
            total[name] = total.get(numerator, 0.0) / below if below else 0.0
    return dict(sorted(total.items()))
