"""Rank-local sums → global metrics. One rule per family, applied here and nowhere else.

* counters and loss shares: global sum
* ``time/*_s``, ``*_p99`` and 0/1 flags: global maximum
* rates: ratio of globally summed numerator and denominator, never a mean of ratios
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordexp import distributed


@dataclass(frozen=True, slots=True)
class Rate:
    """A derived metric: ``numerator / denominator`` of two counters, 0 when the denominator is 0."""

    numerator: str
    denominator: str


RATES: dict[str, Rate] = {
    "rollout/parse_truncated_rate": Rate("rollout/parse_truncated_total", "rollout/samples_total"),
    "rollout/match_rate": Rate("rollout/matched_total", "rollout/gt_objects_total"),
    "rollout/precision": Rate("rollout/matched_total", "rollout/valid_pred_objects_total"),
    "rollout/gen_new_tokens_mean": Rate("rollout/gen_new_tokens_total", "rollout/samples_total"),
    "packing/post_rollout_fill": Rate("packing/selected_tokens_total", "packing/capacity_tokens_total"),
}
FLAGS = frozenset({"rollout/decode_greedy", "rollout/decode_beam", "rollout/decode_sample"})


def is_maximum(name: str) -> bool:
    """Whether ``name`` is aggregated by maximum instead of by sum."""
    return (name.startswith("time/") and name.endswith("_s")) or name.endswith("_p99") or name in FLAGS


def reduce_metrics(local: Mapping[str, float]) -> dict[str, float]:
    """Global metrics from this rank's sums and maxima; keys that only some ranks have count as 0 elsewhere.

    A collective call: every rank must make it.
    """
    total: dict[str, float] = {}
    for part in distributed.gather_json({name: float(value) for name, value in local.items()}):
        for name, value in part.items():
            if name not in total:
                total[name] = value
            elif is_maximum(name):
                total[name] = max(total[name], value)
            else:
                total[name] += value
    for name, rate in RATES.items():
        if rate.denominator in total:
            below = total[rate.denominator]
            total[name] = total.get(rate.numerator, 0.0) / below if below else 0.0
    return dict(sorted(total.items()))
