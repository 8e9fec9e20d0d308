"""Two-channel runs in two processes, and what they must have in common with one process of twice the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coordexp.config import RunConfig
from support.tiny_run import step_lines, weights
from support.torchrun import torchrun

WORKER = Path(__file__).parents[1] / "integration" / "two_channel_worker.py"
SGD: dict[str, Any] = {
    "training__optim": "sgd",
    "training__learning_rate": 0.05,
    "training__max_grad_norm": 0.0,
    "training__save_strategy": "no",
}


def trained_by_two(config: RunConfig, *refused: str) -> list[dict[str, Any]]:
    """Train under two processes; what each left."""
    folder = Path(config.training.output_dir)
    done = torchrun(WORKER, folder.with_name(f"{folder.name}.yaml"), *refused)
    assert done.returncode == 0, done.output[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_same_training(
    folder: Path, alone: Any, ranks: list[dict[str, Any]], but: frozenset[str] | set[str] = frozenset()
) -> None:
    """Weights of ``folder`` are ``alone``'s; both ranks log the same, and what ``alone`` logs of whole steps, ``but``
    for some names."""
    trained, expected = load_file(folder / "model.safetensors"), weights(alone.model)
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], atol=3e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    first, second = ([{k: v for k, v in line.items() if "time/" not in k} for line in one["steps"]] for one in ranks)
    assert first == second
    for line, other in zip(first, step_lines(alone), strict=True):
        # Rows, and what is said of rows, are each process's own; everything else is the whole step's.
        for name in other.keys() - but:
            if name.startswith(("loss", "coord_diag/", "stage2/", "rollout/", "safeguard/", "grad_norm")):
                assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
