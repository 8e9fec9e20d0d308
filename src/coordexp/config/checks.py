"""The rules between keys, which need nothing but the configuration; then checks against the machine (files, number of
processes), which reading the YAML does not make: a file is valid everywhere or nowhere.

Rules are independent of each other: in a file with other mistakes, a rule that reads a broken key is skipped and the
others still run (see :mod:`coordexp.config.from_yaml`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from coordexp.addresses import split_url
from coordexp.config.base import Problem, default_of, parse_dotted
from coordexp.config.environment import SCHEDULES_BY_METRIC, SCHEDULES_WITHOUT_WARMUP, unknown_names
from coordexp.config.rollout import ADAPTER_RANKS
from coordexp.config.schema import RunConfig, TunerConfig
from coordexp.errors import ConfigError
from coordexp.hub import hub_model, no_such_folder

Findings = Iterator[tuple[str, str]]  # dotted key, message
# torch's own, which step any tensor that they are given
OPTIMIZERS_WITH_MASTERS = ("adamw_torch", "adamw_torch_fused", "sgd")

# Temperatures of vLLM: it raises lower ones to the first, with a warning in its own log, and refuses higher ones.
_LEAST_OF_VLLM, _MOST_OF_VLLM = 0.01, 2

_RM = "rollout_matching"
_VLLM = f"{_RM}.vllm"
_GUARD = f"{_RM}.repeat_terminate"
_MASTERS = "training.master_weights"


class Rule(NamedTuple):
    """``message`` about ``key`` if ``broken``; ``{c.x}`` in it is a value of the configuration, ``{r.x}`` one of its
    ``rollout_matching``. A rule about a key of that section applies only if there is one."""

    key: str
    broken: Callable[[RunConfig, Any], object]
    message: str


def cross_checks(config: RunConfig, *, partial: bool = False) -> Iterator[Problem]:
    """Every rule between keys that ``config`` breaks. ``partial``: broken keys are absent from ``config``, and a rule
    that reads one ends with AttributeError."""
    for rule in RULES:
        with suppress(AttributeError) if partial else nullcontext():
            if not isinstance(rule, Rule):
                yield from (Problem(parse_dotted(key), message) for key, message in rule(config))
                continue
            rollout, needs_rollout = config.rollout_matching, rule.key.startswith(f"{_RM}.")
            if (rollout is not None or not needs_rollout) and rule.broken(config, rollout):
                yield Problem(parse_dotted(rule.key), rule.message.format(c=config, r=rollout))


def _variant_has_its_pipeline(config: RunConfig) -> Findings:
    variant, key = config.custom.trainer_variant, f"{_RM}.pipeline"
    pipeline = config.rollout_matching.pipeline if config.rollout_matching is not None else None
    if variant is None and pipeline is not None:
        yield key, "only stage 2 has a pipeline; set custom.trainer_variant: stage2_rollout_aligned, or remove it"
    elif variant == "stage2_two_channel" and pipeline is not None:
        yield key, "stage2_two_channel declares its objective in stage2_ab.pipeline; move it there"
    elif variant == "stage2_rollout_aligned" and pipeline is None:
        yield (
            key,
            f"missing; {key} is required by custom.trainer_variant: stage2_rollout_aligned and has no default. List "
            "its modules under objective and diagnostics",
        )
    elif variant == "stage2_rollout_aligned" and pipeline is not None and not pipeline.trains("B"):
        yield (
            f"{key}.objective",
            "trains nothing: stage2_rollout_aligned runs modules with enabled: true, weight > 0 and channels that "
            "contain B; there is none with a weight above 0 in its config",
        )


def _both_channels_train(config: RunConfig) -> Findings:
    if config.custom.trainer_variant != "stage2_two_channel" or config.stage2_ab is None:
        return
    b_ratio = config.stage2_ab.schedule.b_ratio
    for channel, used, without in (("A", b_ratio < 1, "1"), ("B", b_ratio > 0, "0")):
        if used and not config.stage2_ab.pipeline.trains(channel):
            yield (
                "stage2_ab.pipeline.objective",
                f"trains nothing on steps of Channel-{channel}: no module has enabled: true, weight > 0, channels that "
                f"contain {channel}, and a weight above 0 in its config. Add one, or set stage2_ab.schedule.b_ratio: "
                f"{without}",
            )


def _masters_are_of_use(config: RunConfig) -> Findings:
    training = config.training
    if training.master_weights is None:
        return
    if config.tuner.train_type != "full":
        yield _MASTERS, "adapters are float32 already; remove this key, or write tuner.train_type: full"
    if config.model.dtype != "bfloat16":
        yield (
            _MASTERS,
            f"belongs to weights in bfloat16, and model.dtype is {config.model.dtype}; write model.dtype: bfloat16, or "
            "remove this key",
        )
    if config.deepspeed.enabled or config.fsdp.enabled:
        yield _MASTERS, "deepspeed, and fsdp with training.bf16, keep float32 copies of their own; remove this key"
    if training.optim not in OPTIMIZERS_WITH_MASTERS:
        works = ", ".join(OPTIMIZERS_WITH_MASTERS)
        yield _MASTERS, f"works with training.optim: {works}, and it is {training.optim}; write one, or remove this key"
    if training.fp16:
        yield _MASTERS, "loss scaling needs float32 gradients; write bf16: true, or remove this key"


def _checkpoints_are_evaluated(config: RunConfig) -> Findings:
    training = config.training
    if not training.load_best_model_at_end:
        return
    if training.eval_strategy == "no" or training.eval_strategy != training.save_strategy:
        yield (
            "training.load_best_model_at_end",
            f"needs an evaluation of every checkpoint, but eval_strategy is '{training.eval_strategy}' and "
            f"save_strategy '{training.save_strategy}'; give both the same value, steps or epoch",
        )
    elif training.eval_strategy == "steps":
        every = training.eval_steps or training.logging_steps
        in_steps = training.save_steps >= 1 and every >= 1  # shares of the run are compared when its length is known
        if in_steps and training.save_steps % every:
            yield (
                "training.save_steps",
                f"{training.save_steps:g} is not a multiple of eval_steps ({every:g}), so load_best_model_at_end would "
                "find checkpoints without figures",
            )


def _answers_as_written_are_left_alone(config: RunConfig) -> Findings:
    target = config.rollout_matching.target if config.rollout_matching is not None else None
    if target is None or target.answer == "rewritten":
        return
    for key, default in {"unmatched": "mask", "complete_above": None, "duplicates": "keep", "missed": "append"}.items():
        if getattr(target, key) != default:
            yield (
                f"{_RM}.target.{key}",
                "concerns rewritten answers alone; write target.answer: rewritten, or leave it at "
                f"{'null' if default is None else default}",
            )


def _servers_have_no_passwords(config: RunConfig) -> Findings:
    """The address is printed and stored; the message does not repeat it."""
    rollout = config.rollout_matching
    if rollout is None or rollout.vllm.server is None:
        return
    for index, server in enumerate(rollout.vllm.server.servers):
        if "@" in split_url(server.base_url).netloc:
            yield (
                f"{_VLLM}.server.servers[{index}].base_url",
                "holds a user name or password, which would be printed and stored; write http://HOST:PORT, and name "
                "the variable with the token in rollout_matching.vllm.server.api_key_env",
            )


def _servers_differ(config: RunConfig) -> Findings:
    rollout = config.rollout_matching
    if rollout is None or not rollout.is_served or rollout.vllm.server is None:
        return
    seen: dict[str, int] = {}
    for index, server in enumerate(rollout.vllm.server.servers):
        first = seen.setdefault(server.base_url.rstrip("/"), index)
        if first != index:
            yield f"{_VLLM}.server.servers[{index}].base_url", f"is servers[{first}] again; list each server once"
        if server.group_port == split_url(server.base_url).port:
            yield f"{_VLLM}.server.servers[{index}].group_port", "is the port of base_url; choose another one"


def _adapter_pushes_carry_everything(config: RunConfig) -> Findings:
    tuner, rollout, mode = config.tuner, config.rollout_matching, f"{_VLLM}.sync.mode"
    if rollout is None or rollout.rollout_backend != "vllm":
        return
    if rollout.vllm.sync.mode == "adapter" and not rollout.vllm.enable_lora:
        yield mode, "adapter needs vllm.enable_lora: true; otherwise write full"
    elif rollout.vllm.sync.resolved(rollout.vllm.enable_lora) == "full":
        return
    elif tuner.train_type != "lora":
        what = f"pushes adapters only, and tuner.train_type: {tuner.train_type} trains none"
        yield mode, f"{what}; write sync.mode: full"
    else:
        for key in ("train_coord_rows", "modules_to_save", "use_dora"):
            if getattr(tuner, key):
                what = f"pushes adapters only, which would leave out what tuner.{key} trains"
                yield mode, f"{what}; write sync.mode: full, or turn tuner.{key} off"
        parts = [key for key in ("freeze_vit", "freeze_aligner") if not getattr(tuner, key)]
        if parts and "all-linear" in tuner.target_modules and not rollout.vllm.sync.fallback_to_full:
            what = "pushes adapters only, and vLLM would ignore those of the vision tower and the mergers"
            keys = " and ".join(f"tuner.{key}: true" for key in parts)
            yield mode, f"{what}; write {keys}, sync.mode: full, or sync.fallback_to_full: true"


def _engine_takes_the_adapter(config: RunConfig) -> Findings:
    rollout, rank, key = config.rollout_matching, config.tuner.lora_rank, f"{_VLLM}.max_lora_rank"
    if rollout is None or rollout.rollout_backend != "vllm" or not rollout.vllm.enable_lora:
        return
    vllm = rollout.vllm
    if vllm.max_lora_rank is not None and vllm.max_lora_rank < rank:
        yield key, f"{vllm.max_lora_rank} is less than tuner.lora_rank ({rank}); raise it, or remove it"
    elif vllm.adapter_rank(rank) not in ADAPTER_RANKS:
        known = ", ".join(map(str, ADAPTER_RANKS))
        yield (
            key,
            f"vLLM makes room for adapters of rank {known}, not {vllm.adapter_rank(rank)}; write one of those, or "
            "enable_lora: false",
        )


RULES: tuple[Rule | Callable[[RunConfig], Findings], ...] = (
    # variants and their objectives
    Rule("stage2_ab", lambda c, _: c.stage2_ab is not None and c.custom.trainer_variant != "stage2_two_channel",
         "only two-channel training reads it; set custom.trainer_variant: stage2_two_channel, or remove it"),
    Rule("stage2_ab", lambda c, _: c.stage2_ab is None and c.custom.trainer_variant == "stage2_two_channel",
         "missing; custom.trainer_variant: stage2_two_channel needs schedule.b_ratio and pipeline in it"),
    Rule(_RM, lambda c, _: (c.custom.trainer_variant == "stage2_two_channel" and c.rollout_matching is None
             and c.stage2_ab is not None and c.stage2_ab.schedule.b_ratio > 0),
         "missing; Channel-B makes rollouts (stage2_ab.schedule.b_ratio is {c.stage2_ab.schedule.b_ratio:g}). Add the"
         " section, or set b_ratio: 0"),
    _variant_has_its_pipeline,
    _both_channels_train,
    Rule(f"{_RM}.monitor_dump.enabled", lambda c, r: c.custom.trainer_variant is None and r.monitor_dump.enabled,
         "only stage 2 makes rollouts to record; set custom.trainer_variant: stage2_rollout_aligned, or false"),
    Rule(f"{_RM}.target.answer", lambda c, r: c.custom.trainer_variant is None and r.target.answer != "as_written",
         "only stage 2 trains on answers; set custom.trainer_variant: stage2_rollout_aligned, or as_written"),
    Rule("custom.coord_soft_ce_w1",
         lambda c, _: c.custom.coord_soft_ce_w1 is not None and c.custom.trainer_variant is not None,
         "belongs to stage 1; stage 2 declares its coordinate losses in rollout_matching.pipeline or "
         "stage2_ab.pipeline (coord_reg). Remove this section"),
    Rule("custom.coord_soft_ce_w1",
         lambda c, _: (loss := c.custom.coord_soft_ce_w1) is not None and loss.enabled
             and not (loss.ce_weight or loss.soft_ce_weight or loss.w1_weight or loss.gate_weight),
         "all its weights on coordinates are 0, so they would not be trained; raise one, or write enabled: false, "
         "which trains them by cross-entropy"),
    Rule("data.augment", lambda c, _: c.data.augment is not None and c.custom.trainer_variant is not None,
         "belongs to stage 1: rollouts of stage 2 read image files as they are. Remove it"),
    Rule("data.augment.scale",
         lambda c, _: c.data.augment is not None and c.data.augment.scale[0] > c.data.augment.scale[1],
         "the least factor must be first, {c.data.augment.scale[0]} is more than {c.data.augment.scale[1]}; swap them"),
    # training
    Rule("training.max_steps", lambda c, _: c.training.max_steps == 0,
         "0 trains nothing; write -1 to train for num_train_epochs, or a number from 1 on"),
    Rule("training.eval_strategy", lambda c, _: c.training.eval_strategy != "no" and c.custom.val_jsonl is None,
         "'{c.training.eval_strategy}' evaluates, but custom.val_jsonl is null; give a file there, or write 'no'"),
    Rule("training.eval_on_start", lambda c, _: c.training.eval_on_start and c.custom.val_jsonl is None,
         "true evaluates, but custom.val_jsonl is null; give a file there, or write false"),
    Rule("training.save_only_model", lambda c, _: (c.training.save_only_model and c.training.load_best_model_at_end
             and (c.fsdp.enabled or c.deepspeed.enabled)),
         "load_best_model_at_end loads sharded weights from a whole checkpoint, and these hold the model alone; write "
         "false, or load_best_model_at_end: false"),
    Rule("training.fp16", lambda c, _: c.training.fp16 and c.training.bf16,
         "bf16 and fp16 exclude each other; set one of them to false"),
    Rule("model.dtype", lambda c, _: c.model.dtype == "float16" and c.training.fp16 and c.tuner.train_type == "full",
         "float16 weights cannot be trained with training.fp16, whose loss scaling needs float32 weights; write "
         "model.dtype: float32"),
    Rule("training.gradient_checkpointing_every",
         lambda c, _: c.training.gradient_checkpointing_every not in (1, "auto")
         and not c.training.gradient_checkpointing,
         "{c.training.gradient_checkpointing_every} chooses layers of gradient_checkpointing, which is off; write "
         "gradient_checkpointing: true, or remove this key"),
    Rule("training.gradient_accumulation_steps",
         lambda c, _: None not in (c.training.effective_batch_size, c.training.gradient_accumulation_steps),
         "follows from effective_batch_size; give one of the two"),
    Rule("training.effective_batch_size",
         lambda c, _: (c.training.effective_batch_size or 0) % c.training.per_device_train_batch_size,
         "must be a multiple of per_device_train_batch_size ({c.training.per_device_train_batch_size})"),
    unknown_names,
    Rule("training.lr_scheduler_type",
         lambda c, _: (c.training.lr_scheduler_type in SCHEDULES_BY_METRIC
             and (c.training.eval_strategy == "no" or c.training.metric_for_best_model is None)),
         "{c.training.lr_scheduler_type} lowers the rate by a figure of evaluations; set eval_strategy and "
         "metric_for_best_model (such as eval_rollout/f1), or choose another schedule"),
    Rule("training.lr_scheduler_kwargs",
         lambda c, _: (c.training.lr_scheduler_type in SCHEDULES_BY_METRIC
             and "mode" in (c.training.lr_scheduler_kwargs or {})),
         "mode follows from metric_for_best_model; remove it"),
    _checkpoints_are_evaluated,
    Rule("training.metric_for_best_model",
         lambda c, _: c.training.load_best_model_at_end and c.training.metric_for_best_model is None,
         "missing; load_best_model_at_end needs the figure that decides"),
    Rule("tuner.freeze_llm", lambda c, _: (c.tuner.freeze_vit and c.tuner.freeze_aligner and c.tuner.freeze_llm
             and (c.tuner.train_type == "full" or not c.tuner.train_coord_rows)),
         "the whole model is frozen; leave one of freeze_vit, freeze_aligner, freeze_llm false"),
    _masters_are_of_use,
    Rule("deepspeed.config", lambda c, _: c.deepspeed.enabled and c.deepspeed.config is None,
         "missing; deepspeed.enabled: true needs a JSON file or a mapping"),
    Rule("fsdp.enabled", lambda c, _: c.deepspeed.enabled and c.fsdp.enabled,
         "deepspeed and fsdp exclude each other; enable one of them"),
    # decoding, the repeat guard, targets
    Rule(f"{_RM}.max_new_tokens", lambda c, r: r.max_new_tokens >= c.global_max_length,
         "{r.max_new_tokens} leaves no room for the prompt in global_max_length ({c.global_max_length}); lower"
         " it, or raise global_max_length"),
    Rule(f"{_RM}.decoding.top_k", lambda c, r: r.decoding.top_k == 0,
         "0 keeps no token; write -1 to keep all, or a number from 1 on"),
    Rule(f"{_RM}.num_beams", lambda c, r: (r.decode_mode == "beam") != (r.num_beams > 1),
         "{r.num_beams} does not fit decode_mode: {r.decode_mode}; beam needs at least 2, and greedy has 1"),
    Rule(f"{_RM}.decoding.temperature", lambda c, r: r.decode_mode == "beam" and r.decoding.temperature > 0,
         "decode_mode: beam does not sample; set the temperature to 0"),
    Rule(f"{_RM}.decoding.temperature",
         lambda c, r: r.rollout_backend == "vllm" and 0 < r.decoding.temperature < _LEAST_OF_VLLM,
         f"vLLM samples at {_LEAST_OF_VLLM} instead of less; write 0 for greedy decoding, or at least that"),
    Rule(f"{_RM}.decoding.temperature",
         lambda c, r: r.rollout_backend == "vllm" and r.decoding.temperature > _MOST_OF_VLLM,
         f"vLLM refuses more than {_MOST_OF_VLLM}; write at most that, or rollout_backend: hf"),
    Rule(f"{_RM}.decode_mode", lambda c, r: r.decode_mode == "beam" and r.rollout_backend == "vllm",
         "beam search needs rollout_backend: hf; with vllm write decode_mode: greedy"),
    Rule(f"{_GUARD}.max_consecutive_token_repeats", lambda c, r: r.repeat_terminate.max_consecutive_token_repeats == 1,
         "1 would end every answer; write 0 (not checked) or at least 2"),
    Rule(f"{_GUARD}.ngram_repeats", lambda c, r: r.repeat_terminate.ngram_repeats == 1,
         "1 would end every answer; write 0 (not checked) or at least 2"),
    Rule(f"{_GUARD}.ngram_size",
         lambda c, r: (r.repeat_terminate.ngram_size == 0) != (r.repeat_terminate.ngram_repeats == 0),
         "and ngram_repeats check patterns together, and one of them is 0; set both, or both to 0"),
    Rule(f"{_GUARD}.enabled", lambda c, r: ((g := r.repeat_terminate).enabled
             and not (g.max_consecutive_token_repeats or g.ngram_size * g.ngram_repeats or g.max_object_keys)),
         "no threshold is set, so nothing would ever be ended; set one, or enabled: false"),
    _answers_as_written_are_left_alone,
    Rule(f"{_RM}.target.complete_above", lambda c, r: (r.target.answer == "rewritten" and r.target.unmatched == "drop"
             and r.target.complete_above is not None),
         "decides when to leave out unmatched objects, which unmatched: drop does at every step; remove one of"
         " them"),
    # the engine, its servers, its weights
    Rule(f"{_RM}.offload.enabled", lambda c, r: (r.offload.enabled and r.is_colocated
             and not (r.offload.offload_model or r.offload.offload_optimizer)),
         "moves nothing: set offload_model or offload_optimizer to true, or this to false"),
    Rule(f"{_RM}.offload.enabled",
         lambda c, r: r.offload.enabled and r.is_colocated and (c.deepspeed.enabled or c.fsdp.enabled),
         "DeepSpeed and FSDP own the model's weights and optimizer, so they cannot be moved; set offload.enabled: "
         "false, rollout_backend: hf, or neither deepspeed.enabled nor fsdp.enabled"),
    Rule(f"{_RM}.eval_detection.score_mode",
         lambda c, r: r.offload.enabled and r.is_colocated and r.eval_detection.score_mode == "confidence",
         "confidence needs the model during rollouts, and offload moves it away; write score_mode: constant, "
         "or offload.enabled: false"),
    Rule(f"{_RM}.eval_detection.constant_score",
         lambda c, r: r.eval_detection.score_mode == "confidence" and r.eval_detection.constant_score != 1.0,
         "has no effect with score_mode: confidence; remove it, or write score_mode: constant"),
    Rule(f"{_RM}.rollouts_ahead", lambda c, r: r.rollouts_ahead and not r.is_served,
         "1 needs engines that keep their weights while training changes the model's: vLLM servers "
         "(rollout_backend: vllm with vllm.mode: server); without them write 0"),
    Rule(f"{_RM}.decoding.skip_forced_tokens",
         lambda c, r: r.decoding.skip_forced_tokens and r.is_served and c.launch.server == "swift",
         "swift rollout decodes every token; remove this key, or write launch.server: coordexp"),
    Rule(f"{_RM}.decoding.skip_forced_tokens",
         lambda c, r: r.decoding.skip_forced_tokens and r.decode_mode == "beam",
         "beam search decodes every token; remove this key, or write decode_mode: greedy"),
    Rule(f"{_RM}.decoding.skip_forced_tokens",
         lambda c, r: r.decoding.skip_forced_tokens and r.vllm.given_args.get("async_scheduling"),
         "the drafted tokens depend on the step before, so async_scheduling: true of vllm.engine_args is not possible; "
         "remove one"),
    Rule(f"{_VLLM}.server", lambda c, r: r.is_served and r.vllm.server is None,
         "missing; mode: server needs server.servers[] with base_url and group_port of each. Without servers "
         "write vllm.mode: colocate or rollout_backend: hf"),
    _servers_have_no_passwords,
    _servers_differ,
    Rule(f"{_RM}.max_new_tokens",
         lambda c, r: r.rollout_backend == "vllm" and r.max_new_tokens >= (r.vllm.max_model_len or float("inf")),
         "{r.max_new_tokens} leaves no room for the prompt in vllm.max_model_len ({r.vllm.max_model_len}); "
         "lower it, or raise max_model_len"),
    Rule(f"{_VLLM}.max_model_len", lambda c, r: (r.rollout_backend == "vllm" and r.vllm.max_model_len is not None
             and r.vllm.max_model_len < c.global_max_length),
         "{r.vllm.max_model_len} is less than global_max_length ({c.global_max_length}), which samples may "
         "reach; raise it, or remove it: null takes global_max_length"),
    _adapter_pushes_carry_everything,
    _engine_takes_the_adapter,
)  # fmt: skip


_OF_ADAPTERS = ("lora_rank", "lora_alpha", "lora_dropout", "use_dora", "target_modules", "modules_to_save")


def advice(config: RunConfig) -> Iterator[str]:
    """Valid but rarely intended settings, one sentence each; printed and logged, never an error."""
    training, fsdp = config.training, config.fsdp.enabled
    has_masters = training.master_weights is not None or config.deepspeed.enabled
    has_masters = has_masters or (fsdp and (training.bf16 or training.fp16))  # accelerate then shards float32 copies
    if config.model.dtype != "float32" and config.tuner.train_type == "full" and not has_masters:
        copies = "training.bf16: true" if fsdp else "training.master_weights: float32 with model.dtype: bfloat16"
        yield (
            f"model.dtype: {config.model.dtype} with tuner.train_type: full stores the trained weights themselves in "
            f"{config.model.dtype}, so small updates are rounded away. Write {copies}, or model.dtype: float32 with "
            "training.bf16: true"
        )
    tuner = config.tuner
    for key, learns, without in (
        ("vit_lr", not tuner.freeze_vit, "tuner.freeze_vit: true keeps the vision tower as it is"),
        ("aligner_lr", not tuner.freeze_aligner, "tuner.freeze_aligner: true keeps the mergers as they are"),
        ("coord_lr", tuner.train_type == "lora" and tuner.train_coord_rows,
         "coordinate tokens have rows of their own only with tuner.train_type: lora and train_coord_rows: true"),
    ):  # fmt: skip
        if getattr(config.training, key) is not None and not learns:
            yield f"training.{key} is ignored: {without}"
    unread = [key for key in _OF_ADAPTERS if getattr(tuner, key) != default_of(TunerConfig, key)]
    if unread and tuner.train_type == "full":
        yield (
            f"tuner.{', tuner.'.join(unread)} {'is' if len(unread) == 1 else 'are'} ignored: tuner.train_type: full "
            "trains the weights themselves; write train_type: lora for adapters"
        )
    schedule = config.training.lr_scheduler_type
    if config.training.warmup_steps and schedule in SCHEDULES_WITHOUT_WARMUP:
        instead = "; write constant_with_warmup" if schedule == "constant" else ""
        yield f"training.warmup_steps is ignored: lr_scheduler_type: {schedule} has no warm-up{instead}"
    rollout = config.rollout_matching
    if rollout is not None and rollout.offload.enabled and not rollout.is_colocated:
        where = "rollout_backend: hf" if rollout.rollout_backend == "hf" else "vllm.mode: server"
        yield (
            f"{_RM}.offload is ignored with {where}: only a colocated engine (rollout_backend: vllm, vllm.mode: "
            "colocate) needs room on the trainer's device"
        )


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Rules that depend on the number of trainer processes. Raises ConfigError with all that are broken."""
    training, rollout = config.training, config.rollout_matching
    problems = []
    total, each = training.effective_batch_size, training.per_device_train_batch_size
    if total is not None and total % (each * world_size):
        cure = f"training.effective_batch_size: {(total // (each * world_size) + 1) * each * world_size}"
        if total % world_size == 0:  # a smaller micro-step computes the same
            cure = f"training.per_device_train_batch_size: {math.gcd(each, total // world_size)}"
        problems.append(
            f"training.effective_batch_size: {total} is not a multiple of per_device_train_batch_size x processes = "
            f"{each} x {world_size} samples; write {cure}"
        )
    vllm = rollout.vllm if rollout is not None and rollout.rollout_backend == "vllm" else None
    if vllm is not None and vllm.mode == "colocate" and world_size % vllm.tensor_parallel_size:
        problems.append(
            f"{_VLLM}.tensor_parallel_size: a colocated engine spans {vllm.tensor_parallel_size} of the trainer's "
            f"processes, and there are {world_size}; write a divisor of {world_size}, start another number of "
            "processes, or write rollout_backend: hf"
        )
    if vllm is not None and vllm.mode == "server" and world_size > 1 and vllm.sync.resolved(vllm.enable_lora) != "full":
        problems.append(
            f"{_VLLM}.sync.mode: '{vllm.sync.mode}' pushes adapters, which works from one trainer process only, not "
            f"from {world_size}; write sync.mode: full"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_paths(
    models: Mapping[str, str | Path],
    files: Mapping[str, Path | None] | None = None,
    folders: Mapping[str, str | Path] | None = None,
) -> None:
    """Check that everything exists before anything heavy is imported: key or option -> path (or None). A model of the
    hub is fetched later. Raises ConfigError with all that do not exist."""
    missing = []
    for key, path in models.items():
        if hub_model(path) is None and not Path(path).is_dir():
            missing.append(f"{key}: {path}: {no_such_folder(path)}")
    for key, path in (folders or {}).items():
        if not Path(path).is_dir():
            missing.append(f"{key}: {path}: {'is a file, not a folder' if Path(path).exists() else 'no such folder'}")
    for key, path in (files or {}).items():
        if path is not None and not path.is_file():
            missing.append(f"{key}: {path}: {'is a folder, not a file' if path.exists() else 'file not found'}")
    if missing:
        fetched = [key for key, path in models.items() if hub_model(path) is not None]
        missing += [f"{key}: {models[key]}: no such folder here, so it means a model of the hub" for key in fetched]
        raise ConfigError("\n".join(missing) + f"\n(relative paths start at the working directory, {Path.cwd()})")
