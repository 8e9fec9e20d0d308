"""The order of an answer's objects: top to bottom (`sorted`) or left to right (`sorted_x`).

    python study.py run [--work FOLDER] [--seeds 0 1 2] [--steps 800]
    python study.py table

README.md declares what is compared. A finished (order, seed, steps) is one line of results.jsonl and is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
ORDERS = ("sorted", "sorted_x")
SCENES = {"train": (16384, 1), "test": (512, 82)}  # images, seed
FIGURES = ("f1", "AP", "AP50", "precision", "recall", "mean_matched_iou", "pred_per_image")


def coordexp(*words: str | Path) -> str:
    """Run a command of CoordExp to its end; returns what it printed."""
    command = [sys.executable, "-m", "coordexp", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def run(work: Path, seeds: Sequence[int], steps: int) -> None:
    """Run what results.jsonl does not have."""
    from rows import read_rows

    work = work.resolve()
    for split, (count, seed) in SCENES.items():
        if not (work / split / "scenes.jsonl").exists():
            coordexp("data", "scenes", "--out", work / split, "--count", str(count), "--spec", "sparse",
                     "--seed", str(seed))  # fmt: skip
    rows = read_rows(RESULTS)
    finished = {(row["order"], row["seed"], row["steps"]) for row in rows}
    for seed, order in ((seed, order) for seed in seeds for order in ORDERS):
        if (order, seed, steps) in finished:
            continue
        began, start, model = time.time(), work / f"random-{seed}", work / f"{order}-{seed}-{steps}"
        if not start.exists():
            coordexp("model", "tiny", start, "--seed", str(seed))
        if not (model / "done").exists():
            coordexp(
                "train", ROOT / "configs" / "demo" / "stage1.yaml", f"model.model={start}",
                f"custom.train_jsonl={work / 'train' / 'scenes.jsonl'}", "custom.val_jsonl=null",
                f"custom.object_ordering={order}", f"training.output_dir={model}", f"training.seed={seed}",
                f"training.max_steps={steps}", "training.eval_strategy=no", "training.save_strategy=no",
                "training.resume_from_checkpoint=null", "training.overwrite_output_dir=true",
            )  # fmt: skip
            (model / "done").touch()
        shown = coordexp(
            "evaluate", "--model", model, "--data", work / "test" / "scenes.jsonl", "--json", "--overwrite",
            "--out", work / "evaluation" / model.name, "rollout_matching.max_new_tokens=192",
            "rollout_matching.decode_batch_size=64",
        )  # fmt: skip
        figures = json.loads(shown)["metrics"]
        row = {"order": order, "seed": seed, "steps": steps, "seconds": round(time.time() - began)}
        row |= {name: round(figures[name], 4) for name in FIGURES}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def table() -> None:
    """Print each order's mean with its seeds' values, and the differences seed by seed with a 95 % t interval."""
    from rows import read_rows

    rows = read_rows(RESULTS)
    if not rows:
        sys.exit(f"{RESULTS}: no results yet; `python study.py run` writes them")
    for steps in sorted({row["steps"] for row in rows}):
        of = {(row["order"], row["seed"]): row for row in rows if row["steps"] == steps}
        seeds = sorted(seed for order, seed in of if order == ORDERS[0] and (ORDERS[1], seed) in of)
        print(f"{steps} steps, seeds {seeds}\n\n| figure | {' | '.join(ORDERS)} | sorted_x less sorted | 95 % |")
        print("| --- | --- | --- | --- | --- |")
        for figure in FIGURES:
            one, other = ([of[order, seed][figure] for seed in seeds] for order in ORDERS)
            less = [b - a for a, b in zip(one, other, strict=True)]
            print(f"| {figure} | {cell(one, '')} | {cell(other, '')} | {cell(less, '+')} | {interval(less)} |")


def interval(less: Sequence[float]) -> str:
    """The 95 % t interval of differences; one seed has none."""
    if len(less) < 2:
        return ""
    from scipy.stats import t

    reach = float(t.ppf(0.975, len(less) - 1)) * stdev(less) / len(less) ** 0.5
    return f"{mean(less) - reach:+.3f} to {mean(less) + reach:+.3f}"


def cell(values: Sequence[float], sign: str) -> str:
    if not values:  # no seed has run with both orders yet
        return ""
    return f"{mean(values):{sign}.3f} ({', '.join(f'{value:{sign}.3f}' for value in values)})"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run what results.jsonl does not have")
    running.add_argument("--work", type=Path, default=ROOT / "outputs" / "object_order")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--steps", type=int, default=800)
    commands.add_parser("table", help="print means, each seed's values and differences")
    options = flags.parse_args()
    if options.command == "run":
        run(options.work, options.seeds, options.steps)
    else:
        table()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
