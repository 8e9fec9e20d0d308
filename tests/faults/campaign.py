"""``make faults``: inject every fault of this folder, interrupt every shipped configuration in every way, and write the
table fault → promised → seen → seconds.

Each fault adds a line to ``--log``. A later campaign skips faults that the log has as promised, so a campaign can be
stopped and continued; delete the file to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ELSEWHERE = (
    "as_shipped/test_interruptions.py",
    "as_shipped/test_servers.py::test_three_servers_answer_one_trainer",
    "integration/test_launch_swift.py::test_a_server_without_the_guard_fails_before_training",
)
ALL = [str(HERE), *(f"{HERE.parent}/{name}" for name in ELSEWHERE)]
AS_PROMISED = "as promised"
# Rows that were run at b290dcee too, and failed there: the table marks them.
FAILED_BEFORE = (HERE / "failed_at_b290dcee.txt").read_text(encoding="utf-8").splitlines()


@dataclass
class Row:
    """One fault. ``promised``: the test's name as a sentence. ``held``: whether the promise was kept."""

    id: str
    group: str
    fault: str
    promised: str
    seen: str = AS_PROMISED
    held: bool = True
    seconds: float = 0.0
    commit: str = ""
    when: str = ""


class Log:
    """pytest plugin that logs each fault when it ends, and skips those that an earlier campaign logged as promised."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path = path
        self.rows: dict[str, Row] = {}
        self.waiting: dict[str, Row] = {}
        self._deadline = deadline
        self._commit = subprocess.run(
            ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a killed campaign may leave half a line
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for line in whole.splitlines():
            row = Row(**json.loads(line))
            self.rows[row.id] = row

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        done = {row.id for row in self.rows.values() if row.held}
        known = [item for item in items if item.nodeid in done]
        items[:] = [item for item in items if item.nodeid not in done]
        config.hook.pytest_deselected(items=known)
        for item in items:
            group = (sys.modules[item.function.__module__].__doc__ or "").partition("\n")[0]
            case = item.callspec.id if hasattr(item, "callspec") else ""
            promised = item.originalname.removeprefix("test_").replace("_", " ")
            promised += " (not at b290dcee)" * (item.nodeid in FAILED_BEFORE)
            self.waiting[item.nodeid] = Row(item.nodeid, group, case.replace("_", " ") or promised, promised)

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.waiting[report.nodeid]
        row.seconds += report.duration
        row.seen = next((value for name, value in report.user_properties if name == "seen"), row.seen)
        if report.outcome != "passed":
            row.held = False
            text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
            row.seen = f"{report.outcome} in {report.when}: {' '.join(text.split())[:200]}"
        if report.when == "teardown":
            row.commit, row.when = self._commit, datetime.now(UTC).isoformat(timespec="seconds")
            self.rows[row.id] = self.waiting.pop(row.id)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.monotonic() > self._deadline:
            raise pytest.exit.Exception("the campaign's minutes are over; start it again to continue", 0)


def markdown(rows: Mapping[str, Row], not_injected: int, heading: str) -> str:
    failed = sum(not row.held for row in rows.values())
    kills = [row for row in rows.values() if row.fault.startswith("SIGKILL")]
    seconds = sum(row.seconds for row in rows.values())
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")  # noqa: E731
    commits = Counter(row.commit for row in rows.values())
    lines = [
        heading,
        "",
        f"{len(rows)} faults, {failed} not as promised, {not_injected} not injected yet, {seconds:.0f} s. "
        f"{len(kills)} of them are kills, of which {sum(row.held for row in kills)} resumed bit-equal. Commits: "
        f"{', '.join(f'{commit} ({count})' for commit, count in commits.items())}.",
        "",
    ]
    for group in sorted({row.group for row in rows.values()}):
        lines += [f"## {group}", "", "| fault | promised | seen | s |", "|---|---|---|---|"]
        lines += [
            f"| {cell(row.fault)} | {cell(row.promised)} | {cell(row.seen)} | {row.seconds:.1f} |"
            for row in sorted(rows.values(), key=lambda row: row.id)
            if row.group == group
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="number of runs that are killed and started again")
    parser.add_argument("--log", type=Path, default=Path("outputs/faults.jsonl"), help="one line per injected fault")
    parser.add_argument("--out", type=Path, required=True, help="folder of faults.md and faults.json")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this many minutes")
    parser.add_argument("--table-only", action="store_true", help="only write the table of the log")
    arguments, further = parser.parse_known_args()
    os.environ |= {"COORDEXP_KILLS": str(arguments.kills), "COORDEXP_CAMPAIGN": "1"}
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    log = Log(arguments.log, time.monotonic() + 60 * arguments.minutes)
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", *(further or ALL)]
    code = pytest.main([*options, *(["--collect-only"] if arguments.table_only else [])], plugins=[log])
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    heading = f"# Faults, {now}\n\n{platform.platform()}, {os.cpu_count()} cores. Command: `make faults`."
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "faults.md").write_text(markdown(log.rows, len(log.waiting), heading), encoding="utf-8")
    rows = [asdict(row) for row in sorted(log.rows.values(), key=lambda row: row.id)]
    (arguments.out / "faults.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # all of them are in the log
        code = pytest.ExitCode.OK
    sys.exit(int(code) or int(any(not row.held for row in log.rows.values())))


if __name__ == "__main__":
    main()
