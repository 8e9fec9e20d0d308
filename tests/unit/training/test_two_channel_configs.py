"""The shipped two-channel configurations train on the tiny model, with every key but paths and sizes as shipped."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from coordexp.config import load_config
from coordexp.data.files import asset
from support.tiny_run import PROMPT, step_lines, tiny_checkpoint, tiny_scenes, train

SIZES = {
    "model.dtype": "float32",
    "template.prompt": PROMPT,
    "custom.val_sample_limit": 2,
    "training.per_device_train_batch_size": 1,
    "training.effective_batch_size": 2,
    "training.bf16": False,
    "training.use_cpu": True,
    "training.report_to": "none",
    "training.logging_steps": 1,
    "training.save_strategy": "no",
    "training.eval_strategy": "no",
    "training.load_best_model_at_end": False,
    "training.resume_from_checkpoint": None,
    "global_max_length": 512,
    "rollout_matching.max_new_tokens": 12,
}


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("stage2_two_channel/a_only", "AA"),
        ("stage2_two_channel/b_only", "BB"),
        ("stage2_two_channel/mixed", "AAAAAAAAAB"),  # one step of ten
        ("demo/two_channel", "ABAB"),
    ],
)
def test_two_channel_config_trains(name: str, channels: str, tmp_path: Path) -> None:
    files = {"custom.train_jsonl": str(tiny_scenes()), "custom.val_jsonl": str(tiny_scenes())}
    keys = SIZES | files | {"model.model": str(tiny_checkpoint()), "training.output_dir": str(tmp_path)}
    keys["training.max_steps"] = len(channels)
    if name.startswith("demo/"):
        del keys["training.effective_batch_size"]
    lines = step_lines(train(load_config(asset(f"configs/{name}.yaml"), keys)))
    assert "".join("B" if line["stage2/channel_b"] else "A" for line in lines) == channels
    for line in lines:
        assert math.isfinite(line["loss"]) and line["loss"] > 0 and line["grad_norm"] > 0
