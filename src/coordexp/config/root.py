"""The whole configuration of a run, and what it says of rollouts with nothing left open, as trainers, servers and
launcher are given it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import model_validator

from coordexp.config.checks import cross_checks
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.sections import Sections
from coordexp.config.strict import dotted
from coordexp.errors import ConfigError


class RunConfig(Sections):
    """One run, fully determined. Sections are handed to the parts as values, never as this tree."""

    # The loader has looked for broken rules before it comes here; whoever builds a RunConfig otherwise meets them here.
    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        problems = list(cross_checks(self))
        if problems:
            raise ConfigError("\n".join(f"{dotted(p.path)}: {p.message}" for p in problems))
        return self


def resolved_rollout(config: RunConfig) -> RolloutMatchingConfig:
    """The section in which each null that stands for another key holds that key's value, and ``auto`` its meaning.

    A configuration without the section decodes with transformers, by the section's defaults: stage 1 evaluates so.
    """
    rollout = config.rollout_matching
    if rollout is None:
        rollout = RolloutMatchingConfig(rollout_backend="hf")
    vllm = rollout.vllm
    engine = {
        "max_model_len": vllm.max_model_len or config.global_max_length,
        "dtype": vllm.dtype or config.model.dtype,
        "max_lora_rank": vllm.adapter_rank(config.tuner.lora_rank),
        "sync": vllm.sync.model_copy(update={"mode": vllm.sync.resolved(vllm.enable_lora)}),
    }
    return rollout.model_copy(update={"vllm": vllm.model_copy(update=engine)})


def rollout_contract(config: RunConfig) -> Mapping[str, Any]:
    """``rollout_matching_cfg``: :func:`resolved_rollout` as a read-only mapping of plain values, with what rollouts
    need of other sections beside it: packing, and the order of objects and fields."""
    training, custom = config.training, config.custom
    return _frozen(
        {
            **resolved_rollout(config).model_dump(mode="json"),
            "packing_enabled": training.packing,
            "packing_length": config.global_max_length,
            "packing_buffer": training.packing_buffer,
            "packing_min_fill_ratio": training.packing_min_fill_ratio,
            "packing_drop_last": training.packing_drop_last,
            "object_ordering": custom.object_ordering,
            "object_field_order": custom.object_field_order,
        }
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value
