"""Everything that one GPU shows, part by part: `make gpu`.

Each part is a process with a limit of its own; its output goes to logs/PART.log, its figures to PART.json as soon as
there are any, and a line to summary.json when it ends. A part that fails or takes too long ends alone. Without a GPU,
`--cpu` runs every part with a tiny model. Checkpoints with random weights are written while the tests run. Answers are
those of the demo's model, widened to the shape of 2B: with `--narrow FOLDER` those of one that wide_checkpoint.py
taught Qwen's tokenizer, with `--wide FOLDER` of a model as it is.

On one H100 the usual parts take at most 12 minutes; `--only` and `--all` run the others, mostly further engines, whose
first start takes more than a minute each.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_material import ORIGIN
from reporting import COMMIT, machine, parser, print_machine, usable_cores, write_json
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
TOTAL_S, END_S = 720.0, 10.0
LEAST_S = 20.0  # a part with less time left does not start
PYTHON = sys.executable
# What --cpu takes instead of large material. Under a name of its own, because what is there stays for later runs.
ON_CPU = {"2B": "tiny", "4B": "tiny", "8B": "tiny", "photos": "small_photos"}


@dataclass(frozen=True, slots=True)
class Part:
    """``command``: of the options. ``material``: of gpu_material.py, which it reads. ``extra``: runs only if named, or
    with ``--all`` or ``--cpu``."""

    name: str
    limit_s: float
    command: Callable[[Options], list[object]]
    material: tuple[str, ...] = ()
    cpu_limit_s: float = 600.0
    extra: bool = False


class Options(Namespace):
    cpu: bool
    all: bool
    only: list[str]
    skip: list[str]
    total_limit: float
    out: Path | None
    work: Path
    narrow: Path | None
    commit: str | None
    wide: Path | None

    def made(self, name: str) -> Path:
        """The folder of a piece of material."""
        if name == "wide" and self.wide is not None:
            return self.wide
        return self.work / self.name_of(name)

    def name_of(self, name: str) -> str:
        """Under which name a piece of material is written: with --cpu the tiny model in place of large ones, and small
        photographs."""
        return ON_CPU.get(name, name) if self.cpu else name


def main(argv: Sequence[str] | None = None) -> None:
    options = read_options(argv)
    if options.commit is not None:
        os.environ[COMMIT] = options.commit
    console, where = Console(width=140), machine()
    if not where["gpu"] and not options.cpu:
        raise SystemExit("no GPU is visible to torch; --cpu runs every part with a tiny model")
    options.out = out = (options.out or HERE / "results" / folder_name(where, options.cpu)).absolute()
    (out / "logs").mkdir(parents=True, exist_ok=True)
    options.work = options.work.absolute()  # parts start in the project's root
    options.narrow, options.wide = (path and path.absolute() for path in (options.narrow, options.wide))
    print_machine(console, where, out=out, total_limit=options.total_limit)
    chosen = [part for part in PARTS if part.name in options.only and part.name not in options.skip]
    deadline = time.monotonic() + options.total_limit
    summary: list[dict[str, Any]] = []
    with ExitStack() as stack:
        writing = Material(options, {one for part in chosen for one in part.material})
        stack.callback(writing.end)
        for part in chosen:
            row = run_part(part, options, writing, deadline)
            summary.append(row)
            write_json(out / "summary.json", "gpu", where, vars(options), summary, complete=False)
            console.print(f"{row['part']}: {row['result']}, {row['seconds']:.0f} s  {row['note']}", highlight=False)
    console.print(table(summary))
    write_json(out / "summary.json", "gpu", where, vars(options), summary)
    if any(row["result"] in ("failed", "timeout") for row in summary):
        raise SystemExit(1)


def read_options(argv: Sequence[str] | None) -> Options:
    flags, names = parser(__doc__), [part.name for part in PARTS]
    flags.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    flags.add_argument("--all", action="store_true", help="the extra parts too")
    flags.add_argument("--skip", nargs="+", choices=names, default=[], metavar="PART")
    flags.add_argument("--cpu", action="store_true", help="a tiny model on the CPU: shows that every part runs")
    flags.add_argument("--total-limit", type=float, default=None, metavar="S", help=f"[{TOTAL_S:.0f}; none with --cpu]")
    flags.add_argument("--out", type=Path, help="folder of figures and logs [results/HARDWARE-DATE next to this file]")
    flags.add_argument("--work", type=Path, default=Path("outputs/gpu"), help="of checkpoints and runs [outputs/gpu]")
    flags.add_argument("--narrow", type=Path, help="a checkpoint that wide_checkpoint.py wrote, to be widened")
    flags.add_argument("--wide", type=Path, help="a checkpoint that answers and costs what a wide model costs")
    flags.add_argument("--commit", help="of the source tree, where git does not know it")
    options = flags.parse_args(argv, Options())
    if options.total_limit is None:
        options.total_limit = 1e6 if options.cpu else TOTAL_S
    if options.only is None:
        options.only = [part.name for part in PARTS if options.cpu or options.all or not part.extra]
    demo = HERE.parent / "checkpoints" / "demo-stage1"
    if options.cpu and options.wide is None:
        options.wide = demo
    elif options.narrow is None and options.wide is None:
        options.narrow = demo
    return options


def folder_name(where: Mapping[str, Any], cpu: bool) -> str:
    """Hardware and date, such as ``h100-80gb-hbm3-2026-11-26``; with ``cpu`` not the GPU's, which tables read."""
    name = (None if cpu else where["gpu"]) or f"cpu-{where['cores']}core"
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join([*(word for word in words if word != "nvidia"), datetime.now(UTC).date().isoformat()])


class Material:
    """Checkpoints and images, written by one process in the background in the order in which parts need them."""

    def __init__(self, options: Options, names: set[str]) -> None:
        self._options, self._process = options, None
        writes = [name for name in ("photos", "wide_scenes", "2B", "wide", "4B", "8B") if name in names]
        if options.wide is not None:
            writes = [name for name in writes if name != "wide"]
        elif "wide" in writes:
            self._refuse_another_wide()
        writes = list(dict.fromkeys(options.name_of(name) for name in writes))
        missing = [name for name in writes if not (options.work / name).exists()]
        if missing:
            command = [PYTHON, HERE / "gpu_material.py", options.work, "--write", *missing]
            command += ["--narrow", options.narrow] if options.narrow is not None else []
            self._process = start(command, options, "material")

    def _refuse_another_wide(self) -> None:
        wide, narrow = self._options.made("wide"), self._options.narrow
        note = wide / ORIGIN
        origin = note.read_text(encoding="utf-8") if note.is_file() else "an unknown checkpoint"
        if wide.is_dir() and narrow is not None and origin != str(narrow.resolve()):
            raise SystemExit(
                f"{wide} was widened from {origin}, not from --narrow {narrow}; delete it, and "
                f"{self._options.work}/engine with its answers, or name another folder with --work"
            )

    def wait(self, names: Sequence[str], deadline: float) -> str | None:
        """Wait for what a part reads; the reason if it will not come."""
        for name in names:
            while not (path := self._options.made(name)).exists():
                if self._process is None or self._process.poll() is not None:
                    return f"{path} was not written; see logs/material.log"
                if time.monotonic() > deadline:
                    return f"{path} is not written yet"
                time.sleep(0.2)
        return None

    def end(self) -> None:
        if self._process is not None:
            end(self._process)


def run_part(part: Part, options: Options, writing: Material, deadline: float) -> dict[str, Any]:
    """Run a part to its end or limit. Returns its line of the summary."""
    started = time.monotonic()

    def row(result: str, note: str = "", **figures: Any) -> dict[str, Any]:
        return {
            "part": part.name, "result": result, "seconds": time.monotonic() - started, "note": note,
            "figures": figures,
        }  # fmt: skip

    if problem := writing.wait(part.material, deadline - LEAST_S):
        return row("failed", problem)
    limit = min(part.cpu_limit_s if options.cpu else part.limit_s, deadline - time.monotonic())
    if limit < LEAST_S:
        return row("skipped", "no time left")
    assert options.out is not None
    result_file = options.out / f"{part.name}.json"
    result_file.unlink(missing_ok=True)
    log = log_of(options, part.name)
    process = start([*part.command(options), *json_flag(part, result_file)], options, part.name)
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end(process)
    figures = json.loads(result_file.read_text(encoding="utf-8")) if result_file.is_file() else {}
    last = last_line(log.read_text(errors="replace"), is_error=code != 0)
    if code == 0:
        return row("ok", note_of(figures) or last, **short(figures))
    if code is None:
        return row("timeout", f"after {limit:.0f} s; {note_of(figures) or last}", **short(figures))
    return row("failed", f"exit code {code}: {last}", **short(figures))


def last_line(output: str, is_error: bool) -> str:
    """The last line, or the last one that names an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"^error: |Error\b|^FAILED ", line)] if is_error else []
    return (errors or lines or [""])[-1][:300]


def json_flag(part: Part, file: Path) -> list[object]:
    return [] if part.name in ("tests", "as_shipped") else ["--json", file]


def start(command: Sequence[object], options: Options, name: str) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, from the project's root and with its sources; output to the log."""
    root = HERE.parent
    path = os.pathsep.join([str(root / "src"), str(root / "tests"), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "PYTHONPYCACHEPREFIX": str(options.work / "pycache"),  # parts start dozens of processes
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(options.work / "vllm_cache"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with log_of(options, name).open("wb") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=root,
            env=environment,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process with all that it started, first kindly."""
    for number, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def log_of(options: Options, name: str) -> Path:
    assert options.out is not None
    return options.out / "logs" / f"{name}.log"


def short(document: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a part's results, without its log lines."""
    results = document.get("results")
    return (
        {key: value for key, value in results.items() if isinstance(value, float)} if isinstance(results, dict) else {}
    )


def note_of(document: Mapping[str, Any]) -> str:
    """The main figures in a line."""
    if "rows" in document:
        counted = [row["result"] for row in document["rows"]]
        return ", ".join(f"{counted.count(result)} {result}" for result in ("ok", "failed", "skipped"))
    found = document.get("results") or {}
    texts = []
    if "tokens_per_s" in found:
        texts.append(f"{found['tokens_per_s']:,.0f} tokens/s, {found['images_per_s']:.1f} images/s")
    if "busy" in found:
        texts.append(f"GPU busy {found['busy']:.2f}, {found['launches']:,} launches")
    if "mfu" in found:
        texts.append(f"MFU {found['mfu']:.3f}")
    if "of_estimate" in found:
        texts.append(f"{found['allocated_peak_gb']:.1f} GB, {found['of_estimate']:.2f} of the estimate")
    if "start_s" in found:
        texts.append(f"start {found['start_s']:.0f} s")
    for key in sorted((key for key in found if key.startswith("batch_")), key=lambda key: int(key[6:])):
        texts.append(f"batch {key[6:]}: {found[key]['boxes_per_s']:.0f} boxes/s")
    if "full" in found.get("push", {}):
        texts.append(f"push {found['push']['full']['push_s']:.2f} s")
    return "; ".join(texts)


def table(summary: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("part", "result", "seconds", "figures")
    for row in summary:
        shown.add_row(row["part"], row["result"], f"{row['seconds']:.0f}", row["note"])
    return shown


# --- the parts, in their order ---


def run_of(name: str, file: str, size: str, steps: int, *keys: str, on_gpu: Sequence[str] = (), scenes: str = "photos",
           warm_up: int = 2) -> Callable[[Options], list[object]]:  # fmt: skip
    """``coordexp train`` of a shipped file; ``keys`` everywhere, ``on_gpu`` only on GPUs."""
    small = ["global_max_length=2048", "rollout_matching.max_new_tokens=32", "training.effective_batch_size=8",
             "training.use_cpu=true", "rollout_matching.repeat_terminate.min_new_tokens=16"]  # fmt: skip
    if file.startswith("stage1"):
        small = small[:-1]
    if "colocate" in file:
        small.append("rollout_matching.vllm.enforce_eager=true")
        small.append("rollout_matching.vllm.engine_args.max_num_batched_tokens=1024")

    def command(options: Options) -> list[object]:
        more = small if options.cpu else list(on_gpu)
        count, first = (1, 1) if options.cpu else (steps, warm_up)
        return [
            PYTHON, HERE / "gpu_run.py", file, "--name", name, "--model", options.made(size), "--scenes",
            options.made(scenes) / "scenes.jsonl", "--folder", options.work / "runs" / name, "--steps", count,
            "--warm-up", first, "--log", log_of(options, f"{name}.train"), "--set", *keys, *more,
        ]  # fmt: skip

    return command


def engine(kind: str) -> Callable[[Options], list[object]]:
    def command(options: Options) -> list[object]:
        small = ["--batches", "4,1", "--images", "4,1", "--dtype", "float32"] if options.cpu else []
        folder = options.work / ("engine_on_cpu" if options.cpu else "engine")
        return [
            PYTHON, HERE / "gpu_engine.py", "--kind", kind, "--model", options.made("wide"), "--scenes",
            options.made("wide_scenes") / "scenes.jsonl", "--folder", folder, *small,
        ]  # fmt: skip

    return command


def tests(options: Options) -> list[object]:
    return [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests/gpu/test_on_gpu.py"]


def as_shipped(options: Options) -> list[object]:
    """Several at once, because a tiny model leaves most of a GPU free; those with an engine one after the other."""
    at_once = max(1, min(6, usable_cores() // 3))
    return [PYTHON, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "-n", at_once, "--dist", "loadgroup",
            "tests/gpu/test_as_shipped_on_gpu.py"]  # fmt: skip


def profile(options: Options) -> list[object]:
    """Rows as full as photographs of this size make them."""
    keys = ["training.use_cpu=true", "global_max_length=3500"] if options.cpu else []
    return [
        PYTHON, HERE / "gpu_profile.py", "--model", options.made("2B"), "--scenes",
        options.made("photos") / "scenes.jsonl", "--folder", options.work / "runs" / "profile", "--set",
        "training.per_device_train_batch_size=16", *keys,
    ]  # fmt: skip


def doctor(*sections: str) -> Callable[[Options], list[object]]:
    """Some sections and checks, with the model that answers: other parts measure the speed of training."""

    def command(options: Options) -> list[object]:
        chosen = ["--gpus", "0"] if options.cpu else ["--model", options.made("wide")]
        only = [word for section in sections for word in ("--only", section)]
        folder = options.work / "doctor"
        return [PYTHON, "-m", "coordexp", "doctor", *chosen, *only, "--timeout", "180", "--keep", folder]

    return command


# Tokens of an answer of random weights, which never end one: as many as ten boxes take in Qwen's tokenizer.
TEN_BOXES = ("rollout_matching.max_new_tokens=300",)
PARTS = (
    Part("tests", 60, tests),
    Part("as_shipped", 200, as_shipped),
    Part("sft", 90, run_of("sft", "stage1/sft.yaml", "2B", 4), ("photos", "2B")),
    Part("lora", 80, run_of("lora", "stage1/lora.yaml", "2B", 4), ("photos", "2B")),
    Part("engine_plain", 180, engine("plain"), ("wide", "wide_scenes")),
    Part("engine_skipped", 150, engine("skipped"), ("wide", "wide_scenes")),
    Part(
        "rewritten_colocate",
        220,
        run_of(
            "rewritten_colocate", "stage2_rollout_aligned/rewritten_colocate.yaml", "2B", 3,
            on_gpu=(*TEN_BOXES, "rollout_matching.decoding.skip_forced_tokens=false"),
        ),
        ("photos", "2B"),
    ),
    Part(
        "colocate_answers",
        120,
        run_of(
            "colocate_answers", "stage2_rollout_aligned/rewritten_colocate.yaml", "wide", 3,
            scenes="wide_scenes",
        ),
        ("wide", "wide_scenes"),
        extra=True,
    ),
    Part("profile", 60, profile, ("photos", "2B")),
    Part("doctor", 180, doctor("machine", "exactness", "training"), ("wide",)),
    Part("doctor_engine", 300, doctor("engine", "skipping", "stage-2"), ("wide",), extra=True),
    *(
        Part(
            name,
            90,
            run_of(
                name, f"stage2_rollout_aligned/{name}.yaml", "2B", 1,
                on_gpu=("rollout_matching.max_new_tokens=64",), warm_up=1,
            ),
            ("photos", "2B"),
            extra=True,
        )
        for name in ("rewritten", "hf")
    ),
    Part("engine_start", 90, engine("start"), ("wide", "wide_scenes"), extra=True),
    Part("lora_8b", 120, run_of("lora_8b", "stage1/lora.yaml", "8B", 4), ("photos", "8B"), extra=True),
    Part("lora_4b", 90, run_of("lora_4b", "stage1/lora.yaml", "4B", 4), ("photos", "4B"), extra=True),
)  # fmt: skip

if __name__ == "__main__":
    main()
