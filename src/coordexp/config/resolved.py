"""The keys that evaluation and inference read, and a rollout section without nulls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from coordexp.config.base import Count, FilePath, StrictModel, default_of
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.schema import (
    CustomConfig,
    FieldOrder,
    ModelConfig,
    ObjectOrdering,
    RunConfig,
    TemplateConfig,
    TrainingConfig,
    TunerConfig,
)


class EvaluatedData(StrictModel):
    """The keys of ``custom`` that an evaluation reads."""

    val_jsonl: FilePath
    val_sample_limit: Count | None = None
    object_field_order: FieldOrder = default_of(CustomConfig, "object_field_order")
    object_ordering: ObjectOrdering = default_of(CustomConfig, "object_ordering")


class EvaluatingProcess(StrictModel):
    """The keys of ``training`` that an evaluation reads."""

    output_dir: FilePath
    seed: Annotated[int, Field(ge=0, lt=2**31)] = default_of(TrainingConfig, "seed")
    use_cpu: bool = False
    ddp_timeout: Count = default_of(TrainingConfig, "ddp_timeout")


class EvaluationConfig(StrictModel):
    """An evaluation without a run: the sections of :class:`RunConfig` that it reads, under the same keys."""

    model: ModelConfig
    template: TemplateConfig
    custom: EvaluatedData
    tuner: TunerConfig = TunerConfig()
    training: EvaluatingProcess
    global_max_length: Count
    rollout_matching: RolloutMatchingConfig


def in_place_of_validation(data: str | Path | None) -> dict[str, Any]:
    """The overrides of a run's configuration that evaluate all of ``data``: the run's limit is of its own validation
    data. None for ``data`` changes nothing."""
    return {} if data is None else {"custom.val_jsonl": str(data), "custom.val_sample_limit": None}


def resolved_rollout(config: RunConfig | EvaluationConfig) -> RolloutMatchingConfig:
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
    seed: Annotated[int, Field(ge=0, lt=2**31)]

    @classmethod
    def of_run(cls, run: RunConfig | EvaluationConfig) -> AnswerConfig:
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
