"""The table of keys that are refused with guidance of their own: earlier names, and names of related programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Removed:
    """A pattern of dotted keys (``*`` stands for one key or list index) and what to do instead."""

    pattern: str
    guidance: str


def _moved(section: str, **new: str) -> tuple[Removed, ...]:
    """Keys of ``section`` that have another name or place now."""
    return tuple(Removed(f"{section}.{old}", f"removed; write {key} instead") for old, key in new.items())


def _gone(section: str, keys: str, why: str) -> tuple[Removed, ...]:
    """Keys of ``section``, separated by blanks, that have no successor."""
    return tuple(Removed(f"{section}.{key}" if section else key, f"removed: {why}") for key in keys.split())


_RM = "rollout_matching"
_VLLM = f"{_RM}.vllm"
_DELETE = "delete the line"
_MODULES = (f"{_RM}.pipeline.*.*.config", "stage2_ab.pipeline.*.*.config")

_ROLLOUT = (
    *_moved(
        _RM,
        rollout_generate_batch_size=f"{_RM}.decode_batch_size",
        rollout_infer_batch_size=f"{_RM}.decode_batch_size",
        temperature=f"{_RM}.decoding.temperature",
        top_p=f"{_RM}.decoding.top_p",
        top_k=f"{_RM}.decoding.top_k",
        eval_prompt_variant="template.prompt",
        packing_enabled="training.packing",
        packing_length="global_max_length",
        packing_buffer="training.packing_buffer",
        packing_min_fill_ratio="training.packing_min_fill_ratio",
        packing_drop_last="training.packing_drop_last",
        object_ordering="custom.object_ordering",
        object_field_order="custom.object_field_order",
    ),
    *_gone(
        _RM,
        "post_rollout_pack_scope",
        "post_rollout_pack_scope has no replacement, rollouts are always packed micro-step by micro-step; delete the "
        "line",
    ),
    *_gone(
        _RM,
        "rollout_buffer",
        "rollout_buffer has no replacement, every step generates its own rollouts; delete the line",
    ),
    *_gone(_RM, "num_return_sequences", f"exactly one answer per image is used; {_DELETE}"),
    *_gone(_RM, "desc_monitor", "descriptions are compared in evaluation, not in training; delete the section"),
    *(
        Removed(f"{_RM}.{key}", f"removed: losses are declared in {_RM}.pipeline; write {new} of coord_reg.config")
        for key, new in {
            "target_sigma": "target_sigma",
            "target_truncate": "target_truncate",
            "temperature_coord": "temperature",
            "soft_ce_weight": "soft_ce_weight",
            "w1_weight": "w1_weight",
            "gate_weight": "coord_gate_weight",
        }.items()
    ),
    *_gone(
        f"{_RM}.monitor_dump",
        "max_events",
        f"records go on for the whole run; set every_steps for how many, and {_DELETE}",
    ),
    *_gone(f"{_RM}.monitor_dump", "max_text_chars", f"records hold whole answers; {_DELETE}"),
    *_gone(f"{_RM}.monitor_dump", "async_write", f"records are always written beside training; {_DELETE}"),
    *_moved(f"{_RM}.monitor_dump", max_pending_writes=f"{_RM}.monitor_dump.max_pending"),
    *_gone(f"{_RM}.monitor_dump", "write_markdown", f"records are JSON lines, which the viewer shows; {_DELETE}"),
    *_gone(f"{_RM}.eval_detection", "strict_parse", f"answers are always parsed strictly; {_DELETE}"),
    *_gone(
        f"{_RM}.eval_detection",
        "semantic_model semantic_threshold semantic_device semantic_batch_size",
        f"evaluation in training compares descriptions as text; {_DELETE}",
    ),
    *_gone(f"{_RM}.eval_detection", "f1ish_pred_scope", f"every prediction counts; {_DELETE}"),
    *_moved(f"{_RM}.eval_detection", pred_score_source=f"{_RM}.eval_detection.score_mode"),
    *_gone(f"{_RM}.eval_detection", "pred_score_version", f"there is one version; {_DELETE}"),
)

_ENGINE = (
    *(
        Removed(
            f"{_VLLM}.server.{key}",
            f"removed: list servers under {_VLLM}.server.servers[], each with base_url and group_port",
        )
        for key in ("base_url", "group_port")
    ),
    *_gone(
        f"{_VLLM}.server",
        "debug_dump",
        f"what servers answer is in the records of {_RM}.monitor_dump; delete the section",
    ),
    *_moved(_VLLM, infer_batch_size=f"{_RM}.decode_batch_size"),
    *_gone(_VLLM, "load_format", f"the engine always starts with dummy weights and gets the learner's; {_DELETE}"),
    *_gone(_VLLM, "distributed_executor_backend", f"follows from mode and tensor_parallel_size; {_DELETE}"),
    *_gone(_VLLM, "enable_chunked_prefill disable_chunked_mm_input skip_mm_profiling", f"left to vLLM; {_DELETE}"),
    *_gone(_VLLM, "swap_space", f"vLLM has no swap space any more; {_DELETE}"),
)

_OBJECTIVE = tuple(
    row
    for section in _MODULES
    for row in (
        *(
            Removed(f"{section}.{alias}", f"not a key of any module; write {key} instead")
            for alias, key in {
                "bbox_smoothl1_weight": "smoothl1_weight",
                "bbox_ciou_weight": "ciou_weight",
                "coord_soft_ce_weight": "soft_ce_weight",
                "coord_w1_weight": "w1_weight",
                "coord_token_ce_weight": "coord_ce_weight",
                "gate_weight": "coord_gate_weight",
                "coord_temperature": "temperature",
            }.items()
        ),
        *_gone(
            section,
            "self_context_struct_ce_weight self_context_soft_ce_weight coord_el1_weight coord_ehuber_weight "
            "coord_huber_delta coord_entropy_weight rollout_drop_invalid_struct_ce_multiplier",
            f"this loss term does not exist here; {_DELETE}",
        ),
        Removed(
            f"{section}.rollout_matched_prefix_struct_weight",
            "removed: on Channel-B of two-channel training struct_ce_weight of token_ce.config weighs matched objects' "
            "own structure too; rollout-aligned training never teaches a prefix's text. Write struct_ce_weight, or "
            f"{_DELETE}",
        ),
    )
)

_TWO_CHANNEL = (
    *(
        Removed(f"stage2_ab.{key}", f"removed: losses are declared in stage2_ab.pipeline; write {new}")
        for key, new in {
            "desc_ce_weight": "desc_ce_weight of token_ce.config",
            "bbox_smoothl1_weight": "smoothl1_weight of bbox_geo.config",
            "bbox_ciou_weight": "ciou_weight of bbox_geo.config",
            "coord_ce_weight": "coord_ce_weight of coord_reg.config",
        }.items()
    ),
    *_gone(
        "stage2_ab",
        "coord_el1_weight coord_ehuber_weight coord_entropy_weight coord_huber_delta",
        f"this loss term does not exist here; {_DELETE}",
    ),
    *_gone("stage2_ab.schedule", "pattern", "the schedule follows from b_ratio alone; write b_ratio"),
    *_gone(
        "stage2_ab.channel_b",
        "mode async rollouts_per_step enable_pipeline",
        f"a Channel-B step trains on rollouts of its own training.effective_batch_size samples; {_DELETE}",
    ),
    *_moved("stage2_ab.channel_b", rollout_decode_batch_size=f"{_RM}.decode_batch_size"),
    *_gone(
        "stage2_ab.channel_b",
        "drop_invalid_struct_ce_multiplier reordered_gt_sft desc_ce_weight_matched semantic_desc_gate",
        f"what Channel-B trains is declared in stage2_ab.pipeline; {_DELETE}",
    ),
)

_CUSTOM = (
    *_moved(
        "custom",
        sample_limit="custom.train_sample_limit or custom.val_sample_limit",
        coord_loss="custom.coord_soft_ce_w1 (stage 1) or rollout_matching.pipeline (stage 2)",
        coord_offset="tuner.train_coord_rows",
        user_prompt="template.prompt",
        system_prompt="template.system",
    ),
    *_gone("custom", "coord_expectation_metrics", f"coord_diag measures this; {_DELETE}"),
    *_gone("custom", "hard_sample_mining", "every sample is drawn once an epoch; delete the section"),
    *_gone("custom", "summary_ratio use_summary", f"samples have objects, not summaries; {_DELETE}"),
    *_gone(
        "custom",
        "augmentation augmentation_curriculum",
        "declare flips, scale, crop and colour in data.augment (stage 1), and delete the section",
    ),
    *_gone(
        "custom",
        "token_type_metrics",
        "losses are always logged by module and term (loss/…), and by token in the records of "
        f"{_RM}.monitor_dump; delete the section",
    ),
    *_gone(
        "custom",
        "dump_conversation_text dump_conversation_path",
        f"prompts and answers are in the records of {_RM}.monitor_dump; {_DELETE}",
    ),
    *_gone(
        "custom",
        "val_sample_with_replacement",
        f"every evaluation takes the same first custom.val_sample_limit samples, each once; {_DELETE}",
    ),
    *_gone("custom", "images_per_user_turn", f"a sample has one image; {_DELETE}"),
    Removed("custom.extra.prompt_variant", "removed; write template.prompt instead"),
    Removed(
        "custom.extra", "removed: keys are read from their own sections only, never from a free mapping; delete it"
    ),
)

_OPTIMIZER = (
    "learning rates by part of the model are training.vit_lr, aligner_lr and coord_lr, and the optimizer's name is "
    f"training.optim; {_DELETE}"
)

_TRAINING = (
    *_moved(
        "training",
        packing_length="global_max_length",
        warmup_ratio="training.warmup_steps: a number below 1 is a share of all steps",
        evaluation_strategy="training.eval_strategy",
        dataloader_num_workers="data.num_workers",
        data_seed="training.seed",
        logging_strategy="training.logging_steps",
        deepspeed="the section deepspeed",
        fsdp="the section fsdp",
        fsdp_config="the section fsdp",
        torch_dtype="model.dtype",
        attn_impl="model.attn_implementation",
        bf16_full_eval="model.dtype: evaluation runs the weights as they are",
        fp16_full_eval="model.dtype: evaluation runs the weights as they are",
        optim_target_modules="tuner.target_modules",
    ),
    *_gone("training", "packing_mode", f"there is one way of packing; {_DELETE}"),
    *_gone(
        "training",
        "packing_allow_single_long",
        f"a sample longer than global_max_length is an error, never cut; raise global_max_length, and {_DELETE}",
    ),
    *_gone("training", "eval_packing", f"evaluation decodes, so there is nothing to pack; {_DELETE}"),
    *_gone(
        "training",
        "packing_avg_samples packing_wait_timeout_s packing_length_cache_persist_every "
        "packing_length_precompute_workers",
        f"rows are filled as samples come, nothing is measured beforehand; {_DELETE}",
    ),
    *_gone("training", "save_delay_steps save_delay_epochs", f"checkpoints follow save_steps alone; {_DELETE}"),
    *_gone("training", "save_last_epoch", f"the last state is always saved; {_DELETE}"),
    *_gone(
        "training",
        "label_smoothing_factor neftune_noise_alpha",
        f"the objective is exactly what the configuration declares, by custom.coord_soft_ce_w1 or a pipeline; "
        f"{_DELETE}",
    ),
    *_gone("training", "average_tokens_across_devices", f"losses are always normalised over all devices; {_DELETE}"),
    *_gone(
        "training", "auto_find_batch_size", "it would change the batch unseen; set per_device_train_batch_size yourself"
    ),
    *_gone(
        "training",
        "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache "
        "gradient_checkpointing_kwargs remove_unused_columns label_names ddp_find_unused_parameters "
        "ddp_broadcast_buffers ddp_static_graph accelerator_config parallelism_config dataloader_drop_last "
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy length_column_name "
        "logging_nan_inf_filter ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint",
        f"the trainer sets this itself; {_DELETE}",
    ),
    *_gone(
        "training",
        "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics",
        f"evaluation decodes answers and counts objects, it gathers no logits; {_DELETE}",
    ),
    *_gone(
        "training",
        "log_on_each_node include_num_input_tokens_seen log_level log_level_replica skip_memory_metrics debug",
        f"the first process logs, with figures of its own; {_DELETE}",
    ),
    *_gone(
        "training",
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
        f"nothing is uploaded; {_DELETE}",
    ),
    *_gone("training", "do_train do_eval do_predict", f"the command says it: coordexp train, evaluate; {_DELETE}"),
    *_gone("training", "local_rank", f"torchrun sets it; {_DELETE}"),
    *_gone("training", "add_version", f"checkpoints lie in training.output_dir itself; {_DELETE}"),
    *_gone("training", "save_safetensors", f"weights are always saved as safetensors; {_DELETE}"),
    *_gone("training", "optimizer", _OPTIMIZER),
)

_SECTIONS = (
    Removed("inherit", "removed; write extends instead"),
    Removed("optimizer", f"removed: {_OPTIMIZER}"),
    Removed("extra", "removed: keys are read from their own sections only, never from a free mapping; delete it"),
    Removed("quantization", "removed: weights are trained as model.dtype says; delete the section"),
    Removed("rlhf", "removed: there is no reward and no preference loss here; delete the section"),
    *_moved(
        "model",
        gradient_checkpointing="training.gradient_checkpointing",
        freeze_vision="tuner.freeze_vit, and tuner.freeze_aligner for the mergers,",
        torch_dtype="model.dtype",
        attn_impl="model.attn_implementation",
    ),
    *_gone("model", "model_type", f"the checkpoint says it; {_DELETE}"),
    *_moved("template", max_length="global_max_length"),
    *_gone("template", "truncation_strategy", f"samples are never cut; {_DELETE}"),
    *_gone("template", "max_pixels", f"images are used as they are; resize them when converting, and {_DELETE}"),
    *_gone("template", "template padding_free padding_side", f"the checkpoint and packing settle it; {_DELETE}"),
    *_moved("data", dataset="custom.train_jsonl", val_dataset="custom.val_jsonl"),
    *_moved(
        "data",
        dataloader_num_workers="data.num_workers",
        dataset_num_proc="data.num_workers",
        data_seed="training.seed",
    ),
    *_gone(
        "data",
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_drop_last "
        "dataloader_multiprocessing_context dataloader_in_order",
        f"the trainer sets this itself, data.num_workers is the loader's one key; {_DELETE}",
    ),
    *_gone("data", "split_dataset_ratio", f"give custom.val_jsonl its own file; {_DELETE}"),
    *_moved("tuner", tuner_type="tuner.train_type", coord_offset="tuner.train_coord_rows"),
    *_gone("tuner", "use_swift_lora", f"adapters are peft's; {_DELETE}"),
    *_gone(
        "tuner",
        "target_regex",
        f"there are no patterns; list the ends of the modules' names in tuner.target_modules, and {_DELETE}",
    ),
    *_gone("tuner", "use_rslora lora_bias lora_dtype init_weights", f"adapters are plain LoRA or DoRA; {_DELETE}"),
)

REMOVED_KEYS: tuple[Removed, ...] = (
    *_ROLLOUT,
    *_ENGINE,
    *_OBJECTIVE,
    *_TWO_CHANNEL,
    *_CUSTOM,
    *_TRAINING,
    *_SECTIONS,
)

REMOVED_VALUES: dict[tuple[str, object], str] = {
    ("custom.trainer_variant", "rollout_matching_sft"): "retired; write stage2_rollout_aligned instead",
    ("custom.trainer_variant", "stage2_ab_training"): "retired; write stage2_two_channel instead",
}
