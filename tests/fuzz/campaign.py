"""``make fuzz``: changed inputs of every kind for some minutes, and a line of counts for each.

An input must be read, or be refused by an error of the project; within :data:`DEADLINE_S`, and without growth of memory
or open files. Number N of a kind and seed is the same input everywhere. One that fails is saved below ``--out``, and
``--only KIND --first N --count 1`` reads it again.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

DEADLINE_S = 20.0  # of an input, which takes milliseconds on an idle machine
GROWTH_MIB = 64.0
_MOST_FAILURES = 20  # of a kind, after which it ends
_WARM_UP = 0.25  # share of the inputs after which memory is measured first


class TooSlow(BaseException):
    """An input took longer than :data:`DEADLINE_S`."""


class Source(Protocol):
    """Inputs of one kind."""

    def change(self, draw: random.Random) -> tuple[Path, bytes]: ...

    def read(self, path: Path, content: bytes, /) -> str | None: ...


@dataclass
class Tally:
    """The outcome of the inputs of a kind. ``failures``: one text each."""

    kind: str
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    growth_mib: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        accepted = self.inputs - self.refused - len(self.failures)
        return (
            f"{self.kind:<20} {self.inputs:>7} inputs {accepted:>7} accepted {self.refused:>7} refused "
            f"{len(self.failures):>3} failed; slowest {self.slowest_s:5.2f} s, {self.growth_mib:+6.1f} MiB"
        )


def spend(
    kind: str, source: Source, seconds: float, saved: Path, seed: int = 0, first: int = 0, count: int = 1 << 60
) -> Tally:
    """Read inputs of a kind from number ``first`` on for ``seconds``, at most ``count``."""
    gc.freeze()  # the collections below pass over what was there before
    tally, begun, early = Tally(kind), time.monotonic(), None
    while tally.inputs < count and len(tally.failures) < _MOST_FAILURES:
        spent = time.monotonic() - begun
        if spent > seconds:
            break
        if early is None and spent > _WARM_UP * seconds:
            early = _held()
        number = first + tally.inputs
        path, content = source.change(random.Random(f"{kind} {seed} {number}"))
        tally.inputs += 1
        at = time.monotonic()
        try:
            with _deadline():
                tally.refused += source.read(path, content) is not None
        except (Exception, TooSlow) as error:
            saved.mkdir(parents=True, exist_ok=True)
            file = saved / f"{kind.replace(' ', '_')}-{seed}-{number}{path.suffix}"
            file.write_bytes(content)
            where = "".join(traceback.format_exception(error)[-3:])
            tally.failures.append(f"{file} ({path.name}): {type(error).__name__}: {str(error)[:1000]}\n{where[:2000]}")
        tally.slowest_s = max(tally.slowest_s, time.monotonic() - at)
    tally.seconds = time.monotonic() - begun
    if early is not None:
        resident_mib, open_files = _held()
        tally.growth_mib = resident_mib - early[0]
        if tally.growth_mib > GROWTH_MIB:
            tally.failures.append(f"memory grew by {tally.growth_mib:.0f} MiB in {tally.inputs} inputs")
        if (more := open_files - early[1]) > 2:
            tally.failures.append(f"{more} more files are open after {tally.inputs} inputs")
    return tally


@contextmanager
def _deadline() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooSlow(f"no answer after {DEADLINE_S:g} s")

    kept = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)


def _held() -> tuple[float, int]:
    """MiB of memory, and open files, of this process."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return resident, len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="for all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", help="a kind; may be repeated")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=1 << 60, help="inputs of a kind")
    parser.add_argument("--out", type=Path, default=Path("outputs/fuzz"), help="folder for inputs that fail")
    given = parser.parse_args()
    if not 0 < given.minutes < math.inf:
        parser.error(f"--minutes {given.minutes}: not a finite number above 0 (MINUTES= of `make fuzz`)")
    warnings.simplefilter("ignore")
    from fuzz.kinds import KINDS, Bench
    from fuzz.served import served_requests

    os.environ["COORDEXP_CACHE"] = tempfile.mkdtemp(prefix="coordexp-fuzz-cache-")
    kinds = given.only or [*KINDS, "HTTP"]
    share = 60 * given.minutes / len(kinds)
    tallies = []
    for kind in kinds:
        arguments = (share, given.out, given.seed, given.first, given.count)
        if kind == "HTTP":
            with served_requests() as requests:
                tallies.append(spend(kind, requests, *arguments))
        else:
            with tempfile.TemporaryDirectory() as folder:
                tallies.append(spend(kind, Bench(KINDS[kind], Path(folder) / "sound"), *arguments))
        print(tallies[-1], flush=True)
    for failure in (one for tally in tallies for one in tally.failures):
        print(f"\n{failure}")
    failed = sum(len(tally.failures) for tally in tallies)
    print(f"{sum(tally.inputs for tally in tallies)} inputs of {len(kinds)} kinds, {failed} failed; seed {given.seed}")
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
