"""The rules that hold between keys. They need the configuration alone; a few, the number of processes too."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from coordexp.config import trainer_names
from coordexp.config.objective import PipelineConfig
from coordexp.config.rollout_checks import rollout_checks
from coordexp.config.sections import Sections
from coordexp.config.strict import Problem, dotted, problem
from coordexp.config.training import TrainingConfig
from coordexp.errors import ConfigError

_RM = "rollout_matching"
_VLLM = f"{_RM}.vllm"


def cross_checks(config: Sections) -> Iterator[Problem]:
    """Every rule between keys that ``config`` breaks."""
    yield from _variant_checks(config)
    if config.training.eval_strategy != "no" and config.custom.val_jsonl is None:
        yield problem(
            "training.eval_strategy",
            f"'{config.training.eval_strategy}' evaluates, but custom.val_jsonl is null; give a file there, or "
            "write 'no'",
            "custom.val_jsonl",
        )
    yield from _augment_checks(config)
    yield from _training_checks(config.training)
    yield from _parallel_checks(config)
    yield from _tuner_checks(config)
    if config.training.master_weights is not None:
        yield from _master_weight_checks(config)
    if config.rollout_matching is not None:
        yield from rollout_checks(config, config.rollout_matching)


def _augment_checks(config: Sections) -> Iterator[Problem]:
    augment = config.data.augment
    if augment is None:
        return
    if config.custom.trainer_variant is not None:
        yield problem(
            "data.augment",
            "belongs to stage 1: the rollouts of stage 2 are asked for images in files, as they are. Remove it",
            "custom.trainer_variant",
        )
    if augment.scale[0] > augment.scale[1]:
        yield problem("data.augment.scale", f"{list(augment.scale)}: the least factor comes first")


def _variant_checks(config: Sections) -> Iterator[Problem]:
    variant = "custom.trainer_variant"
    name = config.custom.trainer_variant
    rollout = config.rollout_matching
    pipeline = rollout.pipeline if rollout is not None else None
    if config.stage2_ab is not None and name != "stage2_two_channel":
        yield problem(
            "stage2_ab",
            "only two channels read it; set custom.trainer_variant: stage2_two_channel, or remove it",
            variant,
        )
    if name is None:
        if rollout is not None and rollout.monitor_dump.enabled:
            yield problem(
                f"{_RM}.monitor_dump.enabled",
                "only stage 2 makes rollouts to record; set custom.trainer_variant: stage2_rollout_aligned, or false",
                variant,
            )
        if rollout is not None and rollout.target.answer != "as_written":
            yield problem(
                f"{_RM}.target.answer",
                "only stage 2 trains on answers; set custom.trainer_variant: stage2_rollout_aligned, or as_written",
                variant,
            )
        if pipeline is not None:
            yield problem(
                f"{_RM}.pipeline",
                "only stage 2 has a pipeline; set custom.trainer_variant: stage2_rollout_aligned, or remove it",
                variant,
            )
        return
    if config.custom.coord_soft_ce_w1 is not None:
        where = f"{_RM}.pipeline" if name == "stage2_rollout_aligned" else "stage2_ab.pipeline"
        yield problem(
            "custom.coord_soft_ce_w1",
            f"belongs to stage 1; stage 2 declares its coordinate losses in {where} (coord_reg). Remove this section",
            variant,
        )
    if name == "stage2_rollout_aligned":
        yield from _rollout_aligned_checks(pipeline)
    else:
        yield from _two_channel_checks(config, pipeline)


def _rollout_aligned_checks(pipeline: PipelineConfig | None) -> Iterator[Problem]:
    variant = "custom.trainer_variant"
    if pipeline is None:
        yield problem(
            f"{_RM}.pipeline",
            f"missing; {_RM}.pipeline is required by custom.trainer_variant: stage2_rollout_aligned and has no "
            "default. List its modules under objective and diagnostics",
            variant,
        )
    elif not _trains(pipeline, "B"):
        yield problem(
            f"{_RM}.pipeline.objective",
            "trains nothing: stage2_rollout_aligned runs modules with enabled: true, weight > 0 and channels that "
            "hold B; there is none",
            variant,
        )


def _two_channel_checks(config: Sections, pipeline: PipelineConfig | None) -> Iterator[Problem]:
    variant = "custom.trainer_variant"
    if pipeline is not None:
        yield problem(
            f"{_RM}.pipeline", "stage2_two_channel declares its objective in stage2_ab.pipeline; move it there", variant
        )
    stage2_ab = config.stage2_ab
    if stage2_ab is None:
        yield problem(
            "stage2_ab",
            "missing; custom.trainer_variant: stage2_two_channel needs schedule.b_ratio and pipeline in it",
            variant,
        )
        return
    if stage2_ab.schedule.b_ratio > 0 and config.rollout_matching is None:
        yield problem(
            _RM,
            f"missing; Channel-B makes rollouts (stage2_ab.schedule.b_ratio is {stage2_ab.schedule.b_ratio:g}). "
            "Add the section, or set b_ratio: 0",
            variant,
            "stage2_ab.schedule.b_ratio",
        )
    for channel, used in (("A", stage2_ab.schedule.b_ratio < 1), ("B", stage2_ab.schedule.b_ratio > 0)):
        if used and not _trains(stage2_ab.pipeline, channel):
            yield problem(
                "stage2_ab.pipeline.objective",
                f"trains nothing on steps of Channel-{channel}: no module has enabled: true, weight > 0 and channels "
                f"that hold {channel}. Add one, or set stage2_ab.schedule.b_ratio: {'1' if channel == 'A' else '0'}",
                "stage2_ab.schedule.b_ratio",
            )


def _trains(pipeline: PipelineConfig, channel: str) -> bool:
    return any(spec.enabled and spec.weight > 0 and channel in spec.channels for spec in pipeline.objective)


def _training_checks(training: TrainingConfig) -> Iterator[Problem]:
    if training.packing and not training.packing_drop_last:
        yield problem(
            "training.packing_drop_last",
            "must be true with training.packing: segments left over at the end stay in the buffer, no step is added "
            "for them",
            "training.packing",
        )
    if training.packing and importlib.util.find_spec("binpacking") is None:
        yield problem(
            "training.packing", "needs the package binpacking; pip install binpacking, or set training.packing: false"
        )
    for key, name, module in trainer_names.missing_packages(training.optim, training.report_to):
        yield problem(
            f"training.{key}",
            f"'{name}' needs the package {module}, which is not installed here; install it, or write "
            f"{'none' if key == 'report_to' else 'adamw_torch'}",
        )
    if training.fp16 and training.use_cpu:
        yield problem("training.fp16", "float16 needs a GPU; write bf16: true, or use_cpu: false", "training.use_cpu")
    if training.bf16 and training.fp16:
        yield problem("training.fp16", "bf16 and fp16 exclude each other; set one of them to false", "training.bf16")
    if training.effective_batch_size is not None:
        if training.gradient_accumulation_steps is not None:
            yield problem(
                "training.gradient_accumulation_steps",
                "follows from effective_batch_size; give one of the two",
                "training.effective_batch_size",
            )
        if training.effective_batch_size % training.per_device_train_batch_size:
            yield problem(
                "training.effective_batch_size",
                f"must be a multiple of per_device_train_batch_size ({training.per_device_train_batch_size})",
                "training.per_device_train_batch_size",
            )
    yield from _best_checkpoint_checks(training)


def _best_checkpoint_checks(training: TrainingConfig) -> Iterator[Problem]:
    if not training.load_best_model_at_end:
        return
    reads = ("training.load_best_model_at_end", "training.eval_strategy", "training.save_strategy")
    if training.eval_strategy == "no" or training.eval_strategy != training.save_strategy:
        yield problem(
            "training.load_best_model_at_end",
            f"needs an evaluation of every checkpoint, but eval_strategy is '{training.eval_strategy}' and "
            f"save_strategy '{training.save_strategy}'; give both the same value, steps or epoch",
            *reads,
        )
    elif training.eval_strategy == "steps":
        every = training.eval_steps or training.logging_steps
        if training.save_steps % every:
            yield problem(
                "training.save_steps",
                f"{training.save_steps:g} is no multiple of eval_steps ({every:g}), so load_best_model_at_end would "
                "meet checkpoints without figures",
                *reads,
                "training.eval_steps",
                "training.logging_steps",
            )
    if training.metric_for_best_model is None:
        yield problem(
            "training.metric_for_best_model", "missing; load_best_model_at_end needs the figure to go by", *reads
        )


def _parallel_checks(config: Sections) -> Iterator[Problem]:
    deepspeed, fsdp = config.deepspeed, config.fsdp
    if deepspeed.enabled and deepspeed.config is None:
        yield problem(
            "deepspeed.config", "missing; deepspeed.enabled: true needs a JSON file or a mapping", "deepspeed.enabled"
        )
    if deepspeed.enabled and fsdp.enabled:
        yield problem("fsdp.enabled", "deepspeed and fsdp exclude each other; enable one of them", "deepspeed.enabled")
    if fsdp.enabled and fsdp.activation_checkpointing and config.training.gradient_checkpointing:
        yield problem(
            "fsdp.activation_checkpointing",
            "does what training.gradient_checkpointing does; enable one of them",
            "training.gradient_checkpointing",
            "fsdp.enabled",
        )
    rollout = config.rollout_matching
    if rollout is None or not rollout.offload.enabled or not rollout.is_colocated:
        return  # offload does nothing elsewhere; advice() says so
    if not (rollout.offload.offload_model or rollout.offload.offload_optimizer):
        yield problem(
            f"{_RM}.offload.enabled",
            "moves nothing: set offload_model or offload_optimizer to true, or this to false",
            f"{_RM}.rollout_backend",
            f"{_VLLM}.mode",
        )
    if deepspeed.enabled:
        yield problem(
            f"{_RM}.offload.enabled",
            "DeepSpeed owns the learner's weights and optimizer, so they cannot be moved; set offload.enabled: false, "
            "deepspeed.enabled: false, or rollout_backend: hf",
            "deepspeed.enabled",
            f"{_RM}.rollout_backend",
            f"{_VLLM}.mode",
        )


def _tuner_checks(config: Sections) -> Iterator[Problem]:
    tuner = config.tuner
    if config.model.dtype == "float16" and config.training.fp16 and tuner.train_type == "full":
        yield problem(
            "model.dtype",
            "float16 weights cannot be trained with training.fp16, whose loss scaling needs float32 weights; write "
            "model.dtype: float32",
            "training.fp16",
            "tuner.train_type",
        )
    if tuner.freeze_vit and tuner.freeze_aligner and tuner.freeze_llm and tuner.train_type == "full":
        yield problem(
            "tuner.freeze_llm",
            "the whole model is frozen; leave one of freeze_vit, freeze_aligner, freeze_llm false",
            "tuner.freeze_vit",
            "tuner.freeze_aligner",
            "tuner.train_type",
        )


def _master_weight_checks(config: Sections) -> Iterator[Problem]:
    key, remove = "training.master_weights", "or remove this key"
    if config.tuner.train_type != "full":
        yield problem(
            key,
            f"tuner.train_type: {config.tuner.train_type} trains adapters, which are float32 already; remove this key, "
            "or write train_type: full",
            "tuner.train_type",
        )
    if config.model.dtype != "bfloat16":
        yield problem(
            key,
            f"belongs to weights in bfloat16, and model.dtype is {config.model.dtype}; write model.dtype: bfloat16, "
            f"{remove}",
            "model.dtype",
        )
    for owner, enabled in (("deepspeed", config.deepspeed.enabled), ("fsdp", config.fsdp.enabled)):
        if enabled:
            yield problem(
                key,
                f"{owner} keeps float32 copies of its own; {remove.removeprefix('or ')}, or write {owner}.enabled: "
                "false",
                f"{owner}.enabled",
            )
    if config.training.optim not in trainer_names.WITH_MASTERS:
        yield problem(
            key,
            f"works with training.optim: {', '.join(trainer_names.WITH_MASTERS)}, and it is {config.training.optim}; "
            f"write one of those, {remove}",
            "training.optim",
        )
    if config.training.fp16:
        yield problem(key, f"loss scaling needs float32 gradients; write bf16: true, {remove}", "training.fp16")


def check_world_size(config: Sections, world_size: int) -> None:
    """Rules that depend on the number of learner processes; call it once that number is known.

    Raises:
        ConfigError: with all of them, each with its dotted path.
    """
    problems = list(_world_size_checks(config, world_size))
    if problems:
        raise ConfigError("\n".join(f"{dotted(p.path)}: {p.message}" for p in problems))


def _world_size_checks(config: Sections, world_size: int) -> Iterator[Problem]:
    training, rollout = config.training, config.rollout_matching
    samples = training.per_device_train_batch_size * world_size
    if training.effective_batch_size is not None and training.effective_batch_size % samples:
        yield problem(
            "training.effective_batch_size",
            f"{training.effective_batch_size} is no multiple of per_device_train_batch_size x processes "
            f"= {training.per_device_train_batch_size} x {world_size}",
        )
    if rollout is None or rollout.rollout_backend != "vllm":
        return
    vllm = rollout.vllm
    if vllm.mode == "colocate" and world_size % vllm.tensor_parallel_size:
        yield problem(
            f"{_VLLM}.tensor_parallel_size",
            f"a colocated engine spans {vllm.tensor_parallel_size} of the learner's processes, and there are "
            f"{world_size}; write a divisor of {world_size}, start another number of processes, or write "
            "rollout_backend: hf",
        )
    if vllm.mode == "server" and world_size > 1 and vllm.sync.resolved(vllm.enable_lora) != "full":
        yield problem(
            f"{_VLLM}.sync.mode",
            f"'{vllm.sync.mode}' pushes adapters, which works from one learner process only, not from "
            f"{world_size}; write sync.mode: full",
        )


def advice(config: Sections) -> Iterator[str]:
    """What is allowed but seldom meant, one sentence each; printed and logged, never an error."""
    shards = config.deepspeed.enabled or config.fsdp.enabled  # these keep float32 weights beside the others
    has_masters = config.training.master_weights is not None or shards
    if config.model.dtype != "float32" and config.tuner.train_type == "full" and not has_masters:
        yield (
            f"model.dtype: {config.model.dtype} with tuner.train_type: full stores the trained weights themselves in "
            f"{config.model.dtype}, so small updates are rounded away. Write training.master_weights: float32 with "
            "model.dtype: bfloat16, or model.dtype: float32 with training.bf16: true"
        )
    rollout = config.rollout_matching
    if rollout is not None and rollout.offload.enabled and not rollout.is_colocated:
        where = "rollout_backend: hf" if rollout.rollout_backend == "hf" else "vllm.mode: server"
        yield (
            f"{_RM}.offload is ignored with {where}: only a colocated engine (rollout_backend: vllm, vllm.mode: "
            "colocate) needs room on the learner's device"
        )
