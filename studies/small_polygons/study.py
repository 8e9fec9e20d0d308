"""Small polygons: what rollout matching does to them with a transport blur of 10 bins, and with a relative one.

    python study.py run [--work FOLDER] [--seeds 0 1 2] [--scale 1.0]
    python study.py table

README.md declares what is compared. A finished (variant, seed) is one line of results.jsonl with its scale and is not
run again. ``--scale`` shortens images and steps, and is stored with the result.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.jsonl"
VARIANTS = {"bins-10": "10.0", "relative": "null"}
IMAGES = {"train": 1024, "test": 256}
SCENE_SEEDS = {"train": 71, "test": 72}
START_STEPS, STEPS = 400, 60
SIDES, VERTICES = (8.0, 18.0), 6
FIGURES = (
    "f1", "f1@0.75", "segm_AP", "segm_AP50", "segm_AP75", "precision", "recall", "mean_matched_iou", "pred_per_image",
)  # fmt: skip


def write_data(folder: Path, count: int, seed: int) -> Path:
    """Scenes of the tests' generator without objects, with polygons drawn on them; returns their JSONL."""
    import numpy as np
    from PIL import Image, ImageDraw

    from coordexp.data.jsonl import write_jsonl
    from coordexp.data.scenes import COLOURS, SceneSpec, make_scene
    from coordexp.geometry import to_bin
    from coordexp.records import GTObject, ImageRecord

    spec, records = SceneSpec(empty=1.0), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for index in range(count):
        image, _ = make_scene(spec, seed, index)
        rng = np.random.default_rng([seed, index])
        large = image.resize((4 * spec.size, 4 * spec.size), Image.Resampling.BICUBIC)
        draw, objects, places = ImageDraw.Draw(large), [], []
        for _ in range(int(rng.integers(2, 5))):
            radius = rng.uniform(*SIDES) / 2
            middle = rng.uniform(radius + 2, spec.size - radius - 3, size=2)
            if any(math.dist(middle, other) < radius + reach + 4 for other, reach in places):
                continue
            places.append((middle, radius))
            angle_N = 2 * np.pi * (np.arange(VERTICES) + rng.uniform(-0.3, 0.3, VERTICES)) / VERTICES
            outline_N2 = middle + radius * rng.uniform(0.7, 1.0, (VERTICES, 1)) * np.stack(
                [np.sin(angle_N), -np.cos(angle_N)], axis=1
            )
            colour = str(rng.choice(list(COLOURS)))
            draw.polygon([tuple(4 * point + 1.5) for point in outline_N2], fill=COLOURS[colour])
            bins = tuple(to_bin(float(value), spec.size) for value in outline_N2.ravel())
            objects.append(GTObject(f"{colour} pebble", "poly", bins))
        path = folder / "images" / f"{index:06d}.png"
        large.resize((spec.size, spec.size), Image.Resampling.BOX).save(path, compress_level=1)
        records.append(ImageRecord(f"pebbles-{seed}-{index}", path.resolve(), spec.size, spec.size, tuple(objects)))
    jsonl = folder / "scenes.jsonl"
    write_jsonl(records, jsonl)
    return jsonl


def coordexp(*words: str | Path) -> str:
    """Run a command of CoordExp to its end; returns what it printed."""
    command = [sys.executable, "-m", "coordexp", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


def train(model: Path, data: Path, output: Path, seed: int, steps: int, rate: float, *keys: str) -> None:
    """Train ``model`` into ``output``, unless that was done."""
    if (output / "done").exists():
        return
    coordexp(
        "train", HERE / "base.yaml", f"model.model={model}", "model.dtype=float32", f"custom.train_jsonl={data}",
        f"training.output_dir={output}", f"training.seed={seed}", f"training.max_steps={steps}",
        f"training.learning_rate={rate}", "training.overwrite_output_dir=true", *keys,
    )  # fmt: skip
    (output / "done").touch()


def run(work: Path, seeds: Sequence[int], scale: float) -> None:
    """Run what results.jsonl does not have at this scale."""
    from rows import read_rows

    work = work.resolve() / f"scale-{scale:g}"
    data = {}
    for split, count in IMAGES.items():
        folder = work / "data" / split
        data[split] = folder / "scenes.jsonl"
        if not data[split].exists():
            write_data(folder, max(16, round(scale * count)), SCENE_SEEDS[split])
    start = work / "start"
    as_sft = (
        "custom.trainer_variant=null", "rollout_matching.pipeline=null",
        "custom.coord_soft_ce_w1="
        "{enabled: true, soft_ce_weight: 1.0, w1_weight: 1.0, gate_weight: 1.0, target_sigma: 4.0}",
    )  # fmt: skip
    train(
        ROOT / "checkpoints" / "demo-stage1", data["train"], start, 0, max(2, round(scale * START_STEPS)), 4e-4, *as_sft
    )
    rows = read_rows(RESULTS)
    finished = {(row["variant"], row["seed"], row["scale"]) for row in rows}
    wanted = [("start", seeds[0]), *((variant, seed) for seed in seeds for variant in VARIANTS)]
    for variant, seed in wanted:
        if (variant, seed, scale) in finished:
            continue
        began, model = time.time(), start
        if variant != "start":
            model = work / f"{variant}-{seed}"
            steps = max(2, round(scale * STEPS))
            epsilon = f"rollout_matching.ot_epsilon={VARIANTS[variant]}"
            train(start, data["train"], model, seed, steps, 2e-4, epsilon)
        shown = coordexp(
            "evaluate", "--model", model, "--data", data["test"], "--segm", "--json", "--out", work / "evaluation"
            / f"{variant}-{seed}", "--overwrite", "rollout_matching.max_new_tokens=256",
            "rollout_matching.eval_detection.f1ish_iou_thrs=[0.5, 0.75]",
        )  # fmt: skip
        figures = json.loads(shown)["metrics"]
        row = {"variant": variant, "seed": seed, "scale": scale, "seconds": round(time.time() - began)}
        row |= {name: figures[name] for name in FIGURES}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def table() -> None:
    """Print means over seeds with each seed's value, and the differences of the variants seed by seed."""
    from rows import read_rows

    rows = read_rows(RESULTS)
    if not rows:
        sys.exit(f"{RESULTS}: no results yet; `python study.py run` writes them")
    for scale in sorted({row["scale"] for row in rows}, reverse=True):
        of = {(row["variant"], row["seed"]): row for row in rows if row["scale"] == scale}
        old, new = VARIANTS
        seeds = [seed for variant, seed in sorted(of) if variant == old and (new, seed) in of]
        columns = {name: [row for (one, _), row in sorted(of.items()) if one == name] for name in ("start", *VARIANTS)}
        print(f"scale {scale:g}, seeds {seeds}\n")
        print(f"| figure | {' | '.join(columns)} | {new} less {old} |")
        print("| --- " * (2 + len(columns)) + "|")
        for figure in FIGURES:
            cells = [_cell([row[figure] for row in column], "") for column in columns.values()]
            cells.append(_cell([of[new, seed][figure] - of[old, seed][figure] for seed in seeds], "+"))
            print(f"| {figure} | {' | '.join(cells)} |")


def _cell(values: Sequence[float], sign: str) -> str:
    shown = ", ".join(f"{value:{sign}.3f}" for value in values)
    return shown if len(values) < 2 else f"{mean(values):{sign}.3f} ({shown})"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run what results.jsonl does not have")
    running.add_argument("--work", type=Path, default=ROOT / "outputs" / "small_polygons")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    running.add_argument("--scale", type=float, default=1.0, help="share of the images and steps [1.0]")
    commands.add_parser("table", help="print means, each seed's values and differences")
    options = flags.parse_args()
    if options.command == "run":
        run(options.work, options.seeds, options.scale)
    else:
        table()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    main()
