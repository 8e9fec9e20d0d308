"""LoRA and DoRA runs: the base is not touched, checkpoints resume exactly, and what is saved evaluates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from coordexp.errors import CheckpointError, ConfigError
from coordexp.evaluation.summary import COUNTS_ONLY, summarise
from coordexp.inference.evaluation import answer_jsonl
from coordexp.modeling.load import load_model
from coordexp.training.checked_run import check_run
from coordexp.training.run import run_training
from support.tiny_run import forget_configuration, load_tiny, run_config, step_lines, train, weights
from support.tuned_models import pushed, trained

LORA: dict[str, Any] = {"tuner__train_type": "lora", "tuner__lora_rank": 4, "training__max_steps": 2}
DORA = LORA | {"tuner__use_dora": True}


@pytest.mark.parametrize(("keys", "stage"), [(LORA, 1), (DORA, 2)], ids=["lora", "dora"])
def test_training_changes_only_adapters_and_coordinate_rows(keys: dict[str, Any], stage: int, tmp_path: Path) -> None:
    start = weights(load_tiny().model)
    trainer = train(run_config(tmp_path, stage, **keys))
    assert len(step_lines(trainer)) == 2
    moved = trained(trainer.model)
    assert all(value.abs().sum() > 0 for name, value in moved.items() if "lora_B" in name or "coord_offset" in name)
    for name, value in weights(trainer.model).items():
        if name not in moved and "coord_offset" not in name:
            assert torch.equal(value, start[name.replace(".base_layer", "")]), name


def test_a_resumed_adapter_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Its checkpoint was moved: nothing inside points back to where it was written."""
    keys = DORA | {"training__max_steps": 4, "training__save_strategy": "steps", "training__save_steps": 2}
    whole = train(run_config(tmp_path, 2, "whole", **keys))
    moved = Path(shutil.move(tmp_path / "whole" / "checkpoint-2", tmp_path / "elsewhere"))
    resumed = train(run_config(tmp_path, 2, "resumed", **keys, training__resume_from_checkpoint=str(moved)))
    assert resumed.state.global_step == 4
    one, two = trained(whole.model), trained(resumed.model)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    files = {path.name for path in moved.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "coord_offset.safetensors"} <= files
    assert "model.safetensors" not in files, "a checkpoint does not contain the base"


def test_resuming_full_weights_as_adapters_is_refused(tmp_path: Path) -> None:
    keys = {"training__max_steps": 1, "training__save_strategy": "steps", "training__save_steps": 1}
    train(run_config(tmp_path, 1, "full", **keys))
    written = tmp_path / "full" / "checkpoint-1"
    assert (written / "model.safetensors").stat().st_mode == (written / "config.json").stat().st_mode
    forget_configuration(tmp_path / "full")
    config = run_config(
        tmp_path, 1, "lora", **LORA, training__resume_from_checkpoint=str(tmp_path / "full" / "checkpoint-1")
    )
    with pytest.raises(CheckpointError, match="resume with the tuner section that wrote them"):
        train(config)


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    keys = LORA | {
        "training__save_strategy": "steps", "training__save_steps": 1, "training__eval_strategy": "steps",
        "training__eval_steps": 1, "training__load_best_model_at_end": True, "custom__val_sample_limit": 1,
        "training__metric_for_best_model": "rollout/f1",
    }  # fmt: skip
    trainer = train(run_config(tmp_path, 1, **keys))
    assert str(trainer.state.best_model_checkpoint).endswith("checkpoint-1"), "a random model's F1 does not grow"
    best = load_model(trainer.state.best_model_checkpoint, "float32").model
    final = pushed(trainer.model)
    assert all(torch.equal(best.get_parameter(name), value) for name, value in final.items())


def test_the_final_folder_can_be_loaded_evaluated_and_trained(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1, "first", **LORA)
    trainer = run_training(config, Console(quiet=True))
    folder = tmp_path / "first"
    loaded = load_model(folder, "float32")
    assert all(torch.equal(loaded.model.get_parameter(name), value) for name, value in pushed(trainer.model).items())
    predictions = answer_jsonl(config, Console(quiet=True), "evaluating", Path(folder)).answers
    figures = summarise(predictions, COUNTS_ONLY).figures
    assert len(predictions) == figures["images"] == 5
    second = train(run_config(tmp_path, 1, "second", model__model=str(folder), training__max_steps=1))
    assert second.state.global_step == 1
    assert "peft_config" not in vars(second.model), "full training continues from the merged weights"


@pytest.mark.parametrize("keys", [LORA, {"model__attn_implementation": "sdpa"}], ids=["lora", "full"])
def test_gradient_checkpointing_trains_the_same(keys: dict[str, Any], tmp_path: Path) -> None:
    keys = keys | {"training__optim": "sgd", "tuner__lora_dropout": 0.0}
    plain, *recomputed = (
        train(
            run_config(
                tmp_path, 1, str(every), **keys,
                training__gradient_checkpointing=every > 0, training__gradient_checkpointing_every=max(every, 1),
            )
        ).model
        for every in (0, 1, 2)
    )  # fmt: skip
    counts = [sum(getattr(one, "gradient_checkpointing", False) for one in model.modules()) for model in recomputed]
    assert counts[1] < counts[0], "every second layer keeps its activations"
    for model in recomputed:
        found = trained(model)
        for name, value in trained(plain).items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_an_unsupported_attention_is_refused_before_loading(tmp_path: Path) -> None:
    config = run_config(tmp_path, 1, model__attn_implementation="varlen", model__model="/nowhere")
    with pytest.raises(ConfigError, match=r"model\.attn_implementation: varlen has no backward pass on the CPU"):
        check_run(config)
