"""The demo: a tiny detector learns, on a CPU, to find objects that its annotators left out.

Half of the objects in its training scenes are not annotated, as in many real datasets, and its starting checkpoint was
trained on such scenes. Three runs continue from there, for about the same time and on the same incomplete annotations:
plain SFT; SFT on annotations completed with the checkpoint's own confident predictions; and rollout matching with
rewritten answers. All are evaluated on held-out scenes with complete annotations. After an interruption, the same
command continues.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from coordexp.checkpoints.run_folder import STATE
from coordexp.cli.console import no_bars_in_log_files
from coordexp.config import RunConfig, load_config
from coordexp.data.files import asset, check_writable, write_atomically
from coordexp.errors import DataError, RunFinished, RunStopped
from coordexp.heavy_imports import heavy_imports

START = "checkpoints/demo-incomplete"
COMPLETION_THRESHOLD = 0.3  # least confidence of an added object
KEPT = 0.5  # share of the training annotations that are there
_MARK = "# Written by coordexp demo."  # begins the configurations that a demo writes before anything else
_SCENES = {"train": 31, "val": 23}  # split → seed; the starting checkpoint was trained on the first one


@dataclass(frozen=True, slots=True)
class Way:
    """One run. ``key``: its name in the summary; ``run``: its configuration and folder."""

    key: str
    run: str
    label: str


WAYS = (
    Way("after_sft", "sft", "plain SFT"),
    Way("after_completed", "completed", "SFT on completed data"),
    Way("after", "stage2", "rollout matching"),
)


@dataclass(frozen=True, slots=True)
class DemoSize:
    """Sizes; the defaults are those of ``make demo``."""

    train_scenes: int = 1024
    val_scenes: int = 256
    max_steps: int | None = None  # None: as the YAML says
    pictures: int = 6


def run_demo(output: Path, console: Console, size: DemoSize | None = None) -> dict[str, Any]:
    """Run everything. Returns the content of ``summary.json``. Raises DataError for a folder with files that no demo
    wrote, before anything is written."""
    _check_folder(output)
    from coordexp.data.scenes import SCENES_VERSION
    from coordexp.evaluation.drawing import draw_comparison
    from coordexp.evaluation.summary import COUNTS_ONLY, figures_table, summarise
    from coordexp.inference.evaluation import answer_jsonl
    from coordexp.viewer.collect import collect
    from coordexp.viewer.render import render

    with heavy_imports():
        from coordexp.modeling.load import load_vocab

    no_bars_in_log_files(nor_on_terminals=True)  # a dozen models are loaded and saved
    size = size or DemoSize()
    started = time.monotonic()
    data = _paths(output)
    configs = {way.run: _config(output, way.run, data, size) for way in WAYS}
    _write_data(data, size, console)
    stage2 = configs["stage2"]
    results: dict[str, Any] = {}
    pictures: dict[str, list[Any]] = {}
    before = answer_jsonl(stage2, console, "evaluating: before", Path(stage2.model.model)).answers
    results["before"], pictures["before"] = summarise(before, COUNTS_ONLY).figures, before
    for way in WAYS:
        config, spent = configs[way.run], 0.0
        if way.run == "completed":
            spent = _complete(config, data["train"], data["completed"], console)
        folder = Path(config.training.output_dir)
        _train(config, way, output, console)
        history = json.loads((folder / STATE).read_text(encoding="utf-8"))["log_history"]
        write_atomically(folder / "log_history.json", json.dumps(history, indent=1))
        steps = [line for line in history if "loss" in line]
        learning = sum(line["time/window_prepare_s"] + line["time/learner_s"] for line in steps)
        pictures[way.label] = answer_jsonl(config, console, f"evaluating: {way.label}", folder).answers
        results[way.key] = summarise(pictures[way.label], COUNTS_ONLY).figures | {
            "seconds_per_step": round(learning / max(1, len(steps)), 3),
            "seconds": round(spent + learning, 1),
        }
    results["settings"] = {
        "optimizer_steps": {run: one.training.max_steps for run, one in configs.items()},
        "samples_per_step": stage2.training.per_device_train_batch_size * stage2.training.accumulation_steps(),
        "train_scenes": size.train_scenes,
        "annotations_kept": KEPT,
        "val_scenes": size.val_scenes,
        "scenes_version": SCENES_VERSION,
        "seed": stage2.training.seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    run = Path(stage2.training.output_dir)
    write_atomically(output / "view.html", render(collect(run, load_vocab(run))))
    columns = {"before": results["before"], **{way.label: results[way.key] for way in WAYS}}
    console.print(figures_table(columns, f"{size.val_scenes} held-out scenes, annotated completely"))
    draw_comparison(pictures, output / "comparison.png", size.pictures)
    path = output / "summary.json"
    write_atomically(path, json.dumps(results, indent=2) + "\n")
    before = results["before"]["f1"]
    for way in WAYS:
        f1, seconds = results[way.key]["f1"], results[way.key]["seconds"]
        console.print(f"F1 {before:.3f} → {f1:.3f} ({f1 - before:+.3f}) by {way.label}, in {seconds:.0f} s")
    console.print(
        f"\nlook at {output / 'comparison.png'} (six scenes: truth, before, after) and {output / 'view.html'} (every "
        f"answer, match and loss; open it in a browser)\nfigures: {path}\n\n"
        f"next: try the model on a scene: coordexp predict {data['val'].parent / 'images'} --limit 5 --save-images "
        f"--model {run}\n      train on your own data: docs/quickstart.md, or coordexp --help",
        highlight=False,
        soft_wrap=True,
    )
    return results


def _check_folder(output: Path) -> None:
    check_writable(output)
    if not output.is_dir() or not any(output.iterdir()):
        return
    written = [path for way in WAYS if (path := output / f"{way.run}.yaml").exists()]
    if not written or not all(path.read_bytes().startswith(_MARK.encode()) for path in written):
        raise DataError("has files that no coordexp demo wrote; name a new folder with --out", path=output)


def _paths(output: Path) -> dict[str, Path]:
    train, val = (output / "data" / split for split in _SCENES)
    return {
        "whole": train / "scenes.jsonl", "train": train / "incomplete.jsonl", "completed": train / "completed.jsonl",
        "val": val / "scenes.jsonl",
    }  # fmt: skip


def _write_data(paths: dict[str, Path], size: DemoSize, console: Console) -> None:
    """Write the scenes: ``val`` complete, ``train`` with half of its annotations. ``completed`` is only a path."""
    from coordexp.data.jsonl import read_jsonl, write_jsonl
    from coordexp.data.scenes import MODERATE, write_scenes
    from coordexp.data.subset import DropRates, drop_annotations

    for split, seed in _SCENES.items():
        path, count = (paths["whole"], size.train_scenes) if split == "train" else (paths["val"], size.val_scenes)
        # The JSONL is written last and in one piece: if it is there, and long enough, so is everything else.
        if not path.is_file() or sum(1 for _ in path.open(encoding="utf-8")) != count:
            with console.status(f"drawing {count} {split} scenes"):
                write_scenes(path.parent, count, MODERATE, seed)
    write_jsonl(drop_annotations(read_jsonl(paths["whole"]), DropRates(KEPT), 0)[0], paths["train"])


def _train(config: RunConfig, way: Way, output: Path, console: Console) -> None:
    """Train, unless an earlier demo in this folder did. Raises RunStopped after a signal, also one in the last step,
    which the run finishes."""
    with heavy_imports():
        from coordexp.training.run import run_training

    try:
        asked = run_training(config, console, way.label, output / f"{way.run}.yaml").asked_to_end
    except RunFinished:
        return
    except RunStopped as stopped:
        asked = stopped.signal
    if asked is not None:
        name = signal.Signals(asked).name
        again = f"to continue, start it again: coordexp demo --out {output}"
        raise RunStopped(f"stopped by {name} in the run {way.label}, with everything saved; {again}", asked)


def _complete(config: RunConfig, source: Path, out: Path, console: Console) -> float:
    from coordexp.inference.completion import CompletionRules, completion_config, run_completion

    took = out.with_name("completion_seconds.json")
    started = time.monotonic()
    run = completion_config(Path(config.model.model), config=None, prompt=config.template.prompt,
                           batch_size=64)  # fmt: skip
    run_completion(run, console, source=source, out=out, rules=CompletionRules(threshold=COMPLETION_THRESHOLD))
    if not took.is_file():
        write_atomically(took, json.dumps(time.monotonic() - started))
    return json.loads(took.read_text())


def _config(output: Path, name: str, data: dict[str, Path], size: DemoSize) -> RunConfig:
    """``configs/demo/<name>.yaml`` with this run's paths, written next to the results so that it can be run by hand."""
    values: dict[str, Any] = {
        "extends": str(asset(f"configs/demo/{name}.yaml").resolve()),
        "model": {"model": str(asset(START).resolve())},
        "custom": {
            "train_jsonl": str(data["completed" if name == "completed" else "train"].resolve()),
            "val_jsonl": str(data["val"].resolve()),
        },
        "training": {"output_dir": str((output / name).resolve())},
    }
    if size.max_steps is not None:
        values["training"]["max_steps"] = size.max_steps
    if name == "stage2":  # for the viewer's page
        values["rollout_matching"] = {"monitor_dump": {"enabled": True, "every_steps": 20, "max_samples": 4}}
    path = output / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{_MARK} Run it by hand: coordexp train {path}\n" + yaml.safe_dump(values))
    return load_config(path)
