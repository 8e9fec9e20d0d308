"""One training step under torch's profiler: how busy the GPU is, which kernels take its time, and where the host waits.

The real trainer takes the shipped configuration's first step, several times over; after a warm-up one step is timed
without the profiler and one is profiled. `gpu.py` runs this script.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reporting import machine, parser, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table

# The first pattern that a kernel's name matches is its kind.
KINDS = {
    "attention": r"flash|fmha|attention|efficient",
    "matrix products": r"gemm|cutlass|cublas|xmma|nvjet|sm90_|splitK|wgrad|dgrad",
    "fused layers": r"_rms_norm|_swiglu|_rope|liger|triton",
    "copies": r"Memcpy|Memset",
    "optimizer": r"multi_tensor|Adam|adam|foreach",
    "reductions": r"reduce|softmax|norm",
    "element-wise": r"elementwise|copy|index|gather|scatter|cat|fill|vectorized",
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaMalloc")
MOST = 40  # kernels and host functions that are kept


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", type=Path, required=True, help="checkpoint")
    flags.add_argument("--scenes", type=Path, required=True, help="JSONL to train on")
    flags.add_argument("--folder", type=Path, required=True, help="for the run's files")
    flags.add_argument("--file", default="stage1/sft.yaml", help="below configs [stage1/sft.yaml]")
    flags.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="on top of it")
    flags.add_argument("--steps", type=positive, default=3, help="of warm-up [3]")
    options = flags.parse_args(argv)
    set_threads(options.threads)
    console, where = Console(width=160), machine()
    print_machine(console, where, file=options.file, model=options.model)
    results = profiled(options)
    name = "profile"
    save = options.json if options.json is None or options.json.suffix == ".json" else options.json / f"{name}.json"
    console.print(table(results))
    write_json(save, name, where, vars(options), results)


def profiled(options: Any) -> dict[str, Any]:
    import torch
    import yaml
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from coordexp.config import load_config
    from coordexp.data.files import asset
    from coordexp.doctor.samples import first_step, trainer_of

    given = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in options.set)}
    keys = {
        "model.model": str(options.model), "custom.train_jsonl": str(options.scenes), "custom.val_jsonl": None,
        "training.output_dir": str(options.folder), "training.report_to": ["none"], "training.save_strategy": "no",
        "training.eval_strategy": "no", "training.resume_from_checkpoint": False, "data.num_workers": 0, **given,
    }  # fmt: skip
    trainer = trainer_of(load_config(asset(f"configs/{options.file}"), keys))
    on_gpu = torch.cuda.is_available()

    def step() -> tuple[int, int, float, float]:
        """Rows, tokens, seconds of accumulating and of the optimizer."""
        wait(on_gpu)
        began = time.perf_counter()
        rows = first_step(trainer)
        wait(on_gpu)
        middle = time.perf_counter()
        trainer.step.update()
        wait(on_gpu)
        return len(rows), sum(row.length for row in rows), middle - began, time.perf_counter() - middle

    for _ in range(options.steps):
        step()
    rows, tokens, accumulate_s, update_s = step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        _, _, profiled_accumulate_s, profiled_update_s = step()
    averages = recorded.key_averages()
    kernels = kernels_of(averages)
    host = [{"name": one.key[:120], "calls": one.count, "ms": one.self_cpu_time_total / 1e3}
            for one in averages if one.device_type == DeviceType.CPU]  # fmt: skip
    kinds: Counter[str] = Counter()
    for kernel in kernels:
        kinds[kind_of(kernel["name"])] += kernel["ms"]
    device_ms = sum(kinds.values())
    launches = sum(one["calls"] for one in host if "LaunchKernel" in one["name"])
    return {
        "rows": rows, "tokens": tokens, "accumulate_s": accumulate_s, "update_s": update_s,
        "profiled_s": profiled_accumulate_s + profiled_update_s, "device_ms": device_ms, "launches": launches,
        "busy": device_ms / 1e3 / (accumulate_s + update_s), "kinds_ms": dict(kinds.most_common()),
        "waits": [one for one in host if one["name"] in WAITS], "kernels": longest(kernels), "host": longest(host),
    }  # fmt: skip


def kernels_of(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """The kernels among a profile's averages. What a program names (``Optimizer.step``) has an event on the device too,
    as long as its kernels together, which would count them twice."""
    from torch.autograd import DeviceType

    return [
        {"name": one.key[:160], "calls": one.count, "ms": one.self_device_time_total / 1e3}
        for one in averages
        if one.device_type == DeviceType.CUDA and one.self_device_time_total and not one.is_user_annotation
    ]


def wait(on_gpu: bool) -> None:
    import torch

    if on_gpu:
        torch.cuda.synchronize()


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def longest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: -row["ms"])[:MOST]


def table(results: dict[str, Any]) -> Table:
    shown = Table("one step", "ms", "calls")
    step_ms = 1e3 * (results["accumulate_s"] + results["update_s"])
    shown.add_row(f"{results['rows']} rows, {results['tokens']:,} tokens", f"{step_ms:.0f}", "")
    shown.add_row(f"on the GPU ({results['busy']:.0%} busy)", f"{results['device_ms']:.0f}", f"{results['launches']}")
    for kind, milliseconds in results["kinds_ms"].items():
        shown.add_row(f"  {kind}", f"{milliseconds:.1f}", "")
    for title, rows in (
        ("kernels", results["kernels"][:25]),
        ("host", results["host"][:15]),
        ("waits", results["waits"]),
    ):
        shown.add_section()
        for row in rows:
            shown.add_row(f"{title}: {row['name'][:110]}", f"{row['ms']:.1f}", str(row["calls"]))
    return shown


if __name__ == "__main__":
    main()
