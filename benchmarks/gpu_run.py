"""One shipped configuration on this machine, started by `coordexp train`: seconds by part of a step, tokens and images
a second, MFU, and peak memory against the estimate.

MFU is of the part that computes, forward, backward and optimizer, and of the data sheet's rate (an H100's 989 TFLOP/s);
attention's own products and recomputation do not count. `gpu.py` runs this script for each model.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reporting import machine, parser, peak_flops, positive, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("file", help="below configs, such as stage1/sft.yaml")
    flags.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="on top of it")
    flags.add_argument("--name", help="of the result [the file's]")
    flags.add_argument("--model", type=Path, required=True, help="checkpoint")
    flags.add_argument("--scenes", type=Path, required=True, help="JSONL to train on")
    flags.add_argument("--folder", type=Path, required=True, help="for the run and its output; emptied")
    flags.add_argument("--log", type=Path, help="of the run [train.log in its folder]")
    flags.add_argument("--steps", type=positive, default=6, help="measured optimizer steps [6]")
    flags.add_argument("--warm-up", type=positive, default=2, help="steps before them [2]")
    flags.add_argument("--limit", type=float, default=600.0, help="seconds that the run may take [600]")
    options = flags.parse_args(argv)
    set_threads(options.threads)
    import torch
    import yaml

    from coordexp.doctor.runs import matrix_flops, train_shipped

    console, where = Console(), machine()
    name = options.name or Path(options.file).stem
    print_machine(console, where, file=options.file, model=options.model)
    shutil.rmtree(options.folder, ignore_errors=True)
    given = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in options.set)}
    keys = shortened(options, given)
    run = train_shipped(options.file, keys, options.log or options.folder / "train.log", options.limit, options.warm_up)
    results: dict[str, Any] = {
        "file": options.file, "keys": keys, "steps": options.steps, "seconds": run.seconds, **run.figures,
        "first_step": dict(run.lines[0]), "lines": [dict(line) for line in run.lines],
    }  # fmt: skip
    save = options.json if options.json is None or options.json.suffix == ".json" else options.json / f"{name}.json"
    write_json(save, name, where, vars(options), results, complete=False)
    results |= against_estimate(run)
    if (peak := peak_flops(where["gpu"])) is not None:
        results["mfu"] = run.figures["flops_per_s_computing"] / peak
        results["mfu_of_step"] = run.figures["flops_per_s"] / peak
    if torch.cuda.is_available():
        results["matrix_flops_per_s"] = matrix_flops(torch.device("cuda"))
    console.print(table(name, results))
    write_json(save, name, where, vars(options), results)


def shortened(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Replaced keys of the file: paths, the number of steps; neither evaluation nor checkpoints, and no TensorBoard
    where it is not installed."""
    loggers = {} if find_spec("tensorboard") else {"training.report_to": ["none"]}
    return {
        "model.model": str(options.model),
        "custom.train_jsonl": str(options.scenes),
        "custom.val_jsonl": None,
        "training.output_dir": str(options.folder / "run"),
        "training.max_steps": options.warm_up + options.steps,
        "training.eval_strategy": "no",
        "training.save_strategy": "no",
        **loggers,
        **given,
    }


def against_estimate(run: Any) -> dict[str, float]:
    from coordexp.checkpoints.memory import check_memory

    estimate = check_memory(run.config).total / 1e9
    measured = run.figures.get("allocated_peak_gb")
    return {"estimate_gb": estimate, **({"of_estimate": measured / estimate} if measured else {})}


def table(name: str, results: Mapping[str, Any]) -> Table:
    """One column of figures."""
    from coordexp.doctor.runs import PARTS

    shown = Table(name, "")
    for part in PARTS:
        seconds = results[f"{part}_s"]
        if seconds >= 0.0005:
            shown.add_row(part, f"{seconds:.3f} s, {seconds / results['step_s']:.0%}")
    rows = {
        "a step": f"{results['step_s']:.3f} s, {results['rows_of_step']:.1f} rows, {results['tokens']:,.0f} tokens",
        "tokens/s": f"{results['tokens_per_s']:,.0f}, computing alone {results['tokens_per_s_computing']:,.0f}",
        "images/s": f"{results['images_per_s']:.1f}",
        "TFLOP/s": f"{results['flops_per_s_computing'] / 1e12:.1f}, in all {results['flops_per_s'] / 1e12:.1f}",
    }
    if "mfu" in results:
        rows["MFU"] = f"{results['mfu']:.3f} computing, {results['mfu_of_step']:.3f} in all"
    if "matrix_flops_per_s" in results:
        rows["a large product"] = f"{results['matrix_flops_per_s'] / 1e12:.0f} TFLOP/s"
    if "of_estimate" in results:
        rows["peak memory"] = f"{results['allocated_peak_gb']:.1f} GB, {results['of_estimate']:.2f} of the estimate"
    for label, text in rows.items():
        shown.add_row(label, text)
    return shown


if __name__ == "__main__":
    main()
