"""Two processes of two-channel training are one with twice the batch, also where their rows differ in number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coordexp.config import RunConfig
from coordexp.errors import AppendError
from coordexp.training import sources
from tiny_run import run_config, step_lines, train, weights

WORKER = Path(__file__).parent / "two_channel_worker.py"
SGD: dict[str, Any] = {
    "training__optim": "sgd",
    "training__learning_rate": 0.05,
    "training__max_grad_norm": 0.0,
    "training__save_strategy": "no",
}


def torchrun(config: RunConfig, *refused: str) -> list[dict[str, Any]]:
    """Train under two processes; what each left."""
    folder = Path(config.training.output_dir)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(WORKER),
         str(folder.with_name(f"{folder.name}.yaml")), *refused],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_same_training(folder: Path, alone: Any, ranks: list[dict[str, Any]]) -> None:
    trained, expected = load_file(folder / "model.safetensors"), weights(alone.model)
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], atol=3e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    first, second = ([{k: v for k, v in line.items() if "time/" not in k} for line in one["steps"]] for one in ranks)
    assert first == second
    for line, other in zip(first, step_lines(alone), strict=True):
        # Rows, and what is said of rows, are each process's own; everything else is the whole step's.
        for name in other:
            if name.startswith(("loss", "coord_diag/", "stage2/", "rollout/", "safeguard/", "grad_norm")):
                assert line[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


def test_a_mixed_run_is_the_same_in_two_processes(tmp_path: Path) -> None:
    """A, B, A, B; Channel-A with three forwards of the wrapped model's one call."""
    keys = SGD | {"training__max_steps": 4, "stage2_ab__n_softctx_iter": 3, "stage2_ab__coord_ctx_embed_mode": "soft",
                  "global_max_length": 2000}  # fmt: skip
    alone = train(run_config(tmp_path, "two_channel", "one", training__per_device_train_batch_size=4, **keys))
    ranks = torchrun(run_config(tmp_path, "two_channel", "two", training__per_device_train_batch_size=2, **keys))
    assert [line["stage2/channel_b"] for line in ranks[0]["steps"]] == [0, 1, 0, 1]
    assert_same_training(tmp_path / "two", alone, ranks)


def test_ranks_with_unequal_rows_stay_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows, so that ranks have several and unequally many; and in the first step nothing of rank 1 can be
    closed, so that it has none."""
    keys = SGD | {"training__max_steps": 3, "stage2_ab__schedule__b_ratio": 1, "global_max_length": 130}

    def alone(name: str, refused: frozenset[str] = frozenset(), **more: Any) -> Any:
        build = sources.build_target

        def build_or_refuse(*args: Any, **kwargs: Any) -> Any:
            if kwargs["sample_id"] in refused:
                raise AppendError("the prefix does not end where an entry may follow")
            return build(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(sources, "build_target", build_or_refuse)
            return train(
                run_config(tmp_path, "two_channel", name, training__per_device_train_batch_size=6, **keys | more)
            )

    seen = alone("look", training__max_steps=1).window.outcomes
    of_rank_1 = [outcome.rollout.sample_id for outcome in seen][3:]
    one = alone("one", frozenset(of_rank_1))
    ranks = torchrun(
        run_config(tmp_path, "two_channel", "two", training__per_device_train_batch_size=3, **keys), *of_rank_1
    )
    assert_same_training(tmp_path / "two", one, ranks)
    lines = ranks[0]["steps"]
    assert lines[0]["stage2/closure_dropped_total"] == 3 and lines[0]["packing/blank_rows_total"] > 0
    assert lines[0]["packing/segments_total"] - lines[0]["packing/blank_rows_total"] == 3
    assert all(line["train/micro_steps"] % 2 == 0 for line in lines), "a rank had more forwards than the other"
