"""The one registry behind reduction and documentation: which line of the table a metric's name falls under.

A name that no line covers is refused when it is emitted: nobody would know whether to add it up. ``<word>`` in a line's
name stands for one part between slashes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from coordexp.metrics.rules import Metric, Rule
from coordexp.metrics.table import SECTIONS


def all_metrics() -> Iterator[Metric]:
    for metrics in SECTIONS.values():
        yield from metrics


@cache
def find_metric(name: str) -> Metric | None:
    """The line of the table that ``name`` falls under; an exact name comes before a pattern."""
    exact, patterns = _index()
    if name in exact:
        return exact[name]
    return next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


def rule_of(name: str) -> Rule:
    """How ``name`` is combined.

    Raises:
        ValueError: no line of the table covers it.
    """
    metric = find_metric(name)
    if metric is None:
        raise ValueError(
            f"metric {name!r} is not registered: add its line to coordexp.metrics.table and run "
            "python docs/generate_metrics.py"
        )
    return metric.rule


@cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    exact: dict[str, Metric] = {}
    patterns: list[tuple[re.Pattern[str], Metric]] = []
    for metric in all_metrics():
        if metric.name in exact or any(other.name == metric.name for _, other in patterns):
            raise ValueError(f"metric {metric.name} is registered twice")
        if "<" in metric.name:
            literal = re.split(r"<[a-z_]+>", metric.name)
            patterns.append((re.compile(r"[^/]+".join(map(re.escape, literal))), metric))
        else:
            exact[metric.name] = metric
    # Of several patterns the one that says most decides: AP_<area> before AP<iou>.
    patterns.sort(key=lambda found: -len(found[1].name.split("<")[0]))
    return exact, patterns
