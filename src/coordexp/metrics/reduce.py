"""Counters of rollouts, sums of a rank between two log entries, their reduction to global metrics, and the payload for
loggers. The rule is in the metric's line of the table:

* counters and shares of a mean: global sum
* seconds, percentiles and 0/1 flags: global maximum
* rates: ratio of globally summed numerator and denominator, never a mean of ratios
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coordexp import distributed
from coordexp.matching import duplicate_indices
from coordexp.metrics.table import Rule, all_metrics, rule_of
from coordexp.records import DropReason, TokenRole
from coordexp.targets import SampleOutcome

RATES: dict[str, tuple[str, str]] = {metric.name: metric.ratio for metric in all_metrics() if metric.ratio is not None}


def rollout_counters(outcomes: Iterable[SampleOutcome]) -> Counter[str]:
    """Sums by name, ``rollout/…`` and ``match/…``. No IoU-type number is among them: those belong to evaluation."""
    sums: Counter[str] = Counter()
    for outcome in outcomes:
        parsed, match = outcome.parsed, outcome.match
        sums["rollout/samples_total"] += 1
        sums["rollout/valid_pred_objects_total"] += len(parsed.objects)
        sums["rollout/duplicates_total"] += len(duplicate_indices(parsed.objects))
        sums["rollout/parse_dropped_invalid"] += parsed.num_dropped
        sums["rollout/excluded_ambiguous_total"] += parsed.dropped.get(DropReason.AMBIGUOUS_COORDS, 0)
        for reason, count in parsed.dropped.items():
            sums[f"rollout/dropped/{reason.value}"] += count
        sums["rollout/parse_truncated_total"] += int(outcome.rollout.truncated)
        sums["rollout/repeat_terminate_triggered_sequences"] += int(outcome.rollout.repeat_terminated)
        sums["rollout/gt_objects_total"] += len(match.pairs) + len(match.fn_gt_idx)
        sums["rollout/matched_total"] += len(match.pairs)
        sums["rollout/fp_total"] += len(match.fp_pred_idx)
        sums["rollout/left_out_total"] += len(outcome.target.left_out_pred_idx)
        sums["rollout/taken_as_complete_total"] += int(outcome.taken_as_complete)
        sums["rollout/fn_appended_total"] += len(match.fn_gt_idx)
        sums["rollout/gating_rejections_total"] += match.num_gate_rejections
        sums["match/mixed_kind_total"] += outcome.num_mixed_kind
        sums["rollout/gen_new_tokens_total"] += len(outcome.rollout.response_token_ids)
        sums["rollout/prefix_coord_targets_total"] += int(
            (outcome.target.roles_T[outcome.target.coord_pos_K] == TokenRole.MATCHED_COORD).sum()
        )
    return sums


class MetricSums:
    """Values of this rank for the steps of one log entry."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._channel_steps: Counter[str] = Counter()
        self._steps_with_slots: Counter[str] = Counter()  # by channel too
        self.steps = 0

    def count_step(self, channel: str | None = None, *, has_slots: bool = True) -> None:
        """Count one optimizer step into the current log entry. ``channel``: of two-channel training. ``has_slots``:
        whether any rank has a coordinate slot in it; images without objects have none."""
        self.steps += 1
        self._channel_steps[channel or ""] += 1
        self._steps_with_slots[channel or ""] += int(has_slots)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of a micro-step, or of any part of a step. Raises ValueError for an unknown name."""
        _combine(self._values, values, lambda rule: rule.over_micro_steps)

    def state_dict(self) -> dict[str, Any]:
        """State of an unfinished log entry for a checkpoint; bit-exact as JSON."""
        counts = {"channel_steps": dict(self._channel_steps), "steps_with_slots": dict(self._steps_with_slots)}
        return {"values": dict(self._values), **counts, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved log entry. Raises ValueError for a metric that is no longer in the table."""
        for name in state["values"]:
            rule_of(name)
        self._values = dict(state["values"])
        self._channel_steps = Counter(state["channel_steps"])
        self._steps_with_slots = Counter(state.get("steps_with_slots", state["channel_steps"]))  # an earlier version's
        self.steps = state["steps"]

    def take(self) -> dict[str, float]:
        """Global metrics of the steps since the last call. A collective call: every rank must make it."""
        metrics = reduce_metrics(self._values)
        steps = {
            Rule.SHARE: self.steps,
            Rule.SECONDS: self.steps,
            Rule.SHARE_OF_A: self._channel_steps["A"],
            Rule.SHARE_OF_B: self._channel_steps["B"],
            Rule.SLOTS: self._steps_with_slots.total(),
            Rule.SLOTS_OF_A: self._steps_with_slots["A"],
            Rule.SLOTS_OF_B: self._steps_with_slots["B"],
        }
        for name in metrics:
            metrics[name] /= max(1, steps.get(rule_of(name), 1))
        self._values, self.steps = {}, 0
        self._channel_steps.clear()
        self._steps_with_slots.clear()
        return metrics


def reduce_metrics(local: Mapping[str, float]) -> dict[str, float]:
    """Global metrics from this rank's sums and maxima; keys that only some ranks have count as 0 elsewhere.

    A collective call: every rank must make it. Raises ValueError for a name that is not registered.
    """
    total: dict[str, float] = {}
    for part in distributed.gather_json({name: float(value) for name, value in local.items()}):
        _combine(total, part, lambda rule: rule.over_ranks)
    for name, (numerator, denominator) in RATES.items():
        if denominator in total:
            below = total[denominator]
            total[name] = total.get(numerator, 0.0) / below if below else 0.0
    return dict(sorted(total.items()))


def _combine(total: dict[str, float], values: Mapping[str, float], how: Callable[[Rule], str]) -> None:
    for name, value in values.items():
        rule = how(rule_of(name))
        if name not in total or rule == "last":
            total[name] = float(value)
        elif rule == "max":
            total[name] = max(total[name], float(value))
        else:
            total[name] += float(value)


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MetricsPayload:
    """``metrics`` is flat: family/name → number. Values are global; see :mod:`coordexp.metrics.reduce`."""

    mode: Literal["train", "eval"]
    global_step: int
    metrics: Mapping[str, float]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        # Check types too: True == 1 == 1.0, but they differ in JSON.
        if type(self.schema_version) is not int or self.schema_version != SCHEMA_VERSION:
            raise ValueError(f"metrics payload of schema {self.schema_version!r}; this version speaks {SCHEMA_VERSION}")
        if self.mode not in ("train", "eval"):
            raise ValueError(f"metrics payload of mode {self.mode!r}; expected 'train' or 'eval'")
        if type(self.global_step) is not int or self.global_step < 0:
            raise ValueError(f"metrics payload of step {self.global_step!r}; expected an integer from 0 up")
        for name, value in self.metrics.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"metric names are non-empty strings, not {name!r}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"metric {name} is {value!r}; metrics are numbers")
