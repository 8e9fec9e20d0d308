"""Material of the checks: models with random weights, generated scenes, and the real trainer over them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from coordexp.checkpoints.describe import describe
from coordexp.config import RunConfig, load_config
from coordexp.data.files import asset
from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.data.scenes import SPARSE, SceneSpec, write_scenes
from coordexp.doctor.check import Row, Settings, measured
from coordexp.modeling.load import load_model
from coordexp.modeling.tiny import TinySpec, build_tiny_checkpoint
from coordexp.modeling.widen import Width, widened
from coordexp.records import PackedRow
from coordexp.training.checked_run import check_run
from coordexp.training.loop import CoordExpTrainer
from coordexp.training.parallel import join_processes, set_allocator
from coordexp.training.run import build_trainer

SMALL = TinySpec(layers=2, vision_depth=2)
# Qwen3-VL-2B's widths and vocabulary in a few layers.
WIDE = TinySpec(
    hidden=2048, layers=4, heads=16, kv_heads=8, head_dim=128, mlp=6144, vision_hidden=1024, vision_depth=4,
    vision_heads=16, vision_mlp=4096, patch=16, min_pixels=2**16, max_pixels=2**20, vocab_rows=152_936,
)  # fmt: skip
ANSWERS = "answering"  # folder of the model that answers
GAIN = 1.1  # of random matrices; transformers' 0.02 leaves greedy answers ambiguous
# Makes a pass of the demo's model on a GPU as expensive as one of Qwen3-VL-2B's language model.
ANSWERING = Width(hidden=2048, mlp=6144, heads=32, kv_heads=16, layers=28)
IN_TURN = 256  # lines that name the scenes in turn: no epoch ends, and no loader process starts, within a timed run
LARGE_SCENES = SceneSpec(size=768, min_side=60, max_side=250, max_objects=8)
SEED = 7


def models(settings: Settings) -> Iterator[Row]:
    """Write the models and scenes that later checks read."""
    on_gpu = torch.cuda.is_available()
    for name, tied in (("tied", True), ("untied", False)):
        build_tiny_checkpoint(settings.folder / name, spec=replace(SMALL, tied=tied))
    small = write_scenes(settings.folder / "scenes", 4 * settings.ranks, SPARSE, SEED)
    _write_in_turn(small, settings.folder / "scenes_in_turn")
    large = write_scenes(settings.folder / "large", 24, LARGE_SCENES if on_gpu else SPARSE, SEED)
    _write_in_turn(large, settings.folder / "large_scenes")
    if settings.model is None:
        built = build_tiny_checkpoint(settings.folder / "model", spec=WIDE if on_gpu else TinySpec())
        loaded = load_model(built)
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(GAIN * parameter[0].numel() ** -0.5 / parameter.std())
        loaded.model.save_pretrained(built)
        if on_gpu:
            _write_wide(asset("checkpoints/demo-stage1"), settings.folder / ANSWERS)
    info = describe(model_of(settings))
    size = sum(info.parameters.values())
    kind = "random weights" if settings.model is None else str(settings.model)
    figure = f"{kind}: {size / 1e6:.1f} M parameters, {info.layers} layers, hidden {info.hidden}"
    yield measured("models", figure, parameters=size)


def model_of(settings: Settings) -> Path:
    """The checkpoint for training's speed."""
    return settings.folder / "model" if settings.model is None else settings.model


def answering_model(settings: Settings) -> Path:
    """The checkpoint for pushes and answers: without ``--model`` the demo's, which finds the generated scenes' objects;
    on a GPU as wide as 2B."""
    if settings.model is not None:
        return settings.model
    wide = settings.folder / ANSWERS
    return wide if wide.is_dir() else asset("checkpoints/demo-stage1")


def _write_in_turn(scenes: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = read_jsonl(scenes)
    write_jsonl([records[number % len(records)] for number in range(IN_TURN)], folder / "scenes.jsonl")


def _write_wide(narrow: Path, folder: Path) -> None:
    wide = widened(load_model(narrow, "float32").model, ANSWERING).bfloat16()
    shutil.copytree(narrow, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True)
    wide.save_pretrained(folder)


def keys_of(settings: Settings, checkpoint: Path, scenes: str, output: str) -> dict[str, Any]:
    """Keys of a run on generated scenes that starts from step 0 and writes nothing but its log."""
    return {
        "model.model": str(checkpoint),
        "custom.train_jsonl": str(settings.folder / scenes / "scenes.jsonl"),
        "custom.val_jsonl": None,
        "training.output_dir": str(settings.folder / output),
        "training.report_to": ["none"],
        "training.save_strategy": "no",
        "training.eval_strategy": "no",
        "training.resume_from_checkpoint": False,
    }


def config_of(settings: Settings, file: str, checkpoint: Path, scenes: str, **keys: Any) -> RunConfig:
    """The shipped configuration ``file`` on generated scenes. ``keys``: dotted keys with ``__`` for the dot."""
    given = {name.replace("__", "."): value for name, value in keys.items()}
    shared = {**keys_of(settings, checkpoint, scenes, "run"), "data.num_workers": 0}
    return load_config(asset(f"configs/{file}"), shared | given)


def trainer_of(config: RunConfig) -> CoordExpTrainer:
    """The trainer as ``coordexp train`` builds it, before its first step."""
    checked = check_run(config)
    set_allocator(checked.rollout)
    join_processes(config)
    trainer, _ = build_trainer(checked, Console(quiet=True))
    return trainer


def first_step(trainer: CoordExpTrainer) -> list[PackedRow]:
    """Accumulate the gradient of the run's first step; returns its rows."""
    trainer.batches.start(0)
    trainer.step.accumulate(trainer.batches, 0)
    assert trainer.step.prepared is not None
    return trainer.step.prepared.rows
