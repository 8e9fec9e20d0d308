"""The sections of a configuration, each valid by itself, and ``debug``, whose keys stand for theirs;
:mod:`coordexp.config.checks` holds the rules between them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from coordexp.config.data import CustomConfig, DataConfig
from coordexp.config.model import ModelConfig, TemplateConfig, TunerConfig
from coordexp.config.rollout import RolloutMatchingConfig, Stage2ABConfig
from coordexp.config.strict import FilePath, StrictModel
from coordexp.config.training import DeepSpeedConfig, FSDPConfig, LaunchConfig, TrainingConfig


class DebugConfig(StrictModel):
    """Replacements for keys of other sections, put in their place when the file is read and ``enabled`` is true."""

    enabled: bool = Field(default=False, description="put the keys below in place of those they stand for")
    output_dir: FilePath | None = Field(default=None, description="stands for training.output_dir; null leaves it")
    train_sample_limit: int | None = Field(
        default=None, ge=1, description="stands for custom.train_sample_limit; null leaves it"
    )
    val_sample_limit: int | None = Field(
        default=None, ge=1, description="stands for custom.val_sample_limit; null leaves it"
    )


DEBUG_STANDS_FOR: dict[str, tuple[str, str]] = {
    "output_dir": ("training", "output_dir"),
    "train_sample_limit": ("custom", "train_sample_limit"),
    "val_sample_limit": ("custom", "val_sample_limit"),
}


class Sections(StrictModel):
    """All keys of a run. Rules between keys of different sections have not been checked: see ``RunConfig``."""

    KEY_GROUPS: ClassVar[dict[str, str]] = {
        "model and data": "model template data custom tuner global_max_length",
        "training": "training deepspeed fsdp debug",
        "stage 2": "rollout_matching stage2_ab launch",
    }

    model: ModelConfig = Field(description="what is trained")
    template: TemplateConfig = Field(default=TemplateConfig(), description="the text around the image")
    data: DataConfig = Field(default=DataConfig(), description="the loader of samples")
    custom: CustomConfig = Field(description="the training variant and its datasets")
    tuner: TunerConfig = Field(default=TunerConfig(), description="which weights are trained, and in what form")
    training: TrainingConfig = Field(description="the run of the optimizer")
    deepspeed: DeepSpeedConfig = Field(default=DeepSpeedConfig(), description="training under DeepSpeed")
    fsdp: FSDPConfig = Field(default=FSDPConfig(), description="fully sharded data parallel training")
    global_max_length: int = Field(
        gt=0, examples=[2048], description="capacity of a packed row, and the longest sample, in tokens"
    )
    rollout_matching: RolloutMatchingConfig | None = Field(
        default=None, description="rollouts, matching and objective of stage 2; evaluation of stage 1 decodes by it too"
    )
    stage2_ab: Stage2ABConfig | None = Field(default=None, description="two-channel training")
    launch: LaunchConfig = Field(default=LaunchConfig(), description="the processes that coordexp launch starts")
    debug: DebugConfig = Field(default=DebugConfig(), description="one switch that makes a run small")


def section_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with an empty mapping for each required section that is absent, so that the keys missing from it are
    reported by their own names."""
    required = [
        name
        for name, field in Sections.model_fields.items()
        if field.is_required() and isinstance(field.annotation, type) and issubclass(field.annotation, StrictModel)
    ]
    return {**data, **{name: {} for name in required if name not in data}}
