"""When does stage 2 help? Arms that start from one checkpoint, compared on complete annotations.

    cd studies/when_stage2_helps
    python study.py run incomplete --work ../../outputs/study                      # every arm of arms.yaml
    python study.py run incomplete --work ../../outputs/study --arms sft-long rewritten --seeds 0 1 2
    python study.py table incomplete --against sft-long                            # figures and differences
    python study.py picture ../../docs/images/when-it-helps.svg                    # every kind of data in one picture

Every finished (arm, seed, split) is one line of ``results/<regime>.jsonl`` and is not run again: interrupt it and start
it again at will. One thread a process: start one process a core, with different arms. The test split is for the final
comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import yaml

VARIANTS_AT = "51e383b"  # the last commit with the variants of rollout matching that did not pay
WITHOUT_DRAFTS = "rollout_matching.decoding.skip_forced_tokens=false"  # they ignore the processor of stopping.py
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IOUS = (0.5, 0.7, 0.9)
AVERAGE_PRECISIONS = ("AP", "AP50")
SPLIT_SEEDS = {"train": 31, "val": 32, "test": 33}
STAGE_1 = ROOT / "checkpoints" / "demo-stage1"


def scenes(regime: dict[str, Any], split: str, work: Path, name: str) -> Path:
    """Complete annotations of a split, drawn or converted; written once."""
    from coordexp.data.scenes import SPECS, write_scenes

    folder = work / name / split
    path = folder / "scenes.jsonl"
    if path.is_file():
        return path
    if "voc" in regime:
        return converted(regime, split, work / name, path)
    scene_seed = regime.get("scene_seeds", {}).get(split, SPLIT_SEEDS[split])
    return write_scenes(folder, regime["images"][split], SPECS[regime["spec"]], scene_seed)


def converted(regime: dict[str, Any], split: str, folder: Path, path: Path) -> Path:
    """A split of a Pascal VOC data set, its images made small once; annotations as they are there."""
    from coordexp.data.convert import ImageOptions, convert_voc

    root = folder / "voc"
    if not root.is_dir():
        sys.exit(f"{root} is missing: put there, or link, {regime['voc']['source']}")
    convert_voc(root, path.parent, split=split, options=ImageOptions(**regime["voc"]["images"], name=path.stem))
    return path


def training_data(regime: dict[str, Any], keep: float, seed: int, work: Path, name: str) -> Path:
    """The training split with a share of its annotations; which ones are left out depends on the seed."""
    from coordexp.data.jsonl import read_jsonl, write_jsonl
    from coordexp.data.subset import DropRates, drop_annotations

    whole = scenes(regime, "train", work, name)
    if keep == 1.0:
        return whole
    path = whole.with_name(f"keep-{keep}-seed-{seed}.jsonl")
    if not path.is_file():
        rates = DropRates(keep, per_class=regime.get("per_class", {}))
        write_jsonl(drop_annotations(read_jsonl(whole), rates, seed)[0], path)
    return path


def dotted(keys: dict[str, Any]) -> list[str]:
    """Keys of arms.yaml as arguments of a command line."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def train(config: str, data: Path, model: Path, output: Path, seed: int, arm: dict[str, Any]) -> float:
    """Train unless it is done. Returns: CPU seconds it took."""
    from coordexp.config import load_config
    from coordexp.errors import RunFinished
    from coordexp.training.run import run_training

    done = output / "cpu_seconds.json"
    if done.is_file():
        return json.loads(done.read_text())
    if config == "grpo":
        import grpo

        seconds = grpo.train(data, model, output, seed, arm)
        done.write_text(json.dumps(seconds))
        return seconds
    values: dict[str, Any] = {
        "extends": str(HERE / "configs" / f"{config}.yaml"),
        "model": {"model": str(model), "dtype": "float32"},
        "custom": {"train_jsonl": str(data)},
        "training": {
            "output_dir": str(output),
            "max_steps": arm["steps"],
            "learning_rate": arm["lr"],
            "seed": seed,
            # An interrupted run leaves a checkpoint; it starts again, because its CPU seconds are those of a whole one.
            "overwrite_output_dir": True,
        },
    }
    path = output.with_name(output.name + ".yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    if arm.get("served"):
        values["rollout_matching"] = answered_by_a_server(arm)
        path.write_text(yaml.safe_dump(values))
    if "variant" in arm:
        sys.exit(f"{output.name}: the code of variant {arm['variant']} is in commit {VARIANTS_AT}; run this arm there")
    started = cpu_seconds()
    with server(path) if arm.get("served") else nullcontext(), suppress(RunFinished):
        run_training(load_config(path, arguments=dotted(arm.get("set", {}))), progress(), output.name, path)
    seconds = cpu_seconds() - started
    done.write_text(json.dumps(seconds))
    return seconds


def answered_by_a_server(arm: dict[str, Any]) -> dict[str, Any]:
    """Keys of ``rollout_matching`` with which one `coordexp serve` writes the rollouts."""
    from rollout_server import TIMEOUT_S, server_entry

    return {
        "rollout_backend": "vllm",
        "rollouts_ahead": arm.get("rollouts_ahead", 0),
        "vllm": {
            "mode": "server",
            "tensor_parallel_size": 1,
            "enforce_eager": True,
            "server": {"servers": [server_entry()], "timeout_s": TIMEOUT_S},
            "sync": {"timeout_s": TIMEOUT_S},
        },
    }


def server(config: Path) -> AbstractContextManager[Any]:
    """A `coordexp serve` for as long as the arm trains."""
    from rollout_server import serving

    return serving(config)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def completed(data: Path, model: Path, rules: dict[str, Any], output: Path) -> tuple[Path, float]:
    """``data`` with what ``model`` finds and the annotations lack. Returns: the JSONL, and CPU seconds it took."""
    from stopping import stop_threshold

    from coordexp.cli import main

    path, done = output / "completed.jsonl", output / "completion_seconds.json"
    if not done.is_file():
        output.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        words = ["data", "complete", str(data), "--model", str(model), "--out", str(path), "--overwrite",
                 "--threshold", str(rules["threshold"]), "--batch-size", "64"]  # fmt: skip
        if "weight" in rules:
            words += ["--weight", str(rules["weight"])]
        if "stop" in rules:
            words.append(WITHOUT_DRAFTS)
        with stop_threshold(model, rules.get("stop")):
            try:
                main(words)
            except SystemExit as ended:
                if ended.code:
                    raise
        done.write_text(json.dumps(time.process_time() - started))
    return path, json.loads(done.read_text())


def evaluate(
    model: Path, data: Path, name: str, stop: float | None, keys: dict[str, Any]
) -> tuple[list[Any], dict[str, float], float]:
    """Greedy answers, scored by their tokens' probabilities, in a folder of the arm ``name``. Returns: answers, average
    precision, and CPU seconds."""
    from stopping import stop_threshold

    from coordexp.inference.evaluation import run_evaluation
    from coordexp.inference.session import evaluation_config

    base = yaml.safe_load((HERE / "configs" / "base.yaml").read_text())
    # Every arm answers by the same sections, whatever it was trained with.
    values = {key: base[key] for key in ("template", "rollout_matching", "global_max_length")}
    values |= {"model.dtype": "float32", "custom": {"val_jsonl": str(data)}, **keys}
    started = time.process_time()
    folder = model / f"evaluation-{data.parent.name}-{name}"
    with stop_threshold(model, stop):
        config = evaluation_config(model, data, dotted(values) + ([] if stop is None else [WITHOUT_DRAFTS]))
        found = run_evaluation(config, progress(), model=model, output=folder)
    precision = {name: round(found.summary.figures[name], 4) for name in AVERAGE_PRECISIONS}
    return list(found.answers), precision, time.process_time() - started


def counts(answers: Sequence[Any]) -> dict[str, list[list[float]]]:
    """Per image and variant: predictions, ground truth, matched at each IoU, matched under any name at 0.5, located
    at 0.3 under any name, summed IoU of matches, duplicates, truncated."""
    from dataclasses import replace

    from coordexp.evaluation.detection import count_image
    from coordexp.matching import duplicate_indices

    table: dict[str, list[list[float]]] = {"as_answered": [], "without_duplicates": []}
    for answer in answers:
        repeats = set(duplicate_indices(answer.pred))
        cleaned = replace(answer, pred=tuple(obj for i, obj in enumerate(answer.pred) if i not in repeats))
        for name, one in (("as_answered", answer), ("without_duplicates", cleaned)):
            if name == "without_duplicates" and not repeats:
                table[name].append(table["as_answered"][-1])
                continue
            at = {iou: count_image(one, iou).counts for iou in IOUS}
            located = count_image(one, 0.3).counts["matched_any_desc"]
            first = at[0.5]
            table[name].append([
                first["pred"], first["gt"], *(at[iou]["matched"] for iou in IOUS), first["matched_any_desc"], located,
                round(first["matched_iou_sum"], 3), first["duplicates"], first["truncated"],
            ])  # fmt: skip
    return table


def regime_start(name: str, regime: dict[str, Any], seed: int, work: Path) -> Path:
    """The checkpoint that every arm of a regime starts from. ``start.of`` names another regime with the
    same start, ``start.after`` one from whose start training continued; with ``start.from: random`` it was trained from
    random weights, otherwise from the demo's stage-1 model."""
    before = STAGE_1
    if regime["start"].get("from") == "random":
        before = random_model(work / name / "runs" / f"random-seed-{seed}", seed)
    other = regime["start"].get("of", regime["start"].get("after"))
    if other is not None:
        regimes = yaml.safe_load((HERE / "arms.yaml").read_text())["regimes"]
        before = regime_start(other, regimes[other], seed, work)
    if "of" in regime["start"]:
        return before
    start = work / name / "runs" / f"start-seed-{seed}"
    data = training_data(regime, regime["keep"], seed, work, name)
    train(regime["start"]["config"], data, before, start, seed, with_keys(regime, regime["start"]))
    return start


def random_model(folder: Path, seed: int) -> Path:
    """A tiny model that has learned nothing, written once."""
    from coordexp.modeling.tiny import build_tiny_checkpoint

    if not folder.is_dir():
        build_tiny_checkpoint(folder.with_name(folder.name + ".part"), seed).rename(folder)
    return folder


def trained_model(
    name: str, regime: dict[str, Any], arms: dict[str, Any], arm_name: str, seed: int, work: Path
) -> tuple[Path, float]:
    """The model of an arm, and the CPU seconds of everything between the regime's start and it."""
    arm = arms[arm_name]
    model, seconds = regime_start(name, regime, seed, work), 0.0
    if "after" in arm:
        model, seconds = trained_model(name, regime, arms, arm["after"], seed, work)
    if "config" not in arm:
        return model, seconds
    start, model = model, work / name / "runs" / f"{arm_name}-seed-{seed}"
    data = training_data(regime, arm.get("keep", regime["keep"]), seed, work, name)
    if "complete" in arm:
        rules = "-".join(f"{key}-{value}" for key, value in sorted(arm["complete"].items()))
        before = arm.get("after", "start")
        folder = work / name / "runs" / f"completed-by-{before}-{rules}-seed-{seed}"  # shared by arms
        data, spent = completed(data, start, arm["complete"], folder)
        seconds += spent
    return model, seconds + train(arm["config"], data, start, model, seed, with_keys(regime, arm))


def with_keys(regime: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    """An arm with the keys that its regime sets for all arms; its own take precedence."""
    return {**arm, "set": {**regime.get("set", {}), **arm.get("set", {})}}


def run_arm(name: str, arm_name: str, seed: int, split: str, work: Path, results: Path) -> None:
    """Train and evaluate one arm, and store the result."""
    declared = yaml.safe_load((HERE / "arms.yaml").read_text())
    regime, arms = declared["regimes"][name], declared["arms"][name]
    arm = arms[arm_name]
    model, seconds = trained_model(name, regime, arms, arm.get("of", arm_name), seed, work)
    data = scenes(regime, split, work, name)
    keys = {**regime.get("set", {}), **arm.get("decode", {})}
    answers, precision, spent = evaluate(model, data, arm_name, arm.get("stop"), keys)
    line = {
        "arm": arm_name, "seed": seed, "split": split,
        "train_cpu_s": round(seconds, 1), "answer_cpu_s": round(spent, 1),
        "date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "declared": arm, **precision, "counts": counts(answers),
    }  # fmt: skip
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(time.strftime("%H:%M:%S"), arm_name, f"seed {seed}", split, figures_line([line]), flush=True)


def figures_line(lines: Iterable[dict[str, Any]]) -> str:
    from tables import figures

    found = figures([line["counts"]["as_answered"] for line in lines])
    return " ".join(f"{key} {value:.3f}" for key, value in found.items())


def progress() -> Any:
    """Where training and answering show how far they are; figures alone go to the standard output."""
    from rich.console import Console

    return Console(stderr=True)


def run(options: argparse.Namespace) -> None:
    import torch
    from rows import read_rows

    torch.set_num_threads(1)
    declared = yaml.safe_load((HERE / "arms.yaml").read_text())["arms"][options.regime]
    unknown = [arm for arm in options.arms or () if arm not in declared]
    if unknown:
        sys.exit(f"arms.yaml declares no arm {unknown[0]!r} for {options.regime}; it has {', '.join(declared)}")
    results = HERE / "results" / f"{options.regime}.jsonl"
    results.parent.mkdir(exist_ok=True)
    for seed in options.seeds:
        for arm in options.arms or declared:
            known = [(line["arm"], line["seed"], line["split"]) for line in read_rows(results)]
            if (arm, seed, options.split) not in known:
                run_arm(options.regime, arm, seed, options.split, options.work.resolve(), results)


def table(options: argparse.Namespace) -> None:
    from rows import read_rows
    from tables import markdown

    lines = read_rows(HERE / "results" / f"{options.regime}.jsonl")
    wanted = set(options.seeds or (line["seed"] for line in lines))
    shown = [line for line in lines if line["split"] == options.split and line["seed"] in wanted]
    print(markdown(shown, options.against))


def picture(options: argparse.Namespace) -> None:
    from picture import compare, draw

    if options.out.suffix not in (".svg", ".png") or not options.out.parent.is_dir():
        sys.exit(f"{options.out}: give an .svg or .png file in a folder that is there")
    rows = [compare(entry, HERE / "results") for entry in yaml.safe_load((HERE / "arms.yaml").read_text())["compared"]]
    print("\n".join(map(str, rows)))
    draw(rows, options.out)


def main() -> None:
    regimes = list(yaml.safe_load((HERE / "arms.yaml").read_text())["regimes"])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="train and evaluate what is not in results/ yet")
    running.add_argument("regime", choices=regimes, metavar="regime")
    running.add_argument("--work", type=Path, required=True, help="folder of data, models and answers")
    running.add_argument("--arms", nargs="+", help="only these [all]")
    running.add_argument("--seeds", nargs="+", type=int, default=[0])
    running.set_defaults(do=run)
    showing = commands.add_parser("table", help="figures with intervals, as Markdown")
    showing.add_argument("regime", choices=regimes, metavar="regime")
    showing.add_argument("--against", required=True, help="the arm that differences are taken to")
    showing.add_argument("--seeds", nargs="+", type=int, help="only these [all]")
    showing.set_defaults(do=table)
    drawing = commands.add_parser("picture", help="every kind of data in one picture, and its figures as text")
    drawing.add_argument("out", type=Path, help="an SVG or PNG file")
    drawing.set_defaults(do=picture)
    for command in (running, showing):
        command.add_argument("--split", choices=["val", "test"], default="val")
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT / "benchmarks")]
    main()
