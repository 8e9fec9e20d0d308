"""The time that the seal of a checkpoint adds to a save, and its comparison to a resume.

Files of a checkpoint's shape are written as transformers writes them: weights by safetensors, the optimizer's two
moments by ``torch.save``. A save that a power loss cannot undo has to wait for the disk; that wait is in the first row.
The second row is what a run does: the same wait, checksums of all files meanwhile, and the seal. Rounds of both take
turns. Rows of a resume read the same files, from the page cache, with and without comparing them.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from coordexp.data.files import flush_file
from coordexp.training.checkpoint import check_contents, seal_checkpoint

_TENSORS = 32


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--mib", type=positive, default=512, help="MiB of weights; the optimizer takes twice that [512]")
    flags.add_argument("--rounds", type=positive, default=5, help="saves of each kind; medians count [5]")
    flags.add_argument(
        "--folder", type=Path, default=None, help="where to write: the disk that counts [temporary files]"
    )
    options = flags.parse_args(argv)
    console = Console(markup=False, emoji=False)
    where, threads = machine(), set_threads(options.threads or 1)
    print_machine(console, where, threads=threads, weights=f"{options.mib} MiB", rounds=options.rounds)
    weights = {f"w{k}": torch.rand(options.mib * (1 << 18) // _TENSORS) for k in range(_TENSORS)}
    taken: dict[str, list[float]] = {name: [] for name in ("save", "sealed save", "resume", "compared resume")}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            kinds = [("save", flushed), ("sealed save", sealed)]
            for name, finish in kinds if number % 2 == 0 else kinds[::-1]:
                taken[name].append(save(Path(folder) / "checkpoint", weights, finish))
                if name == "sealed save":
                    taken["resume"].append(resume(Path(folder) / "checkpoint", compares=False))
                    taken["compared resume"].append(resume(Path(folder) / "checkpoint", compares=True))
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    added = {
        with_seal: statistics.median(b / a for a, b in zip(taken[without], taken[with_seal], strict=True)) - 1
        for without, with_seal in (("save", "sealed save"), ("resume", "compared resume"))
    }
    table = Table("", "s", "of all rounds", "added, median of the rounds")
    for name, seconds in taken.items():
        each = " ".join(f"{one:.2f}" for one in seconds)
        table.add_row(name, f"{medians[name]:.2f}", each, f"{added[name]:+.1%}" if name in added else "")
    console.print(table)
    write_json(options.json, "saving", where, {**vars(options), "threads": threads}, {"seconds": taken, "added": added})


def save(folder: Path, weights: dict[str, torch.Tensor], finish: Callable[[Path], None]) -> float:
    """Seconds to write a checkpoint and to ``finish`` it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    moments = {name: one.clone() for name, one in weights.items()}
    begun = time.perf_counter()
    save_file(weights, folder / "model.safetensors")
    torch.save({name: (one, moments[name]) for name, one in weights.items()}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text("{}", encoding="utf-8")
    finish(folder)
    return time.perf_counter() - begun


def flushed(folder: Path) -> None:
    """Wait until the disk holds every file and its name."""
    for path in [*folder.iterdir(), folder, folder.parent]:
        flush_file(path)


def sealed(folder: Path) -> None:
    seal_checkpoint(folder, 1, resumable=True, writes=True)


def resume(folder: Path, *, compares: bool) -> float:
    """Seconds to read a checkpoint, from the page cache as far as it is there."""
    begun = time.perf_counter()
    if compares:
        check_contents(folder)
    load_file(folder / "model.safetensors")
    torch.load(folder / "optimizer.pt", weights_only=True)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
