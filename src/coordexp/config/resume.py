"""Which keys a resumed run may change, and the differences between its configuration and the checkpoint's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic_core import to_jsonable_python

from coordexp.config.base import KeyPath, StrictModel, dotted, section_of
from coordexp.config.schema import RunConfig
from coordexp.config.source import dump_value


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


# Keys and whole sections that change nothing of what the remaining steps learn, but how, where and how long they run
# and what is written. Every other key is refused, so a new one is, until it is listed here.
HARMLESS = (
    *_keys("model", "attn_implementation fused_kernels"),
    *_keys("template", "allow_prompt_change"),
    *_keys("data", "num_workers"),
    *_keys("custom", "val_jsonl val_sample_limit"),
    *_keys("training", "output_dir run_name use_cpu max_steps num_train_epochs ddp_timeout stop_within_s"),
    *_keys("training", "gradient_checkpointing gradient_checkpointing_every full_determinism"),
    *_keys("training", "packing_min_fill_ratio per_device_eval_batch_size"),
    *_keys("training", "logging_steps report_to eval_strategy eval_steps eval_on_start"),
    *_keys("training", "save_strategy save_steps save_total_limit save_only_model load_best_model_at_end"),
    *_keys("training", "resume_from_checkpoint resume_with_changes overwrite_output_dir"),
    *_keys("rollout_matching", "decode_batch_size eval_detection monitor_dump offload"),
    *_keys("rollout_matching.vllm", "server sync tensor_parallel_size gpu_memory_utilization max_model_len"),
    *_keys("rollout_matching.vllm", "sleep_level enforce_eager enable_lora max_lora_rank"),
    *_keys("rollout_matching.vllm.engine_args", "async_scheduling disable_custom_all_reduce enable_prefix_caching"),
    *_keys("rollout_matching.vllm.engine_args", "max_num_batched_tokens max_num_seqs"),
    "launch",
)
# Harmless ones that belong to a start and not to the run: not reported either.
OF_THE_START = _keys("training", "output_dir resume_from_checkpoint resume_with_changes overwrite_output_dir")
# Keys of what a checkpoint holds, which no permission changes: its weights, their kind, its optimizer and schedule.
FIXED = (
    *("model.model", "custom.trainer_variant"),
    *_keys("tuner", "train_type lora_rank use_dora target_modules modules_to_save"),
    *_keys("tuner", "freeze_vit freeze_aligner freeze_llm train_coord_rows"),
    *_keys("training", "optim master_weights lr_scheduler_type"),
    *("deepspeed.enabled", "fsdp.enabled", "fsdp.state_dict_type"),
)
# Keys of what an evaluation measures, and of how it decodes; offload decides what a null score_mode means.
MEASURING = (
    "training.metric_for_best_model",
    *_keys("rollout_matching", "eval_detection offload.enabled rollout_backend decode_mode num_beams max_new_tokens"),
    *_keys("rollout_matching", "repetition_penalty decoding repeat_terminate"),
)
# Keys of earlier versions that changed nothing of it either, and the values of those and others by which a run did what
# each run does now.
GONE_HARMLESS = (
    *_keys("training", "ddp_backend ddp_bucket_cap_mb eval_delay logging_dir logging_first_step save_on_each_node"),
    *_keys("training", "torch_empty_cache_steps"),
    *_keys("fsdp", "activation_checkpointing cpu_offload reshard_after_forward"),
    *_keys("rollout_matching.vllm", "async_scheduling disable_custom_all_reduce enable_prefix_caching"),
    *_keys("rollout_matching.vllm", "limit_mm_per_prompt max_num_batched_tokens max_num_seqs"),
)
GONE_AS_NOW: dict[str, Any] = {
    "data.augment.min_visible": 0.3,
    **{"training.eval_delay": 0, "training.logging_first_step": False, "training.save_on_each_node": False},
    **{"fsdp.activation_checkpointing": False, "fsdp.cpu_offload": False, "fsdp.reshard_after_forward": True},
    "rollout_matching.coord_decode_mode": "exp",
    "rollout_matching.monitor_dump.dump_first_step": True,
    "rollout_matching.monitor_dump.min_free_gb": 2,
    "rollout_matching.monitor_dump.only_world_process_zero": True,
    "rollout_matching.vllm.disable_custom_all_reduce": True,
    "rollout_matching.vllm.enable_prefix_caching": True,
    "rollout_matching.vllm.limit_mm_per_prompt": {"image": 1, "video": 0},
    "stage2_ab.coord_decode_mode": "exp",
}
ABSENT = "(no such key)"


@dataclass(frozen=True, slots=True)
class Change:
    """A key with another value than in the checkpoint's configuration; both as YAML, or :data:`ABSENT`."""

    key: str
    was: str
    now: str
    harmless: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.was} in the checkpoint, {self.now} now"


def changes(earlier: Mapping[str, Any], config: RunConfig) -> Iterator[Change]:
    """Every key of ``config`` that differs from ``earlier``, a checkpoint's ``resolved_config.yaml`` as plain data. A
    key that ``earlier`` lacks, as an older version wrote it, counts as its default; one that no longer exists is no
    difference if it was null, or said what is done now."""
    harmless = (*HARMLESS, *GONE_HARMLESS)
    harmless += () if config.custom.trainer_variant is not None else ("rollout_matching",)
    done_now = {**GONE_AS_NOW, "training.greater_is_better": config.training.more_is_better}
    now = config.model_dump(mode="json")
    for path, was, is_now in _differences(_with_defaults(RunConfig, earlier), now, ()):
        key = dotted(path)
        same = is_now is _NOTHING and key in done_now and was == done_now[key]
        if key not in OF_THE_START and not same:
            allowed = any(_is_within(key, one) for one in harmless) and not _moves_seeds(key, was, is_now, config)
            yield Change(key, _shown(was), _shown(is_now), allowed)


def _moves_seeds(key: str, was: Any, now: Any, config: RunConfig) -> bool:
    # Servers count up from the seed of each call, so how a step is cut into calls decides what its answers sample.
    rollouts = config.rollout_matching
    if config.custom.trainer_variant is None or rollouts is None or not rollouts.is_served:
        return False
    if not rollouts.decoding.temperature:
        return False
    if key == "rollout_matching.vllm.server.servers":
        return not isinstance(was, list) or not isinstance(now, list) or len(was) != len(now)
    if key == "launch.server_devices":
        least = rollouts.vllm.tensor_parallel_size  # of an engine; without devices it is on the CPU
        sizes = ([max(least, len(devices)) for devices in one] for one in (was, now))
        return any(before != after for before, after in zip_longest(*sizes, fillvalue=least))
    return key == "rollout_matching.decode_batch_size"


def changes_figures(applied: Iterable[Change]) -> bool:
    """Whether the figures of evaluations after these changes cannot be compared with those before."""
    return any(_is_within(one.key, key) or _is_within(key, one.key) for one in applied for key in MEASURING)


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


_NOTHING: Any = object()


def differing(one: Any, other: Any) -> Iterator[tuple[KeyPath, str, str]]:
    """Path and both values, as YAML, of everything in which two pieces of plain data differ."""
    for path, first, second in _differences(one, other, ()):
        yield path, _shown(first), _shown(second)


def _differences(was: Any, now: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any, Any]]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *was]):
            yield from _differences(was.get(key, _NOTHING), now.get(key, _NOTHING), (*path, key))
    elif was != now:
        yield path, was, now


def _with_defaults(section: type[StrictModel], data: Mapping[str, Any]) -> dict[str, Any]:
    whole = copy.deepcopy(
        {key: value for key, value in data.items() if key in section.model_fields or value is not None}
    )
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        was_null = whole.get(key, _NOTHING) is None and field.default == {}  # an empty mapping, in earlier versions
        if was_null or (key not in whole and not field.is_required()):
            whole[key] = to_jsonable_python(field.get_default(call_default_factory=True))
        elif inner is not None and isinstance(whole.get(key), dict):
            whole[key] = _with_defaults(inner, whole[key])
    return whole


def _shown(value: Any) -> str:
    return ABSENT if value is _NOTHING else dump_value(value)
