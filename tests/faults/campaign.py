"""``make faults``: every fault of this folder, and the table fault → promised → seen → seconds."""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@dataclass
class Row:
    """One fault. ``promised``: the test's name, which is a sentence."""

    fault: str
    promised: str
    seen: str = "as promised"
    seconds: float = 0.0


class Table:
    """Collects what pytest sees."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def pytest_itemcollected(self, item: Any) -> None:
        promised = item.originalname.removeprefix("test_").replace("_", " ")
        case = item.callspec.id if hasattr(item, "callspec") else inspect.getmodule(item.function).__doc__.split(":")[0]
        self.rows[item.nodeid] = Row(case, promised)

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.rows[report.nodeid]
        row.seconds += report.duration
        if report.outcome != "passed":
            row.seen = f"{report.outcome.upper()} in {report.when}"

    def markdown(self, heading: str) -> str:
        failed = sum(row.seen != "as promised" for row in self.rows.values())
        seconds = sum(row.seconds for row in self.rows.values())
        cell = lambda text: text.replace("|", "\\|").replace("\n", " ")  # noqa: E731
        return "\n".join([
            heading,
            "",
            f"{len(self.rows)} faults, {failed} not as promised, {seconds:.0f} s.",
            "",
            "| fault | promised | seen | s |",
            "|---|---|---|---|",
            *(
                f"| {cell(row.fault)} | {cell(row.promised)} | {row.seen} | {row.seconds:.1f} |"
                for row in self.rows.values()
            ),
            "",
        ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many runs are killed and started again")
    parser.add_argument("--out", type=Path, required=True, help="the table's file")
    arguments, further = parser.parse_known_args()
    os.environ["COORDEXP_KILLS"] = str(arguments.kills)
    table = Table()
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(HERE), *further], plugins=[table])
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    heading = f"# Faults, {now}\n\n{platform.platform()}, {os.cpu_count()} cores, {arguments.kills} kills."
    arguments.out.write_text(table.markdown(heading), encoding="utf-8")
    sys.exit(code)


if __name__ == "__main__":
    main()
