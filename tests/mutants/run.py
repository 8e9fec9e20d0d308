"""Check that the tests notice each change of ``mutations.yaml``: apply one at a time and run the tests of its module.

    python tests/mutants/run.py [--only parsing …] [--text TEXT] [--json FILE] [--timeout 300] [--list-stale]

Changes are applied to a copy of ``src``. Libraries are imported once; each change gets a forked process that has not
imported this project. ``--json`` is written after every change. A later run keeps each verdict if the source file and
the tests are still the same, so a run can be stopped and continued.

Verdicts: ``killed`` (a test failed), ``survived`` (no test failed), ``equivalent`` (the list gives the reason why no
test can fail), ``stale`` (the text is not exactly once in the file, or a test file is missing), ``unsound`` (the tests
fail without the change too). The exit code is 1 if any change survived, is stale or is unsound.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.yaml")
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
    flags.add_argument("--json", type=Path, default=None, help="file of the verdicts, read and written")
    flags.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a change counts as killed [300]"
    )
    flags.add_argument("--list-stale", action="store_true", help="list stale entries, run no test")
    options = flags.parse_args(argv)
    listed = read_mutations()
    mutations = [
        one for one in listed if any(text in one.file for text in options.only) and options.text in one.old + one.new
    ]
    stale = {one: why for one in mutations if (why := one.stale()) is not None}
    for one, why in stale.items():
        print(f"stale: {one.name} ({why})", flush=True)
    if options.list_stale:
        print(f"{len(stale)} of {len(mutations)} entries of {LIST.name} are stale")
        return int(bool(stale))
    verdicts = _kept_verdicts(options.json, listed)
    sound: dict[tuple[str, ...], bool] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ASSETS:
            (Path(folder) / name).symlink_to(ROOT / name)
        _prepare(Path(folder))
        for number, one in enumerate(mutations, start=1):
            started = time.monotonic()
            if one in stale:
                verdict = "stale"
            elif one.equivalent:
                verdict = "equivalent"
            else:
                verdict = verdicts.get(one) or _try(one, source, options.timeout, sound)
            verdicts[one] = verdict
            seconds = time.monotonic() - started
            print(f"{number:3}/{len(mutations)} {verdict:10} {seconds:5.1f} s  {one.name}", flush=True)
            if options.json is not None:
                _write(options.json, listed, verdicts)
    for one in mutations:
        if verdicts[one] not in GOOD:
            print(f"{verdicts[one]}: {one.name}")
    counts = Counter(verdicts[one] for one in mutations)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS))
    return int(any(counts[verdict] for verdict in VERDICTS if verdict not in GOOD))


def _prepare(folder: Path) -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
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


def _try(one: Mutation, source: Path, timeout_s: float, sound: dict[tuple[str, ...], bool]) -> str:
    if one.tests not in sound:  # tests that fail anyway would count every change as killed
        sound[one.tests] = _tests_pass(one.tests, timeout_s)
    if not sound[one.tests]:
        return "unsound"
    path = source / Path(one.file).relative_to("src")
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(one.old, one.new), encoding="utf-8")
    try:
        return "survived" if _tests_pass(one.tests, timeout_s) else "killed"
    finally:
        path.write_text(text, encoding="utf-8")


def _tests_pass(tests: Sequence[str], timeout_s: float) -> bool:
    child = os.fork()
    if child == 0:
        os.setsid()  # so that processes started by the tests end with it
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        pytest = importlib.import_module("pytest")
        code = 1
        try:
            code = pytest.main([*PYTEST_ARGS, *tests])
        finally:
            os._exit(int(code))
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _kept_verdicts(path: Path | None, listed: Sequence[Mutation]) -> dict[Mutation, str]:
    if path is None or not path.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["mutations"]
    killed = {
        (f"{row['file']}: {row['old']} -> {row['new']}", row.get("fingerprint"))
        for row in rows
        if row["verdict"] == "killed"
    }
    return {one: "killed" for one in listed if not one.stale() and (one.name, one.fingerprint()) in killed}


def _write(path: Path, mutations: Sequence[Mutation], verdicts: dict[Mutation, str]) -> None:
    rows = [
        {"file": one.file, "old": one.old, "new": one.new, "verdict": verdicts[one]}
        | ({"why": one.equivalent} if one.equivalent else {})
        | ({"fingerprint": one.fingerprint()} if verdicts[one] == "killed" else {})
        for one in mutations
        if one in verdicts
    ]
    document = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "mutations": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")  # replaced at once, so that a run killed here loses nothing
    fresh.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())
