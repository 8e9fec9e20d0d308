"""The demo: a tiny detector, trained by rollout matching on a CPU, before your eyes.

A stage-1 model that outlines objects tightly meets scenes whose annotators leave a margin, with more overlaps and
repeats. It is trained for the same number of steps, on the same samples in the same order, once by rollout matching and
once by plain SFT; all three are measured on held-out scenes.
Interrupted, it goes on where it was when started again.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from coordexp.assets import asset
from coordexp.config import RunConfig, load_config

_RUN_OF = {"after": "stage2", "after_sft": "sft"}  # column of the summary → the configuration behind it
_SCENES = {"train": 11, "val": 23}  # split → seed of its stream; stage 1 never saw either


@dataclass(frozen=True, slots=True)
class DemoSize:
    """How much of everything. The defaults are what ``make demo`` runs; tests run less."""

    train_scenes: int = 2048
    val_scenes: int = 128
    max_steps: int | None = None  # None: as the YAML says
    pictures: int = 6


def run_demo(output: Path, console: Console, size: DemoSize | None = None) -> dict[str, Any]:
    """Run everything; returns what ``summary.json`` holds."""
    size = size or DemoSize()
    started = time.monotonic()
    data = _write_data(output, size, console)
    stage2 = _config(output, "stage2", data, size)
    sft = _config(output, "sft", data, size)
    before, before_predictions = _evaluate(stage2, stage2.model.model, "before", console)
    results: dict[str, Any] = {"before": before}
    pictures = {"before": before_predictions}
    for name, config, label in (("after", stage2, "rollout matching"), ("after_sft", sft, "plain SFT (control)")):
        seconds = _train(config, output / f"{_RUN_OF[name]}.yaml", label, console)
        results[name], pictures[label] = _evaluate(config, str(config.training.output_dir), label, console)
        results[name]["seconds_per_step"] = seconds
    results["settings"] = _settings(stage2, size, time.monotonic() - started)
    _write_page(Path(stage2.training.output_dir), output / "view.html")
    _show(results, pictures, output, console, size)
    return results


def _write_page(run: Path, path: Path) -> None:
    """The answers that rollout matching learned from, its curves and its tokens, on one page."""
    from coordexp.modeling.load import load_vocab
    from coordexp.viewer import collect, render

    path.write_text(render(collect(run, load_vocab(run))), encoding="utf-8")


def _write_data(output: Path, size: DemoSize, console: Console) -> dict[str, Path]:
    from coordexp.data.scenes import FRAMED, write_scenes

    paths = {}
    for split, seed in _SCENES.items():
        folder = output / "data" / split
        paths[split] = folder / "scenes.jsonl"
        count = size.train_scenes if split == "train" else size.val_scenes
        # The JSONL is written last and in one piece: if it is there, and long enough, so is everything else.
        if not paths[split].is_file() or sum(1 for _ in paths[split].open(encoding="utf-8")) != count:
            with console.status(f"drawing {count} {split} scenes"):
                write_scenes(folder, count, FRAMED, seed)
    return paths


def _config(output: Path, name: str, data: dict[str, Path], size: DemoSize) -> RunConfig:
    """``configs/demo/<name>.yaml`` with this run's paths, written beside the results so that it can be run by hand."""
    values: dict[str, Any] = {
        "extends": str(asset(f"configs/demo/{name}.yaml").resolve()),
        "model": {"model": str(asset("checkpoints/demo-stage1").resolve())},
        "custom": {"train_jsonl": str(data["train"].resolve()), "val_jsonl": str(data["val"].resolve())},
        "training": {"output_dir": str((output / name).resolve())},
    }
    if size.max_steps is not None:
        values["training"]["max_steps"] = size.max_steps
    if name == "stage2":  # what the page shows
        values["rollout_matching"] = {"monitor_dump": {"enabled": True, "every_steps": 20, "max_samples": 4}}
    path = output / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# Written by coordexp demo. Run it by hand: coordexp train {path}\n" + yaml.safe_dump(values))
    return load_config(path)


def _train(config: RunConfig, config_path: Path, label: str, console: Console) -> float:
    from coordexp.training.build import run_training

    trainer = run_training(config, console, label, config_path)
    (Path(config.training.output_dir) / "log_history.json").write_text(json.dumps(trainer.state.log_history, indent=1))
    steps = [line for line in trainer.state.log_history if "loss" in line]
    spent = [line["time/window_prepare_s"] + line["time/learner_s"] for line in steps]
    return round(sum(spent) / max(1, len(spent)), 3)


def _evaluate(config: RunConfig, model: str, label: str, console: Console) -> tuple[dict[str, float], list[Any]]:
    from coordexp.inference.evaluate import evaluate_model

    return evaluate_model(config, console, model=model, description=f"evaluating: {label}")


def _settings(config: RunConfig, size: DemoSize, seconds: float) -> dict[str, Any]:
    from coordexp.data.scenes import SCENES_VERSION

    return {
        "optimizer_steps": config.training.max_steps if size.max_steps is None else size.max_steps,
        "samples_per_step": config.training.per_device_train_batch_size * config.training.accumulation_steps(),
        "train_scenes": size.train_scenes,
        "val_scenes": size.val_scenes,
        "scenes_version": SCENES_VERSION,
        "seed": config.training.seed,
        "seconds": round(seconds, 1),
    }


def _show(results: dict[str, Any], pictures: dict[str, Any], output: Path, console: Console, size: DemoSize) -> None:
    from coordexp.evaluation.report import draw_comparison, figures_table

    columns = {"before": results["before"], "rollout matching": results["after"], "plain SFT": results["after_sft"]}
    console.print(figures_table(columns, f"{size.val_scenes} held-out scenes"))
    answers = {name: [prediction.answer() for prediction in run] for name, run in pictures.items()}
    draw_comparison(answers, output / "comparison.png", size.pictures)
    path = output / "summary.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    gain = results["after"]["f1"] - results["before"]["f1"]
    console.print(f"F1 {results['before']['f1']:.3f} → {results['after']['f1']:.3f} ({gain:+.3f}) by rollout matching")
    console.print(
        f"figures: {path}\npictures: {output / 'comparison.png'}\nanswers and curves: {output / 'view.html'}\n"
        f"tensorboard --logdir {output}",
        highlight=False,
        soft_wrap=True,
    )
