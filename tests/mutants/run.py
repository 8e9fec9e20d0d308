"""Would a test notice? Makes each change of ``mutations.yaml``, one at a time, and runs the tests of its module.

    python tests/mutants/run.py [--only parsing] [--json FILE] [--timeout 300]

Changes are made in a copy of ``src``. Libraries are imported once; each change gets a forked process, which has read
nothing of this project yet. ``--json`` is written after every change, and a run that finds it goes on where it stands:
delete it to begin anew. The exit code is 1 while a change survives that no reason calls equivalent.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.yaml")
# What the tests import besides this project: to be read once, not for every change.
LIBRARIES = (
    "pytest", "hypothesis", "numpy", "scipy.optimize", "pycocotools.mask", "PIL.Image", "yaml", "pydantic",
    "rich.console", "torch", "torchvision", "sympy", "accelerate", "peft", "transformers.trainer",
    "transformers.generation.utils", "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl", "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl", "fastapi", "uvicorn", "httpx", "binpacking",
)  # fmt: skip
POLL_S = 0.05
# What looks for garbage behind the tests costs more than most of them.
PYTEST_ARGS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--hypothesis-seed=0")


@dataclass(frozen=True, slots=True)
class Mutation:
    """``old`` in ``file`` becomes ``new``; ``tests`` have to notice, unless ``equivalent`` says why none can."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """The committed list, in its order."""
    return [
        Mutation(group["file"], one["old"], one["new"], tuple(group["tests"]), one.get("equivalent", ""))
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))
        for one in group["mutations"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default="", help="only changes of files whose path holds this text")
    flags.add_argument("--json", type=Path, default=None, help="where the verdicts are kept")
    flags.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a change counts as killed [300]"
    )
    options = flags.parse_args(argv)
    mutations = [one for one in read_mutations() if options.only in one.file]
    known = _known(options.json)
    sound: set[tuple[str, ...]] = set()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        _prepare(Path(folder))
        verdicts: dict[str, str] = {}
        for number, one in enumerate(mutations, start=1):
            started = time.monotonic()
            verdict = "equivalent" if one.equivalent else known.get(one.name)
            if verdict is None:
                _demand_sound(one.tests, sound, options.timeout)
                verdict = _try(one, source, options.timeout)
            verdicts[one.name] = verdict
            print(
                f"{number:3}/{len(mutations)} {verdict:10} {time.monotonic() - started:5.1f} s  {one.name}", flush=True
            )
            if options.json is not None:
                _write(options.json, mutations, {**known, **verdicts})
    counts = Counter(verdicts.values())
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("killed", "survived", "equivalent")))
    return int(counts["survived"] > 0)


def _prepare(folder: Path) -> None:
    """What every forked process inherits."""
    for name in LIBRARIES:
        importlib.import_module(name)
    from hypothesis import Phase, settings

    # The first counterexample is enough: making it small would take minutes.
    settings.register_profile("mutants", phases=(Phase.explicit, Phase.reuse, Phase.generate), deadline=None)
    settings.load_profile("mutants")
    for name in [name for name in sys.modules if name.split(".")[0] == "coordexp"]:
        del sys.modules[name]  # torchvision without CUDA asks this project for help
    sys.dont_write_bytecode = True  # two changes of one file within a second would share their bytecode
    os.environ |= {
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        "OMP_NUM_THREADS": "1",
    }
    sys.path.insert(0, str(folder / "src"))
    os.chdir(ROOT)
    gc.freeze()  # the libraries' objects are not searched again in every process


def _demand_sound(tests: tuple[str, ...], sound: set[tuple[str, ...]], timeout_s: float) -> None:
    """Tests that fail without a change too would call every change killed."""
    if tests not in sound and not _tests_pass(tests, timeout_s):
        raise SystemExit(f"{' '.join(tests)}: these fail as the code is; make them pass first")
    sound.add(tests)


def _try(one: Mutation, source: Path, timeout_s: float) -> str:
    with _changed(source / Path(one.file).relative_to("src"), one.old, one.new):
        return "survived" if _tests_pass(one.tests, timeout_s) else "killed"


@contextlib.contextmanager
def _changed(path: Path, old: str, new: str) -> Iterator[None]:
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{path}: {old!r} stands there {text.count(old)} times; correct {LIST.name}")
    path.write_text(text.replace(old, new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def _tests_pass(tests: Sequence[str], timeout_s: float) -> bool:
    child = os.fork()
    if child == 0:
        os.setsid()  # what its tests start is ended with it
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


def _known(path: Path | None) -> dict[str, str]:
    if path is None or not path.exists():
        return {}
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["mutations"]
    return {
        f"{row['file']}: {row['old']} -> {row['new']}": row["verdict"] for row in rows if row["verdict"] == "killed"
    }


def _write(path: Path, mutations: Sequence[Mutation], verdicts: dict[str, str]) -> None:
    rows = [
        {"file": one.file, "old": one.old, "new": one.new, "verdict": verdicts[one.name]}
        | ({"why": one.equivalent} if one.equivalent else {})
        for one in mutations
        if one.name in verdicts
    ]
    counts = Counter(row["verdict"] for row in rows)
    by_file = {file: dict(Counter(row["verdict"] for row in rows if row["file"] == file)) for file in _files(mutations)}
    document = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "counts": counts, "by_file": by_file}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**document, "mutations": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _files(mutations: Sequence[Mutation]) -> list[str]:
    return list(dict.fromkeys(one.file for one in mutations))


if __name__ == "__main__":
    sys.exit(main())
