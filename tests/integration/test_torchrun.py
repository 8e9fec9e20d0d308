"""Two processes under torchrun (gloo, CPU) equal one process with twice the batch."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from coordexp import distributed
from coordexp.config import RunConfig
from coordexp.errors import AppendError
from coordexp.modeling.load import load_model
from coordexp.training import saving
from coordexp.training import step_answers as training_answers
from coordexp.training.checkpoint import check_contents
from support.tiny_run import run_config, step_lines, tiny_checkpoint, train
from support.torchrun import SGD, assert_same_training, assert_same_weights, train_by_two, train_rank

# A small row, so that segments wait on both ranks.
# The seed: an order in which no predicted box is degenerate, where CIoU multiplies rounding a thousand times.
KEYS: dict[str, Any] = SGD | {
    "training__seed": 3,
    "training__max_steps": 3,
    "training__save_strategy": "steps",
    "training__save_steps": 3,
    "training__eval_strategy": "steps",
    "training__eval_steps": 3,
}
Two = tuple[RunConfig, list[dict[str, Any]]]


def folder_of(config: RunConfig) -> Path:
    return Path(config.training.output_dir)


def saved(config: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(folder_of(config) / "model.safetensors")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    config = run_config(tmp_path_factory.mktemp("two"), 2, training__per_device_train_batch_size=2, **KEYS)
    return config, train_by_two(config)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(run_config(tmp_path_factory.mktemp("one"), 2, training__per_device_train_batch_size=4, **KEYS))


def test_two_processes_take_the_same_optimizer_steps_as_one(two: Two, one: Any) -> None:
    start, trained = load_file(tiny_checkpoint() / "model.safetensors"), saved(two[0])
    assert any(not torch.equal(trained[name], start[name]) for name in trained)
    assert_same_weights(two[0], one)


def test_logs_are_global_and_equal_on_every_rank(two: Two, one: Any) -> None:
    first, second = (rank["steps"] for rank in two[1])
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
    (alone,) = [line for line in one.state.log_history if "eval_rollout/f1" in line]
    for rank in two[1]:
        (line,) = rank["evaluations"]
        assert line["eval_rollout/images"] == alone["eval_rollout/images"] == 5
        assert line["eval_rollout/gt_objects"] == alone["eval_rollout/gt_objects"]


def test_a_checkpoint_has_the_buffer_of_every_rank(two: Two) -> None:
    folder = folder_of(two[0])
    names = {path.name for path in (folder / "checkpoint-3").iterdir()}
    assert {"carry_buffer_rank0.json", "carry_buffer_rank1.json", "trainer_state.json", "config.json"} <= names
    assert json.loads((folder / "run_manifest.json").read_text())["world_size"] == 2


# -- sharded by FSDP2 --------------------------------------------------------------------------------------------------


def test_sharded_processes_take_the_same_optimizer_steps_as_one(two: Two, one: Any, tmp_path: Path) -> None:
    """Weights, gradients and optimizer are split over both processes."""
    keys = KEYS | {"training__per_device_train_batch_size": 2, "training__save_steps": 2, "fsdp__enabled": True}
    keys |= {"custom__val_sample_limit": 1, "rollout_matching__eval_detection__score_mode": "confidence"}
    config = run_config(tmp_path, 2, **keys)
    ranks = train_by_two(config)
    assert [rank["sharded"] for rank in two[1]] == [0, 0]
    assert all(rank["sharded"] > 50 for rank in ranks), "every weight is split"
    assert saved(config).keys() == load_file(tiny_checkpoint() / "model.safetensors").keys(), "a plain checkpoint"
    assert_same_weights(config, one)
    for line, alone in zip(ranks[0]["steps"], step_lines(one), strict=True):
        assert line["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    (evaluated,) = ranks[1]["evaluations"]
    assert evaluated["eval_rollout/images"] == 1, "generation works with sharded weights, and if a rank has no image"


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_run_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Two of three steps with AdamW (its state is sharded too), the third in new processes. The model at the end
    is whole, whatever the checkpoints are."""
    keys: dict[str, Any] = {"training__max_steps": 3, "training__save_strategy": "steps", "training__save_steps": 2,
                            "fsdp__enabled": True, "fsdp__state_dict_type": kind}  # fmt: skip
    whole = run_config(tmp_path, 1, "whole", **keys)
    steps = train_by_two(whole)[0]["steps"]
    keys["training__resume_from_checkpoint"] = str(folder_of(whole) / "checkpoint-2")
    resumed = run_config(tmp_path, 1, "resumed", **keys)
    (last,) = [line for line in train_by_two(resumed)[0]["steps"] if line["step"] == 3]
    assert last["loss"] == steps[2]["loss"]
    assert (folder_of(whole) / "checkpoint-2" / "model.safetensors").is_file() == (kind == "FULL_STATE_DICT")
    loaded = load_model(folder_of(whole))
    assert loaded.card.training is not None and loaded.processor.chat_template
    ours, theirs = saved(resumed), saved(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def save_slowly(yaml: Path) -> None:
    """Rank 0 writes its weights under another name for a while, in which rank 1 is done."""
    modeling_utils: Any = importlib.import_module("transformers.modeling_utils")
    write, note = modeling_utils.safe_save_file, saving.note_best

    def written_late(tensors: Any, path: str, **options: Any) -> None:
        part = Path(path).with_name(".tmp-part")
        part.touch()
        time.sleep(2.0)
        part.unlink()
        write(tensors, path, **options)

    def noted_late(*arguments: Any) -> None:
        if distributed.rank():
            time.sleep(1.0)
        note(*arguments)

    modeling_utils.safe_save_file, saving.note_best = written_late, noted_late
    train_rank(yaml)


def test_a_rank_does_not_seal_what_another_one_writes(tmp_path: Path) -> None:
    keys = {"training__max_steps": 1, "training__save_strategy": "steps", "training__save_only_model": True}
    config = run_config(tmp_path, 1, **keys, fsdp__enabled=True)
    train_by_two(config, by=save_slowly)
    check_contents(folder_of(config) / "checkpoint-1")


def test_sharded_bfloat16_trains_like_unsharded_bfloat16(tmp_path: Path) -> None:
    """Reductions and scores stay float32: in bfloat16 the losses on coordinates would be far off."""
    keys = KEYS | {
        "training__bf16": True, "training__max_steps": 2, "training__save_strategy": "no",
        "training__eval_strategy": "no",
        "custom__coord_soft_ce_w1": {"enabled": True, "soft_ce_weight": 1.0, "w1_weight": 1.0, "gate_weight": 1.0},
    }  # fmt: skip
    runs = [run_config(tmp_path, 1, f"fsdp-{on}", fsdp__enabled=on, **keys) for on in (False, True)]
    plain, sharded = (train_by_two(config)[0]["steps"] for config in runs)
    for line, alone in zip(sharded, plain, strict=True):
        for name in [name for name in alone if name.startswith("loss")]:
            assert line[name] == pytest.approx(alone[name], rel=5e-3), name
    start = load_file(tiny_checkpoint() / "model.safetensors")
    moved = [torch.cat([(saved(config)[name] - start[name]).flatten() for name in start]) for config in runs]
    assert torch.cosine_similarity(*moved, dim=0) > 0.99


def test_sharded_adapters_are_saved_and_recomputed_with_the_same_dropout(tmp_path: Path) -> None:
    keys = {"training__save_strategy": "steps", "training__save_steps": 1, "fsdp__enabled": True,
            "tuner__train_type": "lora", "tuner__lora_dropout": 0.5}  # fmt: skip
    runs = [run_config(tmp_path, 1, f"{on}", **keys, training__gradient_checkpointing=on) for on in (False, True)]
    kept, recomputed = (train_by_two(config)[0]["steps"] for config in runs)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in kept] == [line[name] for line in recomputed]
    check_contents(folder_of(runs[1]) / "checkpoint-2")


# -- two channels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True])
def test_a_two_channel_run_is_the_same_in_two_processes(sharded: bool, tmp_path: Path) -> None:
    """A, B, A, B; Channel-A with three forwards within the wrapped model's one call: DDP, and FSDP's shards."""
    keys = SGD | {"training__max_steps": 4, "stage2_ab__n_softctx_iter": 3, "stage2_ab__coord_ctx_embed_mode": "soft",
                  "global_max_length": 2000}  # fmt: skip
    alone = train(run_config(tmp_path, "two_channel", "one", training__per_device_train_batch_size=4, **keys))
    config = run_config(
        tmp_path, "two_channel", "two", training__per_device_train_batch_size=2, fsdp__enabled=sharded, **keys
    )
    ranks = train_by_two(config)
    assert [line["stage2/channel_b"] for line in ranks[0]["steps"]] == [0, 1, 0, 1]
    assert_same_training(config, alone, ranks)


def refusing(build: Any, sample_ids: list[str]) -> Any:
    """``build_target`` that fails for these samples, as it would if their prefix could not be continued."""

    def build_or_refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs["sample_id"] in sample_ids:
            raise AppendError("no entry can follow the prefix")
        return build(*args, **kwargs)

    return build_or_refuse


def train_refusing(yaml: Path, sample_ids: list[str]) -> None:
    training_answers.build_target = refusing(training_answers.build_target, sample_ids)
    train_rank(yaml)


def test_ranks_with_different_numbers_of_rows_stay_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows, so that ranks have several and unequally many; and no sample of rank 1's first step can be closed, so
    that it has none."""
    keys = SGD | {"training__max_steps": 3, "stage2_ab__schedule__b_ratio": 1, "global_max_length": 130}

    def alone(name: str, refused: list[str], **more: Any) -> Any:
        config = run_config(tmp_path, "two_channel", name, training__per_device_train_batch_size=6, **keys | more)
        with monkeypatch.context() as patched:
            patched.setattr(training_answers, "build_target", refusing(training_answers.build_target, refused))
            return train(config)

    outcomes = alone("look", [], training__max_steps=1).step.prepared.outcomes
    of_rank_1 = [outcome.rollout.sample_id for outcome in outcomes][3:]
    one = alone("one", of_rank_1)
    config = run_config(tmp_path, "two_channel", "two", training__per_device_train_batch_size=3, **keys)
    ranks = train_by_two(config, of_rank_1, by=train_refusing)
    assert_same_training(config, one, ranks)
    lines = ranks[0]["steps"]
    assert lines[0]["stage2/closure_dropped_total"] == 3 and lines[0]["packing/blank_rows_total"] > 0
    assert lines[0]["packing/segments_total"] == 3
    assert all(line["train/micro_steps"] % 2 == 0 for line in lines), "one rank had more forwards than the other"
