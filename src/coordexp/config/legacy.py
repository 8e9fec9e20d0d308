"""Keys and values that this project does not take (any more), each with its own guidance. One table, one reader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordexp.config.strict import KeyPath, Problem, dotted


@dataclass(frozen=True, slots=True)
class Removed:
    """A pattern of dotted keys (``*`` stands for one key or list index) and what to write instead."""

    pattern: str
    guidance: str


def moved(old: str, new: str) -> Removed:
    """A row for a key that has another name or place now."""
    return Removed(old, f"removed; write {new} instead")


_RM = "rollout_matching"
_MODULE = f"{_RM}.pipeline.*.*.config"

REMOVED_KEYS: tuple[Removed, ...] = (
    moved(f"{_RM}.rollout_generate_batch_size", f"{_RM}.decode_batch_size"),
    moved(f"{_RM}.rollout_infer_batch_size", f"{_RM}.decode_batch_size"),
    Removed(
        f"{_RM}.post_rollout_pack_scope",
        "removed: post_rollout_pack_scope has no replacement, rollouts are always packed micro-step by micro-step; "
        "delete the line",
    ),
    Removed(
        f"{_RM}.rollout_buffer",
        "removed: rollout_buffer has no replacement, every step generates its own rollouts; delete the line",
    ),
    moved(f"{_RM}.temperature", f"{_RM}.decoding.temperature"),
    moved(f"{_RM}.top_p", f"{_RM}.decoding.top_p"),
    moved(f"{_RM}.top_k", f"{_RM}.decoding.top_k"),
    Removed(
        f"{_RM}.vllm.server.base_url",
        f"removed: list servers under {_RM}.vllm.server.servers[], each with base_url and group_port",
    ),
    Removed(
        f"{_RM}.vllm.server.group_port",
        f"removed: list servers under {_RM}.vllm.server.servers[], each with base_url and group_port",
    ),
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
    Removed(f"{_RM}.num_return_sequences", "removed: exactly one answer per image is used; delete the line"),
    *(
        Removed(f"{_MODULE}.{alias}", f"not a key of any module; write {key} instead")
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
    *(
        Removed(f"{_MODULE}.{key}", "removed: this loss term does not exist here; delete the line")
        for key in (
            "self_context_struct_ce_weight",
            "self_context_soft_ce_weight",
            "coord_el1_weight",
            "coord_ehuber_weight",
            "coord_huber_delta",
            "coord_entropy_weight",
            "rollout_matched_prefix_struct_weight",
            "rollout_drop_invalid_struct_ce_multiplier",
        )
    ),
    moved("custom.sample_limit", "custom.train_sample_limit or custom.val_sample_limit"),
    moved("custom.coord_loss", "custom.coord_soft_ce_w1 (stage 1) or rollout_matching.pipeline (stage 2)"),
    moved("template.max_length", "global_max_length"),
    moved("training.packing_length", "global_max_length"),
    moved("training.warmup_ratio", "training.warmup_steps: a number below 1 is a share of all steps"),
    moved("training.evaluation_strategy", "training.eval_strategy"),
    moved("model.gradient_checkpointing", "training.gradient_checkpointing"),
    moved("model.freeze_vision", "tuner.freeze_vit"),
    Removed(f"{_RM}.vllm.swap_space", "removed: vLLM has no swap space any more; delete the line"),
    moved("training.dataloader_num_workers", "data.num_workers"),
)

# Everything that stood below this key stands below rollout_matching now.
OLD_ROLLOUT_SECTION = ("custom", "extra", _RM)

REMOVED_VALUES: dict[tuple[str, object], str] = {
    ("custom.trainer_variant", "rollout_matching_sft"): "retired; write stage2_rollout_aligned instead",
    ("custom.trainer_variant", "stage2_ab_training"): "retired; write stage2_two_channel instead",
}


def take_removed(data: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every removed key or value in ``data``, and take it out, so that validation of the rest
    does not report it again as unknown."""
    yield from _take_old_section(data)
    for row in REMOVED_KEYS:
        for parent, last, path in list(_matches(data, tuple(row.pattern.split(".")), ())):
            del parent[last]
            yield Problem(path, row.guidance)
    for (key, value), guidance in REMOVED_VALUES.items():
        for parent, last, path in list(_matches(data, tuple(key.split(".")), ())):
            if parent[last] == value:
                del parent[last]
                yield Problem(path, f"'{value}' is {guidance}")


def _take_old_section(data: dict[str, Any]) -> Iterator[Problem]:
    custom, extra, section = OLD_ROLLOUT_SECTION
    extra_section = data[custom].get(extra) if isinstance(data.get(custom), dict) else None
    if not isinstance(extra_section, dict) or section not in extra_section:
        return
    old = extra_section.pop(section)
    if not extra_section:
        del data[custom][extra]
    guidance_of = {row.pattern: row.guidance for row in REMOVED_KEYS}
    if not isinstance(old, dict) or not old:
        yield Problem(OLD_ROLLOUT_SECTION, f"moved; write the top-level section {_RM} instead")
        return
    for tail in _leaves(old, ()):
        new = dotted((_RM, *tail))
        yield Problem((*OLD_ROLLOUT_SECTION, *tail), guidance_of.get(new, f"moved; write {new} instead"))


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
