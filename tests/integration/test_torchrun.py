"""Two processes under torchrun (gloo, CPU) are one process with twice the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from coordexp.config import RunConfig
from support.tiny_run import run_config, step_lines, tiny_checkpoint, train, weights
from support.torchrun import torchrun

WORKER = Path(__file__).parent / "train_worker.py"

# Plain SGD, so that weights show the gradient itself; a small row, so that segments wait on both ranks.
KEYS: dict[str, Any] = {
    "training__optim": "sgd",
    "training__learning_rate": 0.05,
    "training__max_grad_norm": 0.0,
    "training__max_steps": 3,
    "training__save_strategy": "steps",
    "training__save_steps": 3,
    "training__eval_strategy": "steps",
    "training__eval_steps": 3,
}


class Outcome(NamedTuple):
    folder: Path
    ranks: list[dict[str, Any]]


def yaml_of(config: RunConfig) -> Path:
    folder = Path(config.training.output_dir)
    return folder.with_name(f"{folder.name}.yaml")


def trained(config: RunConfig) -> Outcome:
    """By two ranks."""
    done = torchrun(WORKER, yaml_of(config))
    assert done.returncode == 0, done.output[-3000:]
    folder = Path(config.training.output_dir)
    return Outcome(folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("two")
    return trained(run_config(folder, 2, training__per_device_train_batch_size=2, **KEYS))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("one")
    return train(run_config(folder, 2, training__per_device_train_batch_size=4, **KEYS))


def test_two_processes_take_the_same_optimizer_steps_as_one(two: Outcome, one: Any) -> None:
    start = load_file(tiny_checkpoint() / "model.safetensors")
    trained = load_file(two.folder / "model.safetensors")
    alone = weights(one.model)
    assert any(not torch.equal(trained[name], start[name]) for name in trained)
    for name, value in trained.items():
        torch.testing.assert_close(value, alone[name], atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_what_is_logged_is_global_and_the_same_on_every_rank(two: Outcome, one: Any) -> None:
    first, second = (rank["steps"] for rank in two.ranks)
    assert len(first) == 3
    for a, b, alone in zip(first, second, step_lines(one), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith("time/")} == {
            k: v for k, v in b.items() if not k.startswith("time/")
        }
        assert a["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        for name in ("rollout/samples_total", "rollout/gt_objects_total", "rollout/fn_appended_total",
                     "rollout/parse_truncated_rate", "train/samples_total", "train/tokens_total",
                     "rollout/gen_new_tokens_mean"):  # fmt: skip
            assert a[name] == alone[name], name
        for name in [name for name in alone if name.startswith(("loss/", "coord_diag/"))]:
            assert a[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


def test_evaluation_is_shared_out_and_summed(two: Outcome, one: Any) -> None:
    (alone,) = [line for line in one.state.log_history if "eval_rollout/f1" in line]
    for rank in two.ranks:
        (line,) = rank["evaluations"]
        assert line["eval_rollout/images"] == alone["eval_rollout/images"] == 5
        assert line["eval_rollout/gt_objects"] == alone["eval_rollout/gt_objects"]


def test_a_checkpoint_holds_every_ranks_buffer(two: Outcome) -> None:
    names = {path.name for path in (two.folder / "checkpoint-3").iterdir()}
    assert {"carry_buffer_rank0.json", "carry_buffer_rank1.json", "trainer_state.json", "config.json"} <= names
    assert json.loads((two.folder / "run_manifest.json").read_text())["world_size"] == 2


# -- sharded by FSDP2 --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run with weights, gradients and optimizer split over both processes."""
    folder = tmp_path_factory.mktemp("sharded")
    keys = KEYS | {"training__per_device_train_batch_size": 2, "training__save_steps": 2, "fsdp__enabled": True}
    return trained(run_config(folder, 2, **keys))


def assert_weights(folder: Path, alone: Any) -> None:
    trained, expected = load_file(folder / "model.safetensors"), weights(alone.model)
    assert trained.keys() == load_file(tiny_checkpoint() / "model.safetensors").keys(), "a plain checkpoint"
    for name, value in trained.items():
        torch.testing.assert_close(value, expected[name], atol=5e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_sharded_processes_take_the_same_optimizer_steps_as_one(sharded: Outcome, two: Outcome, one: Any) -> None:
    assert [rank["sharded"] for rank in two.ranks] == [0, 0]
    assert all(rank["sharded"] > 50 for rank in sharded.ranks), "every weight is split"
    assert_weights(sharded.folder, one)
    for line, alone in zip(sharded.ranks[0]["steps"], step_lines(one), strict=True):
        assert line["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    (evaluated,) = sharded.ranks[1]["evaluations"]
    assert evaluated["eval_rollout/images"] == 5, "sharded weights generate too"


def test_a_sharded_run_resumes_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    """With AdamW, whose state is sharded too: two of three steps, and the third in new processes."""
    keys = {
        "training__max_steps": 3,
        "training__save_strategy": "steps",
        "training__save_steps": 2,
        "fsdp__enabled": True,
    }
    whole = trained(run_config(tmp_path, 1, "whole", **keys))
    keys["training__resume_from_checkpoint"] = str(whole.folder / "checkpoint-2")
    resumed = trained(run_config(tmp_path, 1, "resumed", **keys))
    (last,) = [line for line in resumed.ranks[0]["steps"] if line["step"] == 3]
    assert last["loss"] == whole.ranks[0]["steps"][2]["loss"]
    ours, theirs = (load_file(run.folder / "model.safetensors") for run in (resumed, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sharded_bfloat16_trains_as_unsharded_bfloat16(tmp_path: Path) -> None:
    """Reductions and scores stay float32: in bfloat16 the losses on coordinates would be far off."""
    keys = KEYS | {
        "training__bf16": True, "training__max_steps": 2, "training__save_strategy": "no",
        "training__eval_strategy": "no",
        "custom__coord_soft_ce_w1": {"enabled": True, "soft_ce_weight": 1.0, "w1_weight": 1.0, "gate_weight": 1.0},
    }  # fmt: skip
    plain, sharded = (trained(run_config(tmp_path, 1, f"fsdp-{on}", fsdp__enabled=on, **keys)) for on in (False, True))
    for line, alone in zip(sharded.ranks[0]["steps"], plain.ranks[0]["steps"], strict=True):
        for name in [name for name in alone if name.startswith("loss")]:
            assert line[name] == pytest.approx(alone[name], rel=5e-3), name
    start = load_file(tiny_checkpoint() / "model.safetensors")
    moved = [
        torch.cat([(load_file(run.folder / "model.safetensors")[name] - start[name]).flatten() for name in start])
        for run in (plain, sharded)
    ]
    assert torch.cosine_similarity(*moved, dim=0) > 0.99
