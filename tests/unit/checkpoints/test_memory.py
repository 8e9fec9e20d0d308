"""The memory estimate against traced optimizer steps of Qwen3-VL at full size (fake tensors, no allocator overhead)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from coordexp.checkpoints.describe import weight_shapes
from coordexp.checkpoints.disk import checked_disk
from coordexp.checkpoints.folder import Checkpoint
from coordexp.checkpoints.memory import check_memory, estimate_memory, recomputed_every, trained_numbers
from coordexp.config import RunConfig, parse_config
from coordexp.config.schema import DeepSpeedConfig
from coordexp.errors import ConfigError
from coordexp.modeling.adapter import tune
from coordexp.modeling.load import load_model
from support.config_samples import set_keys, stage1, stage2, two_channel
from support.qwen_sizes import qwen3_vl_config
from support.tiny_run import run_config, tiny_checkpoint
from support.tuned_models import untied_checkpoint


@cache
def model(size: str) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    """``config.json`` and the shapes of a published size with 1000 coordinate tokens."""
    config = qwen3_vl_config(size)
    with torch.device("meta"):
        weights = dict(Qwen3VLForConditionalGeneration(config).named_parameters())
    return config.to_dict(), {name: tuple(weight.shape) for name, weight in weights.items()}


def run(
    length: int, *, full: bool, dtype: str = "bfloat16", every: int = 1, frozen: bool = False, fused: bool = False,
    dropout: float = 0.05, **keys: Any,
) -> RunConfig:  # fmt: skip
    """``every``: the layers that are recomputed, 0 for none; ``frozen``: the vision tower; ``dropout``: adapters', as
    it was when most of these were traced."""
    content = {**stage1(), "global_max_length": length, **keys}
    content["model"] = {**content["model"], "dtype": dtype, "fused_kernels": fused}
    lora = {"train_type": "lora", "lora_rank": 16, "lora_dropout": dropout, "freeze_vit": frozen}
    content["tuner"] = {"train_type": "full"} if full else lora
    masters = "float32" if full and dtype == "bfloat16" else None
    content["training"] = {
        **content["training"], "bf16": True, "gradient_checkpointing": every > 0, "master_weights": masters,
        "gradient_checkpointing_every": max(every, 1),
    }  # fmt: skip
    return parse_config(content)


@pytest.mark.parametrize(
    ("size", "config", "world_size", "traced_gb"),
    [
        ("2B", run(12_000, full=True), 1, 45.3),
        ("2B", run(12_000, full=True, dtype="float32"), 1, 43.8),
        ("2B", run(16_000, full=True), 1, 46.7),
        ("2B", run(12_000, full=True), 8, 42.6),
        ("2B", run(12_000, full=True, every=0), 1, 104.0),
        ("2B", run(12_000, full=True, every=2), 1, 74.2),
        ("4B", run(12_000, full=True), 1, 89.0),
        ("8B", run(12_000, full=True), 1, 168.0),
        ("2B", run(12_000, full=False), 1, 11.9),
        ("2B", run(12_000, full=False, every=0, frozen=True), 1, 51.3),
        ("2B", run(12_000, full=False, every=0), 1, 80.6),
        ("2B", run(12_000, full=False, every=0, fused=True), 1, 68.9),
        ("2B", run(12_000, full=False, every=2), 1, 44.9),
        ("4B", run(12_000, full=False), 1, 16.8),
        ("8B", run(12_000, full=False), 1, 28.5),
        ("8B", run(16_000, full=False), 1, 30.8),
        ("8B", run(12_000, full=False, every=4), 1, 132.4),
        ("2B", run(12_000, full=False, every=0, frozen=True, dropout=0.0), 1, 38.8),
        ("2B", run(12_000, full=False, every=0, fused=True, dropout=0.0), 1, 51.9),
        ("8B", run(12_000, full=False, every=4, dropout=0.0), 1, 106.3),
    ],
)
def test_the_estimate_is_within_ten_percent(size: str, config: RunConfig, world_size: int, traced_gb: float) -> None:
    estimate = estimate_memory(config, *model(size), world_size)
    assert estimate.total / 1e9 == pytest.approx(traced_gb, rel=0.1)


@pytest.mark.parametrize(
    ("keys", "checkpoint", "numbers"),
    [
        ({"train_coord_rows": False}, tiny_checkpoint, 14_080),
        ({}, tiny_checkpoint, 78_080),
        ({}, untied_checkpoint, 142_080),  # one table of 1000 x 64 more
        ({"use_dora": True}, tiny_checkpoint, 79_808),
        ({"target_modules": ["q_proj"], "modules_to_save": ["visual.merger"]}, tiny_checkpoint, 89_856),
        ({"modules_to_save": ["merger"]}, tiny_checkpoint, 101_120),  # which gets no adapters then
    ],
    ids=["no rows", "rows", "rows, untied", "DoRA", "a part of another module", "the module itself"],
)
def test_adapters_rows_and_modules_trained_whole_are_all_counted(
    keys: dict[str, Any], checkpoint: Callable[[], Path], numbers: int
) -> None:
    tuner = {"train_type": "lora", "lora_rank": 4, **keys}
    config = of_tiny(stage1(), model__model=str(checkpoint()), model__dtype="bfloat16", tuner=tuner)
    loaded = load_model(checkpoint())
    tune(loaded.model, config.tuner, loaded.vocab.coord_token_ids)
    assert sum(one.numel() for one in loaded.model.parameters() if one.requires_grad) == numbers
    assert check_memory(config).gradients == 4 * numbers


def test_fsdp_shares_weights_gradients_and_optimizer() -> None:
    one, eight = (
        estimate_memory(run(12_000, full=True, dtype="float32", fsdp={"enabled": True}), *model("8B"), ranks)
        for ranks in (2, 8)
    )
    assert (one.weights, one.gradients, one.optimizer) == (4 * eight.weights, 4 * eight.gradients, 4 * eight.optimizer)
    assert one.activations == eight.activations and eight.total < 40e9


@pytest.mark.parametrize(
    "keys",
    [{"training__optim": "adamw_8bit"}, {"training__optim": "sgd"}, {"deepspeed": {"enabled": True, "config": {}}}],
)
def test_what_the_estimate_does_not_know_never_raises_it(keys: dict[str, Any]) -> None:
    config = run(12_000, full=True, dtype="float32")
    training = {key.removeprefix("training__"): value for key, value in keys.items() if key.startswith("training__")}
    changed = config.model_copy(update={"training": config.training.model_copy(update=training)})
    if "deepspeed" in keys:
        changed = changed.model_copy(update={"deepspeed": DeepSpeedConfig.model_validate(keys["deepspeed"])})
    assert estimate_memory(changed, *model("2B"), 4).total < estimate_memory(config, *model("2B"), 4).total - 12e9


def of_tiny(content: dict[str, Any], **keys: Any) -> RunConfig:
    return parse_config(set_keys(content, {"model__model": str(tiny_checkpoint())} | keys))


def advice(config: RunConfig, share: float) -> str:
    """Why a GPU with this share of the memory that the run needs is refused."""
    with pytest.raises(ConfigError) as refused:
        check_memory(config, gpu_bytes=int(share * check_memory(config).total))
    return str(refused.value)


IN_BFLOAT16 = {"model__dtype": "bfloat16", "training__bf16": True, "training__master_weights": "float32"}


def test_suggested_changes_are_ones_that_the_schema_accepts() -> None:
    """FSDP and adapters refuse master weights."""
    config = of_tiny(stage1(), **IN_BFLOAT16, training__gradient_checkpointing=True, global_max_length=16)
    message = advice(config, 0.6)
    assert message.count("training.master_weights: null") == message.count("fsdp.enabled") + message.count("lora") > 0


def test_changes_that_another_key_excludes_are_not_suggested() -> None:
    engine = {"mode": "colocate", "gpu_memory_utilization": 0.1, "sleep_level": 1}
    offload = {"enabled": True, "offload_optimizer": True}

    def advised(length: int, share: float, **keys: Any) -> str:
        content = stage2(rollout_backend="vllm", vllm=engine, **keys)
        return advice(of_tiny(content, **IN_BFLOAT16, global_max_length=length), share)

    assert "global_max_length: 2000" in advised(4000, 0.8, max_new_tokens=1000)
    assert "global_max_length" not in advised(4000, 0.8, max_new_tokens=3000)
    assert "fsdp.enabled: true" in advised(16, 0.6, max_new_tokens=4)
    assert "fsdp.enabled" not in advised(16, 0.6, max_new_tokens=4, offload=offload)


def colocated(**keys: Any) -> RunConfig:
    engine = {"mode": "colocate", "tensor_parallel_size": 1, "gpu_memory_utilization": 0.45, "sleep_level": 1}
    content = stage2(**{"rollout_backend": "vllm", "vllm": engine} | keys)
    more = {"global_max_length": 12_000, "model.fused_kernels": False, "training.gradient_checkpointing": True}
    return parse_config(set_keys(content, IN_BFLOAT16 | more))


def test_an_engine_shares_the_gpu_with_what_the_trainer_keeps() -> None:
    gpu, share = 80e9, 0.45 * 80e9
    asleep = estimate_memory(colocated(), *model("2B"))
    assert asleep.while_answering / 1e9 == pytest.approx(30, rel=0.05)  # weights, masters and two moments
    assert asleep.peak(gpu) == asleep.while_answering + share > asleep.total
    awake = estimate_memory(colocated(vllm={"mode": "colocate", "gpu_memory_utilization": 0.45}), *model("2B"))
    assert awake.peak(gpu) == awake.total + share > 1.1 * asleep.peak(gpu)
    offload = {"enabled": True, "offload_optimizer": True}
    moved = estimate_memory(colocated(offload=offload), *model("2B"))
    assert moved.while_answering == moved.weights
    alone = estimate_memory(colocated(rollout_backend="hf", vllm={}), *model("2B"))
    assert alone.peak(gpu) == alone.total == awake.total


def test_an_engine_that_does_not_fit_is_refused_with_a_share_that_does() -> None:
    config = of_tiny(stage2(rollout_backend="vllm", vllm={"gpu_memory_utilization": 0.95}))
    assert "rollout_matching.vllm.gpu_memory_utilization: 0.47" in advice(config, 5)
    check_memory(config, gpu_bytes=int(150 * check_memory(config).total))


def test_a_run_that_cannot_fit_is_refused_with_a_size_that_fits() -> None:
    message = advice(of_tiny(stage1(), global_max_length=4000), 1 / 1.6)
    assert re.search(r"GB for each trainer process.*training\.gradient_checkpointing: true \(", message)


@pytest.mark.parametrize(("share", "warns"), [(0.85, False), (0.95, True), (1.05, True)])
def test_a_run_that_hardly_fits_is_warned_with_a_size_that_fits(
    share: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = of_tiny(stage1(), global_max_length=4000)
    need = check_memory(config).total
    assert check_memory(config, gpu_bytes=int(need / share)).total == need
    assert ("tight" in caplog.text and "training.gradient_checkpointing: true (" in caplog.text) == warns


@pytest.mark.parametrize(
    ("full", "gigabytes", "every"), [(True, 60, 1), (True, 85, 2), (True, 110, 0), (False, 80, 4), (False, None, 1)]
)
def test_auto_recomputes_as_few_layers_as_memory_allows(full: bool, gigabytes: float | None, every: int) -> None:
    """2B, rows of 12,000 tokens, fused kernels; None: a CPU."""
    config = run(12_000, full=full, fused=True)
    training = config.training.model_copy(update={"gradient_checkpointing_every": "auto"})
    config = config.model_copy(update={"training": training})
    gpu = None if gigabytes is None else gigabytes * 1e9
    assert recomputed_every(config, *model("2B"), 1, gpu) == every
    assert (
        estimate_memory(config, *model("2B")).total
        == estimate_memory(run(12_000, full=full, fused=True), *model("2B")).total
    )
    written = config.model_copy(update={"training": training.model_copy(update={"gradient_checkpointing_every": 3})})
    assert recomputed_every(written, *model("2B"), 1, gpu) == 3


def test_auto_recomputes_all_layers_in_two_channel_training() -> None:
    """Channel-A's rows have several forwards, which the estimate does not count."""
    keys = {"training.gradient_checkpointing": True, "training.gradient_checkpointing_every": "auto"}
    assert recomputed_every(parse_config(set_keys(two_channel(), keys)), *model("2B"), 1, 1e12) == 1
    assert recomputed_every(run(12_000, full=True), *model("2B"), 1, 1e12) == 1, "as written"


SHARDS: dict[str, Any] = {"fsdp__enabled": True, "fsdp__state_dict_type": "SHARDED_STATE_DICT"}


@pytest.mark.parametrize(
    ("keys", "weights", "trained"),
    [
        ({}, 1, 2),
        ({"fsdp__enabled": True}, 2, 2),
        (SHARDS, 1, 2),
        ({"fsdp__enabled": True, "training__save_only_model": True}, 1, 0),
        ({"tuner__train_type": "lora"}, 0, 3),
        ({"tuner__train_type": "lora", "fsdp__enabled": True}, 1, 4),
        ({"tuner__train_type": "lora"} | SHARDS, 1, 3),
    ],
)
def test_a_sharded_run_saves_all_weights_for_its_resume(
    keys: dict[str, Any], weights: int, trained: int, tmp_path: Path
) -> None:
    """Numbers in a checkpoint, all of float32: how often all weights, and those trained with AdamW's two moments."""
    config = run_config(tmp_path, 1, training__save_strategy="steps", **keys)
    checkpoint = Checkpoint.open(tiny_checkpoint())
    shapes = weight_shapes(checkpoint)
    total, learned = sum(map(math.prod, shapes.values())), trained_numbers(config, checkpoint.config, shapes)
    assert checked_disk(config).checkpoint == 4 * (weights * total + trained * learned)
