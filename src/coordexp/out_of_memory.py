"""Memory that ran out, on a GPU or a CPU: recognise the error of any library, note in which phase it was raised, and
describe it in one line.

:func:`phase` notes, while the error passes, the requested size and the free memory. :func:`describe` is called in one
place, where the process reports its errors. Imports no torch: its import may be what runs out of memory.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from coordexp.errors import OutOfMemory, RolloutError

Kind = Literal["start", "reading", "engine", "rollouts", "evaluation", "training", "optimizer", "saving"]
"""The activity of the process; the advice depends on it."""

_TEXTS = re.compile(
    r"out of memory|can(?:'|no)t allocate memory|not enough memory|std::bad_alloc|failed to map segment"
    r"|less than desired GPU memory utilization"
    r"|DataLoader worker .* killed by signal: (?:Killed|Bus error)",
    re.IGNORECASE,
)
_ASKED = re.compile(r"(?:tried to allocate|Unable to allocate) ([\d.]+) ?([KMGTP]iB|bytes)", re.IGNORECASE)
_GPU = re.compile(r"(GPU \d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_NOTED = "coordexp_shortage"  # the attribute of an error with its _Shortage
_LONGEST = 300  # characters of a library's own message


@dataclass(frozen=True, slots=True)
class _Shortage:
    kind: Kind
    phase: str
    facts: str
    keys: tuple[str, ...] = ()
    saved: str = ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out: Python's, torch's, CUDA's, NumPy's, vLLM's or the system's."""
    if isinstance(error, (MemoryError, OutOfMemory)) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, (RuntimeError, ImportError, RolloutError)) and _TEXTS.search(str(error)) is not None


def facts_of(error: BaseException) -> str:
    """The requested size and the free memory now, in one sentence without a full stop."""
    text = " ".join(str(error).split())
    if isinstance(error, (OutOfMemory, RolloutError)):
        return text.rstrip(".")
    asked, gpu = _ASKED.search(text), _GPU.search(text)
    wanted = "more memory was needed"
    if asked is not None:
        wanted = f"{_size(float(asked[1])) if asked[2] == 'bytes' else ' '.join(asked.groups())} were needed"
    if gpu is not None:
        return f"{wanted}, and {gpu[1]} has {gpu[3]} of {gpu[2]} free"
    # A GPU's error without numbers and a killed process leave only the library's own message.
    own = "" if asked is not None or not text else f" ({text[:_LONGEST]})"
    on_gpu = "CUDA" in text or "cuda" in text
    return f"{wanted}{own}" + ("" if on_gpu else f", and {_free_memory()}")


@contextmanager
def phase(kind: Kind, name: str) -> Iterator[None]:
    """If memory runs out within it, the error notes ``name``, such as "the rollouts of step 3", unless an inner phase
    has noted its own."""
    try:
        yield
    except BaseException as error:
        if getattr(error, _NOTED, None) is None and is_out_of_memory(error):
            setattr(error, _NOTED, _Shortage(kind, name, facts_of(error)))
        raise


def note_cure(error: BaseException, keys_for: Callable[[Kind], Sequence[str]], saved: str) -> None:
    """Add to an error that passed a :func:`phase` what helps, best first, and a sentence about what is saved."""
    shortage: _Shortage | None = getattr(error, _NOTED, None)
    if shortage is not None:
        setattr(error, _NOTED, replace(shortage, keys=tuple(keys_for(shortage.kind)), saved=saved))


def describe(error: BaseException, rank: int | None = None) -> OutOfMemory | None:
    """The error that a user reads, of one line; None if ``error`` is another one. ``rank``: that of this process, if
    there are several."""
    if not is_out_of_memory(error):
        return None
    shortage: _Shortage | None = getattr(error, _NOTED, None)
    if shortage is None:
        shortage = _Shortage("start", "this command", facts_of(error))
    keys = shortage.keys or ("end other programs that use this memory", "use a smaller model, or a larger machine")
    facts = shortage.facts
    if rank is not None and not facts.startswith("rank "):
        facts = f"rank {rank}: {facts}"
    saved = f". {shortage.saved}" if shortage.saved else ""
    tried = "; ".join(f"({number}) {key}" for number, key in enumerate(keys, start=1))
    return OutOfMemory(f"out of memory in {shortage.phase}: {facts}{saved}. What helps, in this order: {tried}")


THIS_MACHINES = "this machine's"
CGROUP = Path("/sys/fs/cgroup")  # a container's own group


def main_memory() -> tuple[int, int, str] | None:
    """Bytes that this process could still get, and bytes in all, by its tightest limit, and whose that is; None if
    nothing is known."""
    limits: list[tuple[int, int, str]] = []
    status = _fields(Path("/proc/meminfo"))
    if "MemAvailable" in status and "MemTotal" in status:
        limits.append((status["MemAvailable"], status["MemTotal"], THIS_MACHINES))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _fields(Path("/proc/self/status")).get("VmSize")
    if soft != resource.RLIM_INFINITY and used is not None:
        limits.append((max(0, soft - used), soft, "the process's (ulimit -v)"))
    most, now = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    if most is not None and now is not None:
        # Cached files count too, and are dropped when memory is needed.
        cached = _fields(CGROUP / "memory.stat", r"^(inactive_file) (\d+)$", 1).get("inactive_file", 0)
        limits.append((max(0, most - now + cached), most, "the container's"))
    return min(limits, default=None)


def _free_memory() -> str:
    found = main_memory()
    if found is None:
        return "how much is free is unknown"
    free, total, whose = found
    return f"{_size(free)} of {whose} {_size(total)} are free"


def _fields(path: Path, line: str = r"^(\w+):\s+(\d+) kB$", unit: int = 1024) -> dict[str, int]:
    """Sizes in bytes from a file of lines such as ``MemTotal: 16 kB``; empty without such a file."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:  # another system than Linux
        return {}
    return {name: int(count) * unit for name, count in re.findall(line, text, re.MULTILINE)}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, which is written as "max"
        return None


def _size(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.1f} MiB"
