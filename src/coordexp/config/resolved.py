"""Configurations that other parts of the program derive from a :class:`RunConfig`: a rollout section without nulls, and
all that inference reads."""

from __future__ import annotations

from typing import Any

from coordexp.config.base import Count, StrictModel
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.schema import ModelConfig, RunConfig, TemplateConfig


def resolved_rollout(config: RunConfig) -> RolloutMatchingConfig:
    """The section without nulls that mean another key's value, and without ``auto``.

    A configuration without the section decodes with transformers by the section's defaults: stage 1 evaluates so.
    """
    rollout = config.rollout_matching or RolloutMatchingConfig(rollout_backend="hf")
    vllm = rollout.vllm
    engine = {
        "max_model_len": vllm.max_model_len or config.global_max_length,
        "dtype": vllm.dtype or config.model.dtype,
        "max_lora_rank": vllm.adapter_rank(config.tuner.lora_rank),
        "sync": vllm.sync.model_copy(update={"mode": vllm.sync.resolved(vllm.enable_lora)}),
    }
    detection = rollout.eval_detection
    if detection.score_mode is None:
        mode = "constant" if rollout.offload.enabled and rollout.is_colocated else "confidence"
        detection = detection.model_copy(update={"score_mode": mode})
    return rollout.model_copy(update={"vllm": vllm.model_copy(update=engine), "eval_detection": detection})


class AnswerConfig(StrictModel):
    """All that inference reads of a configuration; ``rollout_matching`` is resolved."""

    model: ModelConfig
    template: TemplateConfig
    rollout_matching: RolloutMatchingConfig
    global_max_length: Count
    use_cpu: bool
    seed: int

    @classmethod
    def of_run(cls, run: RunConfig) -> AnswerConfig:
        """How a checkpoint answers in the run's evaluation."""
        return cls(
            model=run.model,
            template=run.template,
            rollout_matching=resolved_rollout(run),
            global_max_length=run.global_max_length,
            use_cpu=run.training.use_cpu,
            seed=run.training.seed,
        )


def rollout_contract(config: RunConfig) -> dict[str, Any]:
    """``rollout_matching_cfg`` of the contract: :func:`resolved_rollout` as plain values, with the keys of packing and
    of the order of objects and fields."""
    training, custom = config.training, config.custom
    return {
        **resolved_rollout(config).model_dump(mode="json"),
        "packing_enabled": training.packing,
        "packing_length": config.global_max_length,
        "packing_buffer": training.packing_buffer,
        "packing_min_fill_ratio": training.packing_min_fill_ratio,
        "packing_drop_last": training.packing_drop_last,
        "object_ordering": custom.object_ordering,
        "object_field_order": custom.object_field_order,
    }
