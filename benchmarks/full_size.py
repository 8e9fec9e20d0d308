"""The first commands of a new user on a checkpoint of Qwen3-VL-2B's size: peak memory and CPU seconds of each.

The checkpoint has random weights, the published shapes, and Qwen's own tokenizer without coordinate tokens. It takes
4.3 GB on disk, twice; the walk takes about ten minutes and 14 GB of memory on two cores. Run it by hand after a change
of loading, saving or memory: ``python benchmarks/full_size.py --folder outputs/full_size``.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from reporting import machine, parser, positive, print_machine, write_json
from rich.console import Console
from rich.table import Table

BLOCK = 1 << 22  # random numbers that every tensor is filled with, from a place of its own
REAL_LIMITS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}  # pixels, as the published processor has them


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
    # In a process of its own: a new process counts the memory of the one that started it in its own peak.
    built = multiprocessing.get_context("spawn").Process(
        target=build_checkpoint, args=(options.folder / "qwen", options.size, options.layers)
    )
    built.start()
    built.join()
    assert built.exitcode == 0, "the checkpoint was not written"
    steps = []
    for name, arguments in walk(options.folder):
        found = measured(name, arguments, options.folder)
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


def build_checkpoint(folder: Path, size: str, layers: int | None) -> None:
    """Random weights in bfloat16, with the files of a published checkpoint: without coordinate tokens."""
    import torch
    from safetensors.torch import save_file
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    from coordexp.modeling.tiny import CHAT_TEMPLATE
    from support.qwen_sizes import qwen3_vl_config
    from support.qwen_tokenizer import qwen_tokenizer

    folder.mkdir()
    config: Any = qwen3_vl_config(size, layers)
    config.text_config.vocab_size = 151_936  # as published: without the coordinate tokens, padded
    config.save_pretrained(folder)
    tokenizer = qwen_tokenizer(coord_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    vision: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": REAL_LIMITS}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**vision),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in Qwen3VLForConditionalGeneration(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    noise = (0.02 * torch.randn(BLOCK, generator=generator)).bfloat16()
    weights = {}
    for name, shape in shapes.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape, dtype=torch.bfloat16)
        elif "norm" in name:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            shift = int(torch.randint(0, BLOCK, (1,), generator=generator))
            times = -(-shape.numel() // BLOCK)
            weights[name] = noise.roll(shift).repeat(times)[: shape.numel()].reshape(shape).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


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


def measured(name: str, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one command: its CPU seconds and peak memory with those of the processes it started."""
    log = folder / f"{name.replace(' ', '_').replace(',', '')}.log"
    started = time.perf_counter()
    with log.open("wb") as output:
        process = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "coordexp", *arguments],
            os.environ,
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
