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

# Keys and whole sections that change nothing of what the remaining steps learn, but how, where and how long they run
# and what is written. Every other key is refused, so a new one is, until it is listed here.
HARMLESS = (
    *("model.attn_implementation", "model.fused_kernels"),
    "template.allow_prompt_change",
    "data.num_workers",
    *("custom.val_jsonl", "custom.val_sample_limit"),
    *("training.output_dir", "training.run_name", "training.use_cpu"),
    *("training.max_steps", "training.num_train_epochs"),
    *("training.gradient_checkpointing", "training.gradient_checkpointing_every"),
    "training.ddp_timeout",
    *("training.logging_steps", "training.report_to"),
    *("training.save_strategy", "training.save_steps", "training.save_total_limit", "training.save_only_model"),
    *("training.load_best_model_at_end", "training.stop_within_s"),
    *("training.resume_from_checkpoint", "training.resume_with_changes", "training.overwrite_output_dir"),
    *("training.eval_strategy", "training.eval_steps", "training.eval_on_start"),
    *("training.per_device_eval_batch_size", "training.packing_min_fill_ratio"),
    *("rollout_matching.decode_batch_size", "rollout_matching.eval_detection", "rollout_matching.monitor_dump"),
    *("rollout_matching.offload", "rollout_matching.vllm.server", "rollout_matching.vllm.sync"),
    *("rollout_matching.vllm.tensor_parallel_size", "rollout_matching.vllm.gpu_memory_utilization"),
    *("rollout_matching.vllm.max_model_len", "rollout_matching.vllm.sleep_level"),
    *("rollout_matching.vllm.enforce_eager", "rollout_matching.vllm.enable_lora"),
    "rollout_matching.vllm.max_lora_rank",
    *(f"rollout_matching.vllm.engine_args.{name}" for name in ("async_scheduling", "disable_custom_all_reduce")),
    *(f"rollout_matching.vllm.engine_args.{name}" for name in ("enable_prefix_caching", "max_num_batched_tokens")),
    "rollout_matching.vllm.engine_args.max_num_seqs",
    "launch",
)
# Harmless ones that belong to a start and not to the run: not reported either.
OF_THE_START = (
    *("training.output_dir", "training.resume_from_checkpoint", "training.resume_with_changes"),
    "training.overwrite_output_dir",
)
# Keys of what a checkpoint holds, which no permission changes: its weights, their kind, its optimizer and schedule.
FIXED = (
    *("model.model", "custom.trainer_variant"),
    *("tuner.train_type", "tuner.lora_rank", "tuner.use_dora", "tuner.target_modules", "tuner.modules_to_save"),
    *("tuner.freeze_vit", "tuner.freeze_aligner", "tuner.freeze_llm", "tuner.train_coord_rows"),
    *("training.optim", "training.master_weights", "training.lr_scheduler_type"),
    *("deepspeed.enabled", "fsdp.enabled", "fsdp.state_dict_type"),
)
# Keys of what an evaluation measures, and of how it decodes; offload decides what a null score_mode means.
MEASURING = (
    *("training.metric_for_best_model", "rollout_matching.eval_detection"),
    *("rollout_matching.offload.enabled", "rollout_matching.rollout_backend"),
    *("rollout_matching.decode_mode", "rollout_matching.num_beams", "rollout_matching.max_new_tokens"),
    *("rollout_matching.repetition_penalty", "rollout_matching.decoding", "rollout_matching.repeat_terminate"),
)
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
    key that ``earlier`` lacks, as an older version wrote it, counts as its default; a null one that no longer exists
    was not set."""
    harmless = HARMLESS if config.custom.trainer_variant is not None else (*HARMLESS, "rollout_matching")
    now = config.model_dump(mode="json")
    for path, was, is_now in _differences(_with_defaults(RunConfig, earlier), now, ()):
        key = dotted(path)
        if key not in OF_THE_START:
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
        if key not in whole and not field.is_required():
            whole[key] = to_jsonable_python(field.get_default(call_default_factory=True))
        elif inner is not None and isinstance(whole.get(key), dict):
            whole[key] = _with_defaults(inner, whole[key])
    return whole


def _shown(value: Any) -> str:
    return ABSENT if value is _NOTHING else dump_value(value)
