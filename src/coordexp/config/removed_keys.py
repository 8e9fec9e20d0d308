"""Keys and values that the original code read and this one does not, each with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coordexp.config.base import KeyPath, Problem, dotted

_RM = "rollout_matching"
_DELETE = "delete the line"
_MODULE = "*.pipeline.*.*.config"  # of rollout_matching and of stage2_ab


def _moved(section: str, **new: str) -> dict[str, str]:
    return {f"{section}.{old}": f"removed; write {key} instead" for old, key in new.items()}


def _moved_to(section: str, new_section: str, keys: str) -> dict[str, str]:
    return _moved(section, **{key: f"{new_section}.{key}" for key in keys.split()})


def _gone(section: str, keys: str, why: str) -> dict[str, str]:
    return {f"{section}.{key}": f"removed: {why}; {_DELETE}" for key in keys.split()}


# Dotted key (``*`` matches one key or list index) -> message.
REMOVED_KEYS: dict[str, str] = {
    "inherit": "removed; write extends instead",
    "extra": "removed: keys are read from their own sections only, never from a free mapping; delete it",
    "quantization": "removed: model.dtype is the number type of the weights; delete the section",
    "rlhf": "removed: CoordExp has neither rewards nor preference losses; delete the section",
    "debug": "removed; write training.output_dir, custom.train_sample_limit and custom.val_sample_limit instead, in a "
    "small file with extends or as key=value on the command line",
    # rollout_matching
    **_moved_to(_RM, f"{_RM}.decoding", "temperature top_p top_k"),
    **_moved_to(_RM, "training", "packing_buffer packing_min_fill_ratio packing_drop_last"),
    **_moved_to(_RM, "custom", "object_ordering object_field_order"),
    **_moved_to(
        _RM, f"{_RM}.pipeline.objective[coord_reg].config", "target_sigma target_truncate soft_ce_weight w1_weight"
    ),
    **_moved(
        _RM,
        rollout_generate_batch_size=f"{_RM}.decode_batch_size",
        rollout_infer_batch_size=f"{_RM}.decode_batch_size",
        eval_prompt_variant="template.prompt",
        packing_enabled="training.packing",
        packing_length="global_max_length",
        temperature_coord=f"{_RM}.pipeline.objective[coord_reg].config.temperature",
        gate_weight=f"{_RM}.pipeline.objective[coord_reg].config.coord_gate_weight",
    ),
    **_gone(
        _RM, "post_rollout_pack_scope", "post_rollout_pack_scope has no replacement, every micro-step packs its own"
    ),
    **_gone(_RM, "rollout_buffer", "rollout_buffer has no replacement, every step generates its own rollouts"),
    **_gone(_RM, "num_return_sequences", "exactly one answer per image is used"),
    **_gone(_RM, "desc_monitor", "descriptions are compared in evaluation, not in training"),
    **_gone(_RM, "coord_decode_mode", "bbox_geo always decodes a coordinate by its expectation"),
    **_gone(f"{_RM}.monitor_dump", "async_write max_pending_writes", "records are written at once"),
    **_gone(f"{_RM}.monitor_dump", "dump_first_step", "the first step is always recorded"),
    **_gone(f"{_RM}.monitor_dump", "only_world_process_zero", "the first process records"),
    **_gone(f"{_RM}.monitor_dump", "min_free_gb", "records are small, and one that cannot be written is counted"),
    **_gone(f"{_RM}.monitor_dump", "out_dir", "records are in rollout_records of training.output_dir"),
    **_gone(f"{_RM}.monitor_dump", "max_events", "records are written until the end; set every_steps"),
    **_gone(f"{_RM}.monitor_dump", "max_text_chars write_markdown", "records are whole JSON lines"),
    **_gone(f"{_RM}.eval_detection", "iou_thrs", "average precision is COCO's, over 0.50, 0.55, … 0.95"),
    **_gone(f"{_RM}.eval_detection", "strict_parse", "answers are always parsed strictly"),
    **_gone(f"{_RM}.eval_detection", "f1ish_pred_scope pred_score_version", "every prediction counts"),
    **_gone(
        f"{_RM}.eval_detection",
        "semantic_model semantic_threshold semantic_device semantic_batch_size",
        "evaluation in training compares descriptions as text",
    ),
    **_moved(f"{_RM}.eval_detection", pred_score_source=f"{_RM}.eval_detection.score_mode"),
    **_moved(
        f"{_RM}.vllm.server",
        base_url=f"{_RM}.vllm.server.servers[], a list of entries with base_url and group_port,",
        group_port=f"{_RM}.vllm.server.servers[], a list of entries with base_url and group_port,",
        debug_dump=f"{_RM}.monitor_dump",
    ),
    **_moved(f"{_RM}.vllm", infer_batch_size=f"{_RM}.decode_batch_size"),
    **_gone(f"{_RM}.vllm", "load_format", "the engine always starts with dummy weights and gets the trainer's"),
    **_gone(f"{_RM}.vllm", "distributed_executor_backend", "follows from mode and tensor_parallel_size"),
    **_gone(f"{_RM}.vllm", "skip_mm_profiling swap_space", "left to vLLM"),
    **{
        f"{_RM}.vllm.{name}": f"removed; write it under {_RM}.vllm.engine_args instead"
        for name in (
            *("kv_cache_dtype", "cpu_offload_gb", "mm_encoder_tp_mode"),
            *("enable_chunked_prefill", "disable_chunked_mm_input", "async_scheduling", "disable_custom_all_reduce"),
            *("enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs"),
        )
    },
    **_gone(f"{_RM}.vllm", "limit_mm_per_prompt", "a prompt has one image and no video"),
    # modules
    **_moved(
        _MODULE,
        bbox_smoothl1_weight="smoothl1_weight of bbox_geo.config",
        bbox_ciou_weight="ciou_weight of bbox_geo.config",
        coord_soft_ce_weight="soft_ce_weight of coord_reg.config",
        coord_w1_weight="w1_weight of coord_reg.config",
        gate_weight="coord_gate_weight of coord_reg.config",
        rollout_matched_prefix_struct_weight="struct_ce_weight of token_ce.config (Channel-B of two-channel training)",
    ),
    **_gone(
        _MODULE,
        "self_context_struct_ce_weight self_context_soft_ce_weight coord_el1_weight coord_ehuber_weight "
        "coord_huber_delta coord_entropy_weight rollout_drop_invalid_struct_ce_multiplier",
        "this loss term does not exist here",
    ),
    # stage2_ab
    **_moved(
        "stage2_ab",
        desc_ce_weight="desc_ce_weight of token_ce.config in stage2_ab.pipeline",
        bbox_smoothl1_weight="smoothl1_weight of bbox_geo.config in stage2_ab.pipeline",
        bbox_ciou_weight="ciou_weight of bbox_geo.config in stage2_ab.pipeline",
        coord_ce_weight="coord_ce_weight of coord_reg.config in stage2_ab.pipeline",
    ),
    **_gone(
        "stage2_ab",
        "coord_el1_weight coord_ehuber_weight coord_entropy_weight coord_huber_delta",
        "this loss term does not exist here",
    ),
    **_gone("stage2_ab", "coord_decode_mode", "bbox_geo always decodes a coordinate by its expectation"),
    **_moved("stage2_ab.schedule", pattern="stage2_ab.schedule.b_ratio"),
    "stage2_ab.channel_b": "removed: stage2_ab.pipeline declares what Channel-B trains, and rollout_matching how it "
    f"decodes ({_RM}.decode_batch_size); delete the section",
    # custom
    **_moved(
        "custom",
        sample_limit="custom.train_sample_limit or custom.val_sample_limit",
        coord_loss="custom.coord_soft_ce_w1 (stage 1) or rollout_matching.pipeline (stage 2)",
        augmentation="data.augment",
    ),
    **_gone("custom", "emit_norm", "coordinates are always written as the dataset has them, in bins 0..999"),
    **_gone("custom", "json_format", "answers are always one line of plain JSON"),
    **_gone("custom", "coord_tokens", "coordinates are always the 1000 coordinate tokens"),
    **_gone("custom", "coord_expectation_metrics", "coord_diag measures this"),
    **_gone("custom", "hard_sample_mining", "every sample is drawn once an epoch"),
    **_gone("custom", "summary_ratio images_per_user_turn", "a sample has one image and its objects"),
    "custom.extra": "removed: keys are read from their own sections only, never from a free mapping; delete it, and "
    "write template.prompt instead of prompt_variant",
    # training, and names of ms-swift's arguments, which the original code read
    **_moved(
        "training",
        packing_length="global_max_length",
        warmup_ratio="training.warmup_steps: a number below 1 is a share of all steps",
        dataloader_num_workers="data.num_workers",
        optimizer="training.optim, and vit_lr, aligner_lr and coord_lr for the parts,",
    ),
    **_gone("training", "packing_mode", "there is one way of packing"),
    **_gone(
        "training",
        "packing_allow_single_long",
        "a sample longer than global_max_length is an error, never cut; raise global_max_length",
    ),
    **_gone("training", "eval_packing", "evaluation decodes, so there is nothing to pack"),
    **_gone(
        "training",
        "packing_avg_samples packing_wait_timeout_s packing_length_cache_persist_every "
        "packing_length_precompute_workers",
        "rows are filled as samples come",
    ),
    **_gone(
        "training", "save_delay_steps save_delay_epochs save_last_epoch", "save_steps decides, and the end is saved"
    ),
    **_gone("training", "greater_is_better", "follows from metric_for_best_model"),
    **_gone("training", "logging_dir", "curves are in runs of output_dir, or where TENSORBOARD_LOGGING_DIR says"),
    **_gone("training", "ddp_backend ddp_bucket_cap_mb", "NCCL on GPUs and Gloo on CPUs, with torch's own buckets"),
    **_gone("training", "eval_delay", "evaluations begin with the first interval"),
    **_gone("training", "logging_first_step", "logging_steps: 1 logs each"),
    **_gone("training", "optim_args", "adam_beta1, adam_beta2 and adam_epsilon are keys"),
    **_gone("training", "save_on_each_node", "checkpoints need an output_dir that all nodes share"),
    **_gone("training", "tf32", "training.bf16: true is faster; the variable NVIDIA_TF32_OVERRIDE decides in float32"),
    **_gone("training", "torch_empty_cache_steps", "the allocator grows its segments instead"),
    **_gone("fsdp", "reshard_after_forward", "always true; DeepSpeed's ZeRO-2 keeps weights whole"),
    **_gone("fsdp", "cpu_offload", "deepspeed.config can offload"),
    **_gone("fsdp", "transformer_layer_cls_to_wrap", "the model's own layers are sharded one by one"),
    **_moved("fsdp", activation_checkpointing="training.gradient_checkpointing"),
    **_moved("template", max_length="global_max_length"),
    **_gone("template", "template", "the checkpoint settles it"),
    **_gone("data.augment", "min_visible", "objects with less than 0.3 of their area in view are left out"),
    **_gone("launch", "log_dir", "logs are in logs of training.output_dir"),
    **_moved("data", dataset="custom.train_jsonl", val_dataset="custom.val_jsonl"),
}

REMOVED_VALUES: dict[tuple[str, object], str] = {
    ("custom.trainer_variant", "rollout_matching_sft"): "retired; write stage2_rollout_aligned instead",
    ("custom.trainer_variant", "stage2_ab_training"): "retired; write stage2_two_channel instead",
}
_OLD_SECTION = ("custom", "extra", _RM)  # its keys are those of rollout_matching now


def take_removed(data: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every removed key or value, and remove it from ``data``, so that validation of the
    rest does not report it again."""
    for mapping, key, _ in list(_matches(data, _OLD_SECTION, ())):
        old = mapping.pop(key)
        for tail in _leaves(old, ()):
            # A key that was removed as well, or is in a section that was, has its own guidance.
            paths = [dotted((_RM, *tail[:length])) for length in range(1, len(tail) + 1)]
            removed = (REMOVED_KEYS[path] for path in paths if path in REMOVED_KEYS)
            message = next(removed, f"moved; write {dotted((_RM, *tail))} instead")
            yield Problem((*_OLD_SECTION, *tail), message)
        if not mapping:
            del data["custom"]["extra"]
    for pattern, message in REMOVED_KEYS.items():
        for mapping, key, path in list(_matches(data, tuple(pattern.split(".")), ())):
            del mapping[key]
            yield Problem(path, message)
    for (pattern, value), message in REMOVED_VALUES.items():
        for mapping, key, path in list(_matches(data, tuple(pattern.split(".")), ())):
            if mapping[key] == value:
                del mapping[key]
                yield Problem(path, f"'{value}' is {message}")


def _leaves(value: object, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path


def _matches(value: Any, pattern: tuple[str, ...], path: KeyPath) -> Iterator[tuple[dict[str, Any], str, KeyPath]]:
    """(the mapping that holds the key, the key, its path) for each place in ``value`` that ``pattern`` describes."""
    head, *rest = pattern
    if isinstance(value, dict):
        keys = list(value) if head == "*" else [head] if head in value else []
        for key in keys:
            if rest:
                yield from _matches(value[key], tuple(rest), (*path, key))
            else:
                yield value, key, (*path, key)
    elif isinstance(value, list) and head == "*" and rest:
        for index, item in enumerate(value):
            yield from _matches(item, tuple(rest), (*path, index))
