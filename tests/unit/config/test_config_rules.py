"""Rules between keys, and checks of the machine: one row per rule, with the key that is blamed and the cure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from coordexp.config import ConfigError, RunConfig, advice, check_world_size, parse_config, resolved_rollout
from coordexp.config.environment import (
    LOGGERS,
    OPTIMIZERS,
    SCHEDULES,
    SCHEDULES_BY_METRIC,
    SCHEDULES_WITH_ARGUMENTS,
    SCHEDULES_WITHOUT_WARMUP,
    check_training_environment,
)
from support.config_samples import drop_key, module, pipeline, set_key, set_keys, stage1, stage2, two_channel

RM = "rollout_matching"
MASTER = "training.master_weights"
MASTERS = {MASTER: "float32", "model.dtype": "bfloat16"}
STRICT = {"answer": "rewritten", "unmatched": "drop", "complete_above": 0.8}
VLLM = f"{RM}.vllm"
REPEAT = f"{RM}.repeat_terminate"
SERVERS = {"servers": [{"base_url": "http://a:8000", "group_port": 51216}]}
SERVER = {"mode": "server", "server": SERVERS}
# The best of the checkpoints that are evaluated.
BEST = {"training.load_best_model_at_end": True, "training.metric_for_best_model": "rollout/f1",
        "custom.val_jsonl": "data/val.jsonl", "training.eval_strategy": "steps", "training.eval_steps": 100,
        "training.save_steps": 300}  # fmt: skip
ADAPTERS = {"train_type": "lora", "train_coord_rows": False}
OFFLOAD = {"enabled": True, "offload_model": True}


def vllm(**keys: Any) -> dict[str, Any]:
    return stage2(rollout_backend="vllm", vllm=keys)


def coord_modules(channels: list[str], **spec: Any) -> list[dict[str, Any]]:
    return [module("bbox_geo", smoothl1_weight=1.0, ciou_weight=1.0) | {"channels": channels} | spec]


# (valid configuration, keys that break it, path blamed, words of the message)
RULES = [
    # variants and pipelines
    (stage1(), {RM: {"pipeline": stage2()[RM]["pipeline"]}}, f"{RM}.pipeline", "only stage 2 has a pipeline"),
    (stage1(), {f"{RM}.monitor_dump.enabled": True}, f"{RM}.monitor_dump.enabled", "only stage 2 makes rollouts"),
    (stage2(), {"custom.coord_soft_ce_w1": {}}, "custom.coord_soft_ce_w1", "rollout_matching.pipeline"),
    (stage2(), {"data.augment": {"horizontal_flip": 0.5}}, "data.augment", "belongs to stage 1"),
    (stage1(), {"data.augment": {"scale": [2.0, 0.5]}}, "data.augment.scale", "the least factor must be first"),
    (two_channel(), {"custom.coord_soft_ce_w1": {}}, "custom.coord_soft_ce_w1", "stage2_ab.pipeline"),
    (two_channel(), {f"{RM}.pipeline": stage2()[RM]["pipeline"]}, f"{RM}.pipeline", "move it there"),
    (drop_key(two_channel(), "stage2_ab"), {}, "stage2_ab", "needs schedule.b_ratio and pipeline"),
    (stage2(), {"stage2_ab": two_channel()["stage2_ab"]}, "stage2_ab", "trainer_variant: stage2_two_channel"),
    (drop_key(two_channel(), RM), {}, RM, "set b_ratio: 0"),
    (stage2(), {f"{RM}.pipeline.objective": coord_modules(["A"])}, f"{RM}.pipeline.objective",
     "channels that contain B"),
    (stage2(), {f"{RM}.pipeline.objective": coord_modules(["B"], enabled=False)}, f"{RM}.pipeline.objective",
     "trains nothing"),
    (stage2(), {f"{RM}.pipeline.objective": [module("bbox_geo", smoothl1_weight=0.0, ciou_weight=0.0)]},
     f"{RM}.pipeline.objective", "none with a weight above 0"),
    (stage1(), {"custom.coord_soft_ce_w1": {"enabled": True, "soft_ce_weight": 0, "w1_weight": 0, "gate_weight": 0,
                                            "text_gate_weight": 1}},
     "custom.coord_soft_ce_w1", "they would not be trained"),
    (two_channel(), {"stage2_ab.pipeline.objective": coord_modules(["B"])}, "stage2_ab.pipeline.objective",
     "steps of Channel-A"),
    (two_channel(), {"stage2_ab.pipeline.objective": coord_modules(["A"])}, "stage2_ab.pipeline.objective",
     "stage2_ab.schedule.b_ratio: 0"),
    # training
    (stage1(), {"training.eval_strategy": "epoch"}, "training.eval_strategy", "custom.val_jsonl is null"),
    (stage1(), {"training.eval_on_start": True}, "training.eval_on_start", "custom.val_jsonl is null"),
    (stage1(), {"training.bf16": True, "training.fp16": True}, "training.fp16", "exclude each other"),
    (stage1(), MASTERS | {"model.dtype": "float32"}, MASTER, "model.dtype is float32; write model.dtype: bfloat16"),
    (stage1(), MASTERS | {"tuner.train_type": "lora"}, MASTER, "adapters are float32 already"),
    (stage1(), MASTERS | {"fsdp.enabled": True}, MASTER, "keep float32 copies of their own"),
    (stage1(), MASTERS | {"deepspeed": {"enabled": True, "config": {}}}, MASTER, "keep float32 copies of their own"),
    (stage1(), MASTERS | {"training.optim": "adafactor"}, MASTER, "works with training.optim: adamw_torch, "),
    (stage1(), MASTERS | {"training.fp16": True}, MASTER, "loss scaling needs float32 gradients; write bf16: true"),
    (stage1(), {"training.effective_batch_size": 8, "training.gradient_accumulation_steps": 2},
     "training.gradient_accumulation_steps", "give one of the two"),
    (stage1(), {"training.effective_batch_size": 7, "training.per_device_train_batch_size": 2},
     "training.effective_batch_size", "multiple of per_device_train_batch_size (2)"),
    (stage1(), {"training.lr_scheduler_type": "reduce_lr_on_plateau"}, "training.lr_scheduler_type",
     "set eval_strategy and metric_for_best_model"),
    (set_keys(stage1(), BEST | {"training.lr_scheduler_type": "greedy"}),
     {"training.lr_scheduler_kwargs": {"mode": "max"}}, "training.lr_scheduler_kwargs", "mode follows"),
    (stage1(), {"training.load_best_model_at_end": True, "training.metric_for_best_model": "rollout/f1"},
     "training.load_best_model_at_end", "eval_strategy is 'no'"),
    (stage1(), BEST | {"training.eval_steps": 200}, "training.save_steps", "eval_steps (200)"),
    *((set_keys(stage1(), BEST), {"training.save_only_model": True, **sharded}, "training.save_only_model",
       "load_best_model_at_end loads sharded weights from a whole checkpoint")
      for sharded in ({"fsdp.enabled": True}, {"deepspeed": {"enabled": True, "config": {}}})),
    (stage1(), BEST | {"training.metric_for_best_model": None}, "training.metric_for_best_model",
     "load_best_model_at_end"),
    (stage1(), {"training.gradient_checkpointing_every": 2}, "training.gradient_checkpointing_every",
     "gradient_checkpointing: true"),
    # how the trainer is spread
    (stage1(), {"deepspeed.enabled": True}, "deepspeed.config", "needs a JSON file or a mapping"),
    (stage1(), {"deepspeed": {"enabled": True, "config": {}}, "fsdp.enabled": True}, "fsdp.enabled", "exclude each"),
    (vllm(), {f"{RM}.offload.enabled": True}, f"{RM}.offload.enabled", "moves nothing"),
    (set_keys(vllm(), {f"{RM}.offload": OFFLOAD}), {f"{RM}.eval_detection.score_mode": "confidence"},
     f"{RM}.eval_detection.score_mode", "write score_mode: constant"),
    (stage2(), {f"{RM}.eval_detection": {"score_mode": "confidence", "constant_score": 0.5}},
     f"{RM}.eval_detection.constant_score", "has no effect"),
    (vllm(), {f"{RM}.offload": OFFLOAD, "deepspeed": {"enabled": True, "config": "z.json"}}, f"{RM}.offload.enabled",
     "DeepSpeed and FSDP own"),
    (vllm(), {f"{RM}.offload": OFFLOAD, "fsdp.enabled": True}, f"{RM}.offload.enabled", "DeepSpeed and FSDP own"),
    (stage1(), {"tuner": {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": True}}, "tuner.freeze_llm",
     "the whole model is frozen"),
    (stage1(), {"tuner": {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": True, "train_type": "lora",
                          "train_coord_rows": False}}, "tuner.freeze_llm", "the whole model is frozen"),
    (stage1(), {"model.dtype": "float16", "training.fp16": True}, "model.dtype", "write model.dtype: float32"),
    # decoding and lengths
    (stage1(), {f"{RM}.target.answer": "rewritten"}, f"{RM}.target.answer", "only stage 2 trains on answers"),
    (stage2(), {f"{RM}.target.unmatched": "drop"}, f"{RM}.target.unmatched", "write target.answer: rewritten"),
    (stage2(), {f"{RM}.target.complete_above": 0.8}, f"{RM}.target.complete_above", "leave it at null"),
    (stage2(), {f"{RM}.target": STRICT}, f"{RM}.target.complete_above", "which unmatched: drop does at every step"),
    (stage2(), {f"{RM}.target.duplicates": "drop"}, f"{RM}.target.duplicates", "write target.answer: rewritten"),
    (two_channel(), {f"{RM}.target.missed": "in_order"}, f"{RM}.target.missed", "write target.answer: rewritten"),
    (stage1(), {"training.max_steps": 0}, "training.max_steps", "write -1"),
    (stage2(), {f"{RM}.decoding.top_k": 0}, f"{RM}.decoding.top_k", "write -1"),
    (stage2(), {f"{RM}.num_beams": 4}, f"{RM}.num_beams", "4 does not fit decode_mode: greedy"),
    (stage2(), {f"{RM}.decode_mode": "beam"}, f"{RM}.num_beams", "at least 2"),
    (stage2(decode_mode="beam", num_beams=4), {f"{RM}.decoding.temperature": 0.5}, f"{RM}.decoding.temperature",
     "does not sample"),
    (stage2(rollout_backend="vllm"), {f"{RM}.decoding.temperature": 0.001}, f"{RM}.decoding.temperature",
     "vLLM samples at 0.01 instead of less; write 0 for greedy decoding"),
    (vllm(), {f"{RM}.decoding.temperature": 2.5}, f"{RM}.decoding.temperature", "vLLM refuses more than 2; write"),
    (stage2(decode_mode="beam", num_beams=4), {f"{RM}.rollout_backend": "vllm"}, f"{RM}.decode_mode", "backend: hf"),
    (stage2(), {f"{RM}.max_new_tokens": 2048}, f"{RM}.max_new_tokens", "raise global_max_length"),
    (vllm(), {f"{VLLM}.max_model_len": 2047}, f"{VLLM}.max_model_len", "less than global_max_length (2048)"),
    # the repeat guard
    (stage2(), {f"{REPEAT}.max_consecutive_token_repeats": 1}, f"{REPEAT}.max_consecutive_token_repeats", "at least 2"),
    (stage2(), {f"{REPEAT}.ngram_repeats": 1}, f"{REPEAT}.ngram_repeats", "at least 2"),
    (stage2(), {f"{REPEAT}.ngram_size": 0}, f"{REPEAT}.ngram_size", "together"),
    (stage2(), {f"{REPEAT}.ngram_repeats": 0}, f"{REPEAT}.ngram_size", "together"),
    (stage2(), {REPEAT: {"enabled": True, "max_consecutive_token_repeats": 0, "ngram_size": 0, "ngram_repeats": 0}},
     f"{REPEAT}.enabled", "no threshold is set"),
    # the engine, its servers, its weights
    (stage2(), {f"{RM}.decoding.skip_forced_tokens": True, f"{RM}.decode_mode": "beam", f"{RM}.num_beams": 2},
     f"{RM}.decoding.skip_forced_tokens", "beam search decodes every token"),
    (vllm(**SERVER), {f"{RM}.decoding.skip_forced_tokens": True, "launch.server": "swift"},
     f"{RM}.decoding.skip_forced_tokens", "launch.server: coordexp"),
    (vllm(), {f"{RM}.decoding.skip_forced_tokens": True, f"{VLLM}.engine_args": {"async_scheduling": True}},
     f"{RM}.decoding.skip_forced_tokens", "async_scheduling: true of vllm.engine_args is not possible"),
    (vllm(), {f"{VLLM}.mode": "server"}, f"{VLLM}.server", "vllm.mode: colocate or rollout_backend: hf"),
    (vllm(**SERVER),
     {f"{VLLM}.server.servers": [*SERVERS["servers"], {"base_url": "http://a:8000/", "group_port": 51217}]},
     f"{VLLM}.server.servers[1].base_url", "servers[0] again"),
    (vllm(**SERVER), {f"{VLLM}.server.servers": [{"base_url": "http://a:8000", "group_port": 8000}]},
     f"{VLLM}.server.servers[0].group_port", "is the port of base_url"),
    (vllm(), {f"{VLLM}.sync.mode": "adapter"}, f"{VLLM}.sync.mode", "needs vllm.enable_lora: true"),
    (vllm(enable_lora=True), {f"{VLLM}.sync.mode": "adapter"}, f"{VLLM}.sync.mode", "trains none"),
    (vllm(enable_lora=True), {f"{VLLM}.sync.mode": "auto"}, f"{VLLM}.sync.mode", "write sync.mode: full"),
    (vllm(enable_lora=True, sync={"mode": "adapter"}), {"tuner": {"train_type": "lora"}}, f"{VLLM}.sync.mode",
     "tuner.train_coord_rows"),
    (vllm(enable_lora=True, sync={"mode": "adapter"}), {"tuner": ADAPTERS | {"use_dora": True}}, f"{VLLM}.sync.mode",
     "tuner.use_dora"),
    (vllm(enable_lora=True, sync={"mode": "adapter"}), {"tuner": ADAPTERS | {"modules_to_save": ["lm_head"]}},
     f"{VLLM}.sync.mode", "tuner.modules_to_save"),
    (vllm(enable_lora=True, sync={"mode": "auto", "fallback_to_full": False}), {"tuner": ADAPTERS}, f"{VLLM}.sync.mode",
     "vLLM would ignore those of the vision tower and the mergers; write tuner.freeze_vit: true and"),
    (vllm(enable_lora=True), {"tuner": {"train_type": "lora", "lora_rank": 16}, f"{VLLM}.max_lora_rank": 8},
     f"{VLLM}.max_lora_rank", "less than tuner.lora_rank (16)"),
    (vllm(enable_lora=True), {"tuner": {"train_type": "lora", "lora_rank": 16}, f"{VLLM}.max_lora_rank": 24},
     f"{VLLM}.max_lora_rank", "512, not 24"),
    (vllm(enable_lora=True), {"tuner": {"train_type": "lora", "lora_rank": 600}}, f"{VLLM}.max_lora_rank",
     "512, not 600"),
]  # fmt: skip


@pytest.mark.scenario("Invalid vLLM configuration fails fast")
@pytest.mark.scenario("Invalid server configuration fails fast")
@pytest.mark.parametrize(("base", "keys", "path", "words"), RULES, ids=[f"{p}: {w}" for _, _, p, w in RULES])
def test_broken_rule_is_the_one_problem_named(base: dict[str, Any], keys: dict, path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(set_keys(base, keys))
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith(f"  {path}: ") and words in line


def test_answer_that_fills_the_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens: 600 leaves no room .* vllm\.max_model_len \(600\)"):
        parse_config(set_keys(vllm(max_model_len=600), {f"{RM}.max_new_tokens": 600, "global_max_length": 601}))


# Nothing is colocated, so the contract ignores offload.
OFFLOAD_IGNORED = [
    backend | {RM: backend[RM] | {"offload": offload, "eval_detection": {"score_mode": score_mode}}}
    for backend in (stage2(), vllm(**SERVER))
    for offload in ({"enabled": True}, OFFLOAD | {"offload_optimizer": True})
    for score_mode in ("constant", "confidence")
]


@pytest.mark.parametrize("config", OFFLOAD_IGNORED)
def test_offload_without_a_colocated_engine_warns_once(config: dict[str, Any]) -> None:
    assert ["offload is ignored" in sentence for sentence in advice(parse_config(config))].count(True) == 1


@pytest.mark.parametrize("config", [stage2(), set_keys(vllm(), {f"{RM}.offload": OFFLOAD})])
def test_offload_that_is_off_or_works_does_not_warn(config: dict[str, Any]) -> None:
    assert not any("offload" in sentence for sentence in advice(parse_config(config)))


def test_settings_of_adapters_warn_where_all_weights_are_trained() -> None:
    keys = {"lora_rank": 32, "target_modules": ["q_proj"]}

    def ignored(**tuner: Any) -> list[str]:
        return [one for one in advice(parse_config(stage1() | {"tuner": tuner})) if " ignored" in one]

    (sentence,) = ignored(**keys)
    assert sentence.startswith("tuner.lora_rank, tuner.target_modules are ignored: tuner.train_type: full")
    assert ignored(train_type="lora", **keys) == ignored(freeze_vit=True) == []


@pytest.mark.parametrize(
    ("schedule", "steps", "warned"),
    [("constant", 10, True), ("constant", 0, False), ("constant_with_warmup", 10, False), ("linear", 10, False)],
)
def test_warmup_of_a_schedule_without_it_warns(schedule: str, steps: int, warned: bool) -> None:
    config = set_keys(stage1(), {"training.lr_scheduler_type": schedule, "training.warmup_steps": steps})
    assert any("warmup_steps is ignored" in sentence for sentence in advice(parse_config(config))) is warned


def test_schedules_without_warmup_are_those_of_transformers() -> None:
    import torch
    from transformers import get_scheduler

    def first_rate(name: str) -> float:
        needed = {"cosine_warmup_with_min_lr": {"min_lr": 0.0}, "cosine_with_min_lr": {"min_lr": 0.0}}
        given = {"warmup_stable_decay": {"num_decay_steps": 2}} | needed
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        get_scheduler(name, optimizer, 4, 8, scheduler_specific_kwargs=given.get(name))
        return optimizer.param_groups[0]["lr"]

    assert sorted(name for name in SCHEDULES if first_rate(name) == 1.0) == sorted(SCHEDULES_WITHOUT_WARMUP)


# Valid, though close to breaking a rule.
ALLOWED = [
    two_channel(),
    drop_key(two_channel(b_ratio=0), RM),
    set_keys(two_channel(b_ratio=0.0), {"stage2_ab.pipeline.objective": coord_modules(["A"])}),
    set_keys(two_channel(b_ratio=1.0), {"stage2_ab.pipeline.objective": coord_modules(["B"])}),
    vllm(max_model_len=2048),
    vllm(enable_lora=True),
    set_keys(vllm(enable_lora=True, sync={"mode": "auto"}), {"tuner": ADAPTERS}),
    set_keys(stage2(offload=OFFLOAD), {"deepspeed": {"enabled": True, "config": {}}}),
    stage2(repeat_terminate={"enabled": True}),
    stage2(repeat_terminate={"enabled": True, "ngram_size": 0, "ngram_repeats": 0}),
    set_keys(stage1(), BEST),
]


@pytest.mark.parametrize("config", ALLOWED)
def test_unusual_but_valid_settings_are_accepted(config: dict[str, Any]) -> None:
    assert isinstance(parse_config(config), RunConfig)


# (configuration, trainer processes, path blamed or None, words)
BATCH = "training.effective_batch_size"
WORLDS = [
    (stage1(), 8, None, ""),
    (set_keys(stage1(), {BATCH: 8}), 4, None, ""),
    (set_keys(stage1(), {BATCH: 6}), 4, BATCH, "1 x 4 samples; write training.effective_batch_size: 8"),
    (set_keys(stage1(), {BATCH: 36, "training.per_device_train_batch_size": 6}), 4, BATCH,
     "= 6 x 4 samples; write training.per_device_train_batch_size: 3"),
    (vllm(**SERVER), 2, None, ""),
    (vllm(), 8, None, ""),
    (vllm(), 1, f"{VLLM}.tensor_parallel_size", "a divisor of 1"),
    (vllm(tensor_parallel_size=3), 4, f"{VLLM}.tensor_parallel_size", "rollout_backend: hf"),
    (vllm(tensor_parallel_size=3, **SERVER), 4, None, ""),
]  # fmt: skip


@pytest.mark.scenario("Invalid vLLM configuration fails fast")
@pytest.mark.parametrize(("raw", "world_size", "path", "words"), WORLDS)
def test_rules_of_the_number_of_processes(raw: dict[str, Any], world_size: int, path: str | None, words: str) -> None:
    config = parse_config(raw)
    if path is None:
        check_world_size(config, world_size)
        return
    with pytest.raises(ConfigError) as caught:
        check_world_size(config, world_size)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "advised"),
    [
        ({"model.dtype": "bfloat16"}, True),
        ({"model.dtype": "float16"}, True),
        ({"model.dtype": "bfloat16", "training.bf16": True}, True),  # autocast computes; it does not store
        ({"model.dtype": "bfloat16", "fsdp.enabled": True}, True),  # its copies are float32 with autocast alone
        ({"model.dtype": "bfloat16", "fsdp.enabled": True, "training.bf16": True}, False),
        ({"model.dtype": "bfloat16", "deepspeed": {"enabled": True, "config": {}}}, False),
        ({"model.dtype": "bfloat16", "tuner.train_type": "lora"}, False),
        ({"model.dtype": "float32"}, False),
        (MASTERS, False),
    ],
)
def test_storing_trained_weights_in_low_precision_is_advised_against(keys: dict[str, Any], advised: bool) -> None:
    sentences = list(advice(parse_config(set_keys(stage1(), keys))))
    assert ["rounded away" in sentence for sentence in sentences] == [True] * advised


@pytest.mark.parametrize(
    ("tuner", "ignored"),
    [
        ({}, ["coord_lr"]),
        ({"train_type": "lora"}, []),
        ({"train_type": "lora", "train_coord_rows": False}, ["coord_lr"]),
        ({"train_type": "lora", "freeze_vit": True, "freeze_aligner": True}, ["vit_lr", "aligner_lr"]),
    ],
)
def test_rates_of_what_is_not_trained_are_noted(tuner: dict[str, Any], ignored: list[str]) -> None:
    rates = {f"training.{key}": 1e-5 for key in ("vit_lr", "aligner_lr", "coord_lr")}
    noted = [sentence.split()[0] for sentence in advice(parse_config(set_keys(stage1(), {**rates, "tuner": tuner})))]
    assert [one for one in noted if one.endswith("_lr")] == [f"training.{key}" for key in ignored]


@pytest.mark.parametrize(("lora_rank", "room"), [(1, 1), (4, 8), (8, 8), (24, 32), (512, 512)])
def test_max_lora_rank_is_rounded_up_to_a_value_of_vllm(lora_rank: int, room: int) -> None:
    raw = set_keys(vllm(enable_lora=True), {"tuner": {"train_type": "lora", "lora_rank": lora_rank}})
    assert resolved_rollout(parse_config(raw)).vllm.max_lora_rank == room


def test_a_module_may_stand_once_per_channel() -> None:
    token_ce, coord_reg, _ = pipeline()["objective"]
    config = stage2()
    config["rollout_matching"]["pipeline"]["objective"] = [
        {**token_ce, "channels": ["A"]}, {**coord_reg, "channels": ["A", "B"]}, {**token_ce, "channels": ["B"]}
    ]  # fmt: skip
    loaded = parse_config(config)
    assert loaded.rollout_matching is not None and loaded.rollout_matching.pipeline is not None
    found = [(spec.name, spec.channels) for spec in loaded.rollout_matching.pipeline.objective]
    assert found == [("token_ce", ("A",)), ("coord_reg", ("A", "B")), ("token_ce", ("B",))]
    config["rollout_matching"]["pipeline"]["objective"][0]["channels"] = ["A", "B"]
    with pytest.raises(ConfigError, match=r"pipeline\.objective.*token_ce more than once for channel B"):
        parse_config(config)


# --- when a run starts: this machine and transformers' names ---


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optim", "adamw_torc", "adamw_torch"),
        ("optim", "adamw_bnb", "adamw_bnb_8bit"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("report_to", ["tensorboard", "tensorbord"], "'tensorbord' cannot be used.*tensorboard"),
    ],
)
def test_names_that_transformers_does_not_have_are_refused(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.{key}: .*{words}"):
        parse_config(set_key(stage1(), f"training.{key}", value))


# By what the loop cannot use: weights changed in each backward pass, other weights than those that are saved, and
# targets that have no key here.
REFUSED = ["adalomo", "apollo_adamw", "apollo_adamw_layerwise", "galore_adafactor", "galore_adafactor_layerwise",
           "galore_adamw", "galore_adamw_8bit", "galore_adamw_8bit_layerwise", "galore_adamw_layerwise", "lomo",
           "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_the_loop_cannot_use_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"training\.optim: '{name}' cannot be used here; write .*adamw_torch"):
        parse_config(set_key(stage1(), "training.optim", name))


def test_known_names_are_those_of_transformers() -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert sorted([*OPTIMIZERS, *REFUSED]) == sorted(str(one.value) for one in OptimizerNames)
    assert sorted(SCHEDULES) == sorted(str(one.value) for one in SchedulerType)
    assert sorted(LOGGERS) == sorted(INTEGRATION_TO_CALLBACK)


def test_schedules_that_need_arguments_are_those_of_transformers() -> None:
    from coordexp.training.optimizer import check_schedule

    refused = []
    for name in SCHEDULES:
        training = parse_config(stage1()).training.model_copy(update={"lr_scheduler_type": name})
        try:
            check_schedule(training)
        except ConfigError:
            refused.append(name)
    assert sorted({*refused, *SCHEDULES_BY_METRIC}) == sorted({*SCHEDULES_WITH_ARGUMENTS, *SCHEDULES_BY_METRIC})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optim", "adamw_8bit", "bitsandbytes"),
        ("optim", "adamw_bnb_8bit", "bitsandbytes"),
        ("report_to", "neptune", "not installed here, neptune"),
    ],
)
def test_missing_packages_are_refused_when_a_run_starts(key: str, value: Any, words: str) -> None:
    config = parse_config(set_key(stage1(), f"training.{key}", value))
    with pytest.raises(ConfigError, match=rf"^training\.{key}: .*{words}"):
        check_training_environment(config)


@pytest.mark.parametrize(
    ("place", "text"), [(".netrc", "machine wandb.example login user password key\n"),
                        ("wandb/settings", "[default]\nmode = offline\n")],
)  # fmt: skip
def test_wandb_needs_a_login(place: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = parse_config(set_key(stage1(), "training.report_to", "wandb"))
    with pytest.raises(ConfigError, match=r"training\.report_to: .*wandb login.*WANDB_MODE"):
        check_training_environment(config)
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = online\n")
    with pytest.raises(ConfigError, match="wandb"):
        check_training_environment(config)
    (tmp_path / place).write_text(text)
    check_training_environment(config)


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "training.bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "training.effective_batch_size"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "this program"),
        ("ACCELERATE_USE_FSDP", "true", "fsdp.enabled"),
        ("ACCELERATE_USE_DEEPSPEED", "1", "deepspeed.enabled"),
    ],
)
def test_variables_of_accelerate_decide_nothing(
    variable: str, value: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate reads them where an argument is None: a run computed in bfloat16, or divided its gradients."""
    config = parse_config(stage1())
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"^the environment variable {variable} is '{value.lower()}', and {key}"):
        check_training_environment(config)
    monkeypatch.setenv(variable, "1" if variable.endswith("STEPS") else "no")  # as `accelerate launch` sets them
    check_training_environment(config)


def test_a_variable_of_accelerate_may_say_what_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_training_environment(parse_config(set_key(stage1(), "training.bf16", True)))


def test_packing_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "binpacking" else find_spec(name))
    with pytest.raises(ConfigError, match=r"training\.packing: .*pip install binpacking"):
        check_training_environment(parse_config(stage1()))
    check_training_environment(parse_config(set_key(stage1(), "training.packing", False)))


@pytest.mark.parametrize("report_to", ["none", [], ["tensorboard"]])
def test_a_default_run_needs_no_extra_package(report_to: Any) -> None:
    check_training_environment(parse_config(set_key(stage1(), "training.report_to", report_to)))


@pytest.mark.parametrize("url", ["http://user:secret@a:8000", "https://secret@a", "http://:secret@10.0.0.1:80/x"])
def test_a_password_in_an_address_is_refused_and_not_printed(url: str) -> None:
    with pytest.raises(ConfigError, match=r"servers\[0\]\.base_url: .*api_key_env") as refused:
        parse_config(vllm(mode="server", server={"servers": [{"base_url": url, "group_port": 51216}]}))
    assert "secret" not in str(refused.value)


def test_a_folder_for_sockets_with_a_long_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes could not send what they read, and the run would wait for ever."""
    config = parse_config(set_key(stage1(), "data.num_workers", 1))
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * 74)
    check_training_environment(config)
    monkeypatch.setattr("tempfile.tempdir", "/" + "t" * 75)
    with pytest.raises(ConfigError, match=r"data\.num_workers: .* 76 bytes.*TMPDIR to a folder with at most 75"):
        check_training_environment(config)
    check_training_environment(parse_config(stage1()))
