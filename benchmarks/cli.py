"""How long does a command take that needs no model: start-up, help, mistakes, and commands that only read?

Each command runs as a process of its own: wall-clock and processor seconds (the best of the repeats), and whether it
imported torch, which alone takes seconds. Above the goal of one second, a row is marked. Bytecode is cached as
by default, even if PYTHONDONTWRITEBYTECODE is set here, as for a user's second command.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reporting import machine, parser, positive, print_machine, with_threads, write_json
from rich.console import Console
from rich.table import Table

from coordexp.data.files import asset
from coordexp.data.jsonl import read_jsonl
from coordexp.data.scenes import SPARSE, write_scenes
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, write_answers

GOAL_S = 1.0
_CODE = (
    "import sys\nfrom coordexp.cli import main\n"
    "try:\n    main(sys.argv[1:])\n"
    "finally:\n    sys.stderr.write('\\nTORCH' if 'torch' in sys.modules else '\\nLIGHT')\n"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """One command: its best wall-clock and processor seconds, its exit code, and whether torch was imported."""

    kind: str
    command: str
    wall_s: float
    cpu_s: float
    code: int
    torch: bool


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--repeats", type=positive, default=3, help="runs of each command; the best counts [3]")
    flags.add_argument("--images", type=positive, default=4, help="images of the dataset and of the answers [4]")
    flags.add_argument("--note", help="stored with the figures, e.g. other work of the machine")
    options = flags.parse_args(argv)
    console = Console(markup=False, emoji=False)
    where = machine()
    print_machine(console, where, repeats=options.repeats, images=options.images, note=options.note)
    environment = with_threads(os.environ, options.threads)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            time_command(Path(folder), kind, words, options.repeats, environment)
            for kind, words in commands(Path(folder), options.images)
        ]
    table = Table("", "command", "wall s", "CPU s", "exit", "torch")
    for row in rows:
        late = " > 1 s" if row.cpu_s > GOAL_S else ""
        table.add_row(row.kind, row.command, f"{row.wall_s:.2f}", f"{row.cpu_s:.2f}{late}", str(row.code),
                      "yes" if row.torch else "no")  # fmt: skip
    console.print(table)
    write_json(options.json, "cli", where, vars(options), [asdict(row) for row in rows])


def commands(folder: Path, images: int) -> list[tuple[str, list[str]]]:
    """(kind, words) of every command, on files of ``images`` images that are written to ``folder``."""
    records = read_jsonl(write_scenes(folder, images, SPARSE, 1))
    found = (ScoredObject("red circle", "bbox_2d", (1, 2, 300, 400), 0.5),)
    answers = [
        ImageAnswer(record.sample_id, str(record.image), record.width, record.height, record.objects, found)
        for record in records
    ]
    write_answers(answers, folder / "run" / "predictions.jsonl")
    config = asset("configs/demo/stage1.yaml")
    broken = folder / "broken.yaml"
    broken.write_text("trainnig: {}\n", encoding="utf-8")
    run, data = str(folder / "run"), str(folder / "scenes.jsonl")
    model = str(asset("checkpoints/demo-stage1"))
    return [
        ("start-up", ["--version"]),
        ("start-up", ["--help"]),
        ("start-up", ["data", "convert", "voc", "--help"]),
        ("mistake", ["train", str(broken)]),
        ("mistake", ["train", str(config), "model.model=nothing", "custom.train_jsonl=nothing"]),
        ("mistake", ["evaluate", "nothing"]),
        ("mistake", ["predict", "nothing.jpg", "--model", model]),
        ("mistake", ["data", "complete", data, "--model", "nothing", "--out", str(folder / "out.jsonl")]),
        ("mistake", ["model", "export", "nothing", "out"]),
        ("reads", ["config", "check", str(config)]),
        ("reads", ["data", "check", data]),
        ("reads", ["data", "check", data, "--sheet", str(folder / "sheet.png")]),
        ("reads", ["data", "stats", data]),
        ("reads", ["evaluate", run]),
        ("reads", ["view", run, "--out", str(folder / "view.html")]),
        ("reads", ["export", "csv", run, "--out", str(folder / "csv")]),
        ("reads", ["model", "info", model]),
        ("reads", ["init", data, "--model", model, "--out", str(folder / "stage1.yaml"), "--overwrite"]),
    ]


def time_command(folder: Path, kind: str, words: list[str], repeats: int, environment: Mapping[str, str]) -> Timed:
    """The command ``coordexp *words``, run ``repeats`` times from ``folder``."""
    wall, cpu = [], []
    done: subprocess.CompletedProcess[str] | None = None
    for _ in range(repeats):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _CODE, *words], cwd=folder, capture_output=True, text=True, env=environment
        )
        wall.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done is not None
    shown = " ".join(word.replace(f"{folder}/", "") for word in words)
    return Timed(kind, shown, min(wall), min(cpu), done.returncode, done.stderr.endswith("TORCH"))


if __name__ == "__main__":
    main()
