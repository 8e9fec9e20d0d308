"""``coordexp doctor``: check this machine, with a table to paste into a bug report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordexp import distributed
from coordexp.cli.console import check_checkpoint, open_console, say, vocabulary_of, written_file
from coordexp.errors import DataError

if TYPE_CHECKING:
    from coordexp.doctor import Row

FAILED = 1
WIDTH = 140  # of the table outside of a terminal
MARK_FILE = "doctor.txt"  # marks a folder of --keep, so that a later doctor may replace what is there
STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def doctor(
    gpus: Annotated[
        int | None, typer.Option(min=0, help="Use N GPUs, each with a process of its own; 0 for CPUs. [all]")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint for pushes, answers and throughput. [random weights]")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="A section (exactness …) or a check (engine …); may be repeated. [all]")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", callback=written_file, help="Write the rows as JSON.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep models, configurations and logs in this folder: new, or an earlier --keep."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, max=1e6, help="Seconds that one check may take.")] = 600.0,
) -> None:
    """Check that this machine computes exactly, and how fast.

    Sections: machine, exactness (kernels, and several processes against one), pushes of weights, answers of vLLM,
    throughput. Each check runs in a process of its own, so a crash or a hang is a failed row. Exits with 1 if a check
    failed.
    """
    import multiprocessing

    distributed.be_alone()
    from coordexp.doctor import CHECKS, Settings, diagnose, select
    from coordexp.doctor.check import HEAVY
    from coordexp.temporary import temporary_folder

    checks = select(CHECKS, only or [])
    if model is not None:
        model = check_checkpoint(model)
        vocabulary_of(model)
    if keep is not None:
        _claim(keep)
    multiprocessing.set_forkserver_preload(list(HEAVY))
    started = time.monotonic()
    progress = open_console(stderr=True)
    with ExitStack() as stack:
        folder = keep or stack.enter_context(temporary_folder("coordexp-doctor-"))
        settings = Settings(folder.absolute(), gpus, None if model is None else model.absolute(), timeout)
        rows: list[Row] = []
        for row in diagnose(
            checks,
            settings,
            only or [],
            lambda check: say(progress, f"[{time.monotonic() - started:5.0f} s] {check.name}"),
        ):
            rows.append(row)
            if json_file is not None:  # after each row, so that a doctor that is ended leaves the rows that it has
                _write(json_file, rows, time.monotonic() - started)
    seconds = time.monotonic() - started

    from rich.table import Column, Table
    from rich.text import Text

    from coordexp.doctor import SECTIONS

    advised = any(row.advice and row.result != "ok" for row in rows)
    columns = ["check", "result", "figure", *(["advice"] if advised else [])]
    # Fold: in a narrow terminal, a path or a version that is cut off is of no use.
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
    for section in SECTIONS:
        inside = [row for row in rows if row.section == section]
        if inside:
            table.add_row(Text(section.upper(), style="bold"))
        for row in inside:
            advice = row.advice if row.result != "ok" else ""
            cells = (Text(row.check), Text(row.result, style=STYLES[row.result]), Text(row.figure), Text(advice))
            table.add_row(*cells[: len(columns)])
    console = open_console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(table)
    count = {result: sum(row.result == result for row in rows) for result in STYLES}
    say(console, f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped in {seconds:.0f} s")
    if count["failed"]:
        raise typer.Exit(FAILED)


def _claim(folder: Path) -> None:
    """Mark the folder as a doctor's. Raises DataError if it has other files: checks write folders such as ``model`` and
    ``scenes``, and replace what is there."""
    from coordexp.data.files import check_writable, write_atomically
    from coordexp.reading import OWN_MARK, is_own

    check_writable(folder)
    mark = folder / MARK_FILE
    if folder.is_dir() and any(folder.iterdir()) and not (mark.is_file() and is_own(mark)):
        raise DataError("--keep: has files that no coordexp doctor wrote; name a new folder", path=folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(mark, f"{OWN_MARK}: coordexp doctor --keep replaces the models, scenes and logs of this folder.\n")


def _write(file: Path, rows: Sequence[Row], seconds: float) -> None:
    from coordexp import __version__
    from coordexp.data.files import write_atomically
    from coordexp.reading import OWN_MARK

    content = {"file": OWN_MARK, "coordexp": __version__, "seconds": seconds, "rows": [asdict(row) for row in rows]}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(content, indent=2) + "\n")
