"""Check that the tests notice each change of ``mutations.yaml``: apply one at a time and run the tests of its module.

    python tests/mutants/run.py [--jobs 2] [--only parsing …] [--text TEXT] [--again] [--timeout 300] [--list-stale]

Changes are applied to a copy of ``src``. Libraries are imported once; each change gets a forked process that has not
imported this project. The first failing test ends it, and must pass without the change. ``verdicts.json`` is written
after every change: a later run keeps each verdict if the source file and the tests are still the same (``--again``
keeps none), and tries first what killed a change of the same file before. So a run can be stopped and continued.

Verdicts: ``killed`` (a test failed), ``survived`` (no test failed), ``equivalent`` (the list gives the reason why no
test can fail), ``stale`` (the text is not exactly once in the file, or a test file is missing), ``unsound`` (the test
fails without the change too). The exit code is 1 if any change survived, is stale or is unsound.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.yaml")
VERDICT_FILE = Path(__file__).with_name("verdicts.json")
# Libraries that the tests import, imported once for all changes.
LIBRARIES = (
    "pytest", "hypothesis", "numpy", "scipy.optimize", "pycocotools.mask", "PIL.Image", "yaml", "pydantic",
    "rich.console", "torch", "torchvision", "sympy", "accelerate", "peft", "transformers.trainer",
    "transformers.generation.utils", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl", "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl", "fastapi", "uvicorn", "httpx", "binpacking",
)  # fmt: skip
ASSETS = ("configs", "checkpoints")  # coordexp.data.files looks for them next to src
POLL_S = 0.05
PASSED = (0, 4)  # 4: pytest knows no such test, which an earlier run named
MOST_KILLERS = 4
MOST_BYTES = 12 << 30
# pytest's collection of garbage after the tests takes longer than most of them.
PYTEST_ARGS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--hypothesis-seed=0")
GOOD = ("killed", "equivalent")
VERDICTS = (*GOOD, "survived", "stale", "unsound")


@dataclass(frozen=True, slots=True)
class Mutation:
    """``old`` in ``file`` becomes ``new``; ``tests`` must fail, unless ``equivalent`` gives the reason why none can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    def stale(self) -> str | None:
        """Why the change cannot be applied to the present tree, or None."""
        if missing := [test for test in self.tests if not (ROOT / test).is_file()]:
            return f"no file {', '.join(missing)}"
        path = ROOT / self.file
        if not path.is_file():
            return "no such file"
        count = path.read_text(encoding="utf-8").count(self.old)
        return None if count == 1 else f"the text is there {count} times"

    def fingerprint(self) -> str:
        """Hash of the source file and of the tests: a verdict holds while they are the same."""
        digest = hashlib.sha256()
        for path in (self.file, *self.tests):
            digest.update((ROOT / path).read_bytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``by`` is the test that failed ("" if time ran out); ``fingerprint`` that of its mutation at that time."""

    verdict: str
    fingerprint: str = ""
    by: str = ""
    seconds: float = 0.0


def read_mutations(path: Path = LIST) -> list[Mutation]:
    return [
        Mutation(group["file"], one["old"], one["new"], tuple(group["tests"]), one.get("equivalent", ""))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))
        for one in group["mutations"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--only", nargs="+", default=[""], help="only changes of files with one of these texts in their path"
    )
    flags.add_argument("--text", default="", help="only changes with this text in what they replace or write")
    flags.add_argument("--jobs", type=int, default=1, help="processes [1]")
    flags.add_argument("--again", action="store_true", help="keep no verdict of an earlier run")
    flags.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a change counts as killed [300]"
    )
    flags.add_argument("--list-stale", action="store_true", help="list stale entries, run no test")
    options = flags.parse_args(argv)
    mutations = [
        one
        for one in read_mutations()
        if any(text in one.file for text in options.only) and options.text in one.old + one.new
    ]
    stale = {one: why for one in mutations if (why := one.stale()) is not None}
    for one, why in stale.items():
        print(f"stale: {one.name} ({why})", flush=True)
    if options.list_stale:
        print(f"{len(stale)} of {len(mutations)} entries of {LIST.name} are stale")
        return int(bool(stale))
    before = _read_verdicts()
    verdicts = {one: Verdict("stale") for one in stale} | {
        one: Verdict("equivalent") for one in mutations if one.equivalent and one not in stale
    }
    for one in mutations:
        known = before.get(one.name)
        if one in verdicts or known is None or options.again:
            continue
        if known.verdict == "killed" and known.fingerprint == one.fingerprint():
            verdicts[one] = known
    _record(verdicts)
    left = [one for one in mutations if one not in verdicts]
    print(f"{len(mutations)} changes, {len(left)} to run", flush=True)
    if left:
        _run(left, options.jobs, options.timeout)
    after = _read_verdicts()
    results = [(one, after[one.name].verdict) for one in mutations]
    for one, verdict in results:
        if verdict not in GOOD:
            print(f"{verdict}: {one.name}")
    counts = Counter(verdict for _, verdict in results)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    return int(any(counts[verdict] for verdict in VERDICTS if verdict not in GOOD))


def _run(mutations: Sequence[Mutation], jobs: int, timeout_s: float) -> None:
    """Every change, file by file; each job has its own copy of ``src``."""
    for name in LIBRARIES:
        importlib.import_module(name)
    files = list(dict.fromkeys(one.file for one in mutations))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    for file in [*files, *[None] * jobs]:
        queue.put(file)
    workers = [context.Process(target=_work, args=(queue, mutations, timeout_s)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a job ended with an error; start again to continue")


def _work(queue: Any, mutations: Sequence[Mutation], timeout_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ASSETS:
            (Path(folder) / name).symlink_to(ROOT / name)
        _prepare(Path(folder))
        sound: dict[str, bool] = {}
        while (file := queue.get()) is not None:
            killers = _killers(file)
            for one in [one for one in mutations if one.file == file]:
                verdict = _try(one, source, timeout_s, killers, sound)
                if verdict.by and verdict.verdict == "killed":
                    killers = [verdict.by, *[test for test in killers if test != verdict.by]]
                _record({one: verdict})
                print(f"{verdict.verdict:10} {verdict.seconds:5.1f} s  {one.name}", flush=True)


def _killers(file: str) -> list[str]:
    """Tests that killed changes of this file in an earlier run, the most frequent first."""
    rows = [row for name, row in _read_verdicts().items() if name.startswith(f"{file}: ") and row.by]
    return [test for test, _ in Counter(row.by for row in rows).most_common() if (ROOT / test.split("::")[0]).is_file()]


def _prepare(folder: Path) -> None:
    from hypothesis import Phase, settings

    # The first counterexample is enough: shrinking it would take minutes.
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
    settings.load_profile("mutants")
    for name in [name for name in sys.modules if name.split(".")[0] == "coordexp"]:
        del sys.modules[name]  # torchvision without CUDA imports a part of this project
    sys.dont_write_bytecode = True  # two changes of one file within a second would share their bytecode
    os.environ |= {
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "OMP_NUM_THREADS": "1",
    }
    sys.path.insert(0, str(folder / "src"))
    os.chdir(ROOT)
    gc.freeze()  # keep the garbage collector of each process off the libraries' objects


def _try(one: Mutation, source: Path, timeout_s: float, killers: Sequence[str], sound: dict[str, bool]) -> Verdict:
    started = time.monotonic()
    path = source / Path(one.file).relative_to("src")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(one.old, one.new), encoding="utf-8")
    try:
        # Killers first, a few: each costs the start of its module where it does not fail.
        first = [test for test in killers if test.split("::")[0] in one.tests][:MOST_KILLERS]
        failed = _first_failure(first, timeout_s) if first else None
        if failed is None:
            failed = _first_failure(one.tests, timeout_s)
    finally:
        path.write_text(text, encoding="utf-8")
    verdict = "survived"
    if failed is not None:  # a test that fails anyway would count every change as killed
        checked = (failed,) if failed else one.tests
        key = " ".join(checked)
        if key not in sound:
            sound[key] = _first_failure(checked, timeout_s) is None
        verdict = "killed" if sound[key] else "unsound"
    return Verdict(verdict, one.fingerprint(), failed or "", round(time.monotonic() - started, 1))


class _FirstFailure:
    """A pytest plugin that writes the first failed test, or the file that could not be collected, to a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.descriptor, f"{report.nodeid}\n".encode())

    pytest_collectreport = pytest_runtest_logreport


def _first_failure(tests: Sequence[str], timeout_s: float) -> str | None:
    """The first of ``tests`` that fails, "" if they are not done in time, None if all pass."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # so that processes started by the tests end with it
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))  # a loop without end may fill a list
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        pytest = importlib.import_module("pytest")
        code = 1
        try:
            code = pytest.main([*PYTEST_ARGS, *tests], plugins=[_FirstFailure(writer)])
        finally:
            os._exit(int(code))
    os.close(writer)
    deadline = time.monotonic() + timeout_s
    code = None
    while code is None and time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also whatever the tests have left
    if code is None:
        os.waitpid(child, 0)
    os.set_blocking(reader, False)
    with open(reader, encoding="utf-8") as pipe:
        first = (pipe.read() or "").partition("\n")[0]
    return None if code in PASSED else first


def _read_verdicts() -> dict[str, Verdict]:
    if not VERDICT_FILE.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(VERDICT_FILE.read_text(encoding="utf-8"))
    return {row.pop("mutation"): Verdict(**row) for row in rows}


def _record(verdicts: Mapping[Mutation, Verdict]) -> None:
    """Add to the file of verdicts, in the order of the list; jobs take turns."""
    with LIST.open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = _read_verdicts() | {one.name: verdict for one, verdict in verdicts.items()}
        rows = [{"mutation": one.name, **asdict(known[one.name])} for one in read_mutations() if one.name in known]
        fresh = VERDICT_FILE.with_suffix(".new")  # replaced at once, so that a run killed here loses nothing
        fresh.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        fresh.replace(VERDICT_FILE)


if __name__ == "__main__":
    sys.exit(main())
