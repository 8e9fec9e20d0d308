"""Writes the tables of ``docs/metrics.md`` from the registry of metrics; the text between them is written by hand.

python docs/generate_metrics.py            # write them
python docs/generate_metrics.py --check    # exit 1 if a table is not what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from coordexp.metrics.table import SECTIONS, Metric, Rule

TARGET = Path(__file__).with_name("metrics.md")
_TABLE = re.compile(r"(?<=<!-- table: )([a-z_0-9]+)( -->\n).*?(?=<!-- end of table -->)", re.S)


def page(text: str) -> str:
    """``text`` with every table as the registry has it.

    Raises:
        ValueError: a section without its place in the text, or a place without its section.
    """
    places = [match[1] for match in _TABLE.finditer(text)]
    if sorted(places) != sorted(SECTIONS):
        raise ValueError(f"{TARGET.name} has places for {sorted(places)}; the registry has {sorted(SECTIONS)}")
    return _TABLE.sub(lambda match: f"{match[1]}{match[2]}{_table(SECTIONS[match[1]])}\n", text)


def _table(metrics: tuple[Metric, ...]) -> str:
    return "\n".join(_evaluation(metrics) if metrics[0].rule is Rule.EVALUATION else _steps(metrics))


def _steps(metrics: tuple[Metric, ...]) -> Iterator[str]:
    yield "| name | unit | over steps | over ranks | meaning |"
    yield "|---|---|---|---|---|"
    for metric in metrics:
        steps, ranks = metric.rule.over_steps, metric.rule.over_ranks
        yield f"| `{metric.name}` | {metric.unit} | {steps} | {ranks} | {metric.meaning} |"


def _evaluation(metrics: tuple[Metric, ...]) -> Iterator[str]:
    yield "| name | unit | meaning |"
    yield "|---|---|---|"
    for metric in metrics:
        yield f"| `{metric.name}` | {metric.unit} | {metric.meaning} |"


def main() -> None:
    """Write the tables, or compare them with ``--check``."""
    text = TARGET.read_text(encoding="utf-8")
    wanted = page(text)
    if "--check" in sys.argv[1:]:
        if text != wanted:
            sys.exit(f"{TARGET} is out of date; run: python docs/generate_metrics.py")
        return
    TARGET.write_text(wanted, encoding="utf-8")
    print(f"wrote the tables of {TARGET}")


if __name__ == "__main__":
    main()
