"""The first commands of a new user on a checkpoint of Qwen3-VL-2B's size: peak memory and CPU seconds of each.

The checkpoint has random weights, the published shapes, and Qwen's own tokenizer without coordinate tokens. It takes
4.3 GB on disk, twice; the walk takes about ten minutes and 14 GB of memory on two cores. Run it by hand after a change
of loading, saving or memory: ``python benchmarks/full_size.py --folder outputs/full_size``.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from random_checkpoint import write_checkpoint
from reporting import machine, parser, positive, print_machine, with_threads, write_json
from rich.console import Console
from rich.table import Table


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--folder", type=Path, default=Path("outputs/full_size"), help="of everything written")
    flags.add_argument("--size", default="2B", choices=("2B", "4B", "8B"), help="[2B]")
    flags.add_argument("--layers", type=positive, help="of the language model, instead of all")
    options = flags.parse_args(argv)
    console, where = Console(), machine()
    print_machine(console, where, size=options.size, layers=options.layers or "all")
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    write_checkpoint(options.folder / "qwen", options.size, options.layers)
    steps, environment = [], with_threads(os.environ, options.threads)
    for name, arguments in walk(options.folder):
        found = measured(name, arguments, options.folder, environment)
        steps.append(found)
        console.print(f"{name}: {found['cpu_s']:.0f} CPU s, {found['peak_gb']:.1f} GB, exit {found['exit']}")
        if found["exit"]:
            console.print(Path(found["log"]).read_text(encoding="utf-8")[-2000:], markup=False)
            sys.exit(1)
        write_json(options.json, "full_size", where, vars(options), steps, complete=False)
    table = Table("command", "CPU s", "s", "peak GB")
    for one in steps:
        table.add_row(one["name"], f"{one['cpu_s']:.0f}", f"{one['wall_s']:.0f}", f"{one['peak_gb']:.1f}")
    console.print(table)
    write_json(options.json, "full_size", where, vars(options), steps)


def walk(folder: Path) -> list[tuple[str, list[str]]]:
    """Commands in order; the YAML is written as a user would write it, for a short row and one step."""
    start, scenes, run = folder / "start", folder / "scenes", folder / "run"
    config = {
        "model": {"model": str(start), "dtype": "bfloat16"},
        "tuner": {"train_type": "lora", "lora_rank": 16, "freeze_vit": True, "train_coord_rows": True},
        "custom": {"train_jsonl": str(scenes / "scenes.jsonl")},
        "training": {
            "output_dir": str(run), "max_steps": 1, "per_device_train_batch_size": 1, "effective_batch_size": 1,
            "gradient_checkpointing": True, "bf16": False, "learning_rate": 1e-4, "save_strategy": "steps",
            "save_steps": 1, "report_to": ["none"],
        },
        "global_max_length": 1200,
        "rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 16},
    }  # fmt: skip
    path = folder / "stage1.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    image = scenes / "images"
    return [
        ("model expand-vocab", ["model", "expand-vocab", str(folder / "qwen"), str(start)]),
        ("model info", ["model", "info", str(start)]),
        ("data scenes", ["data", "scenes", "--out", str(scenes), "--count", "4"]),
        ("config check", ["config", "check", str(path)]),
        ("train, one LoRA step", ["train", str(path)]),
        ("predict, 16 tokens", ["predict", str(path), str(image), "--limit", "1", "--model", str(run / "checkpoint-1"),
                                "--out", str(folder / "predictions")]),
        ("model merge", ["model", "merge", str(run / "checkpoint-1"), str(folder / "merged")]),
    ]  # fmt: skip


def measured(name: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run one command: its CPU seconds and peak memory with those of the processes it started."""
    log = folder / f"{name.replace(' ', '_').replace(',', '')}.log"
    started = time.perf_counter()
    with log.open("wb") as output:
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "coordexp", *arguments],
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1), (os.POSIX_SPAWN_DUP2, output.fileno(), 2)],
        )
        _, status, usage = os.wait4(process, 0)
    return {
        "name": name,
        "exit": os.waitstatus_to_exitcode(status),
        "wall_s": time.perf_counter() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
        "log": str(log),
    }


if __name__ == "__main__":
    main()
