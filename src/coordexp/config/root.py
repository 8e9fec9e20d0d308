"""The whole configuration, and the rules that hold between its sections."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from coordexp.config.data import CustomConfig, DataConfig
from coordexp.config.model import ModelConfig, TemplateConfig
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.config.strict import Problem, StrictModel, dotted, parse_dotted
from coordexp.config.training import TrainingConfig
from coordexp.errors import ConfigError


class RunConfig(StrictModel):
    """One run, fully determined. Sections are handed to the parts as values, never as this tree."""

    model: ModelConfig = Field(description="what is trained")
    template: TemplateConfig = Field(default=TemplateConfig(), description="the text around the image")
    data: DataConfig = Field(default=DataConfig(), description="the loader of samples")
    custom: CustomConfig = Field(description="the training variant and its datasets")
    training: TrainingConfig = Field(description="the run of the optimizer")
    global_max_length: int = Field(
        gt=0, examples=[2048], description="capacity of a packed row, and the longest sample, in tokens"
    )
    rollout_matching: RolloutMatchingConfig | None = Field(
        default=None, description="rollouts, matching and objective of stage 2; evaluation of stage 1 decodes by it too"
    )

    @model_validator(mode="after")
    def _sections_agree(self, info: ValidationInfo) -> RunConfig:
        # A loader passes a list to gather findings in; without one, this model refuses on its own.
        gathered: list[Problem] | None = (info.context or {}).get("problems")
        problems = list(cross_checks(self))
        if gathered is not None:
            gathered += problems
        elif problems:
            raise ConfigError("\n".join(f"{dotted(p.path)}: {p.message}" for p in problems))
        return self


def _problem(path: str, message: str, *reads: str) -> Problem:
    return Problem(parse_dotted(path), message, tuple(parse_dotted(read) for read in reads))


def cross_checks(config: RunConfig) -> Iterator[Problem]:
    """Rules between keys that need nothing but the configuration."""
    yield from _variant_checks(config)
    yield from _training_checks(config.training)
    if config.rollout_matching is not None:
        yield from _rollout_checks(config, config.rollout_matching)


def _variant_checks(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout_matching
    has_pipeline = rollout is not None and rollout.pipeline is not None
    if config.custom.trainer_variant is None:
        if rollout is not None and rollout.monitor_dump.enabled:
            yield _problem(
                "rollout_matching.monitor_dump.enabled",
                "only stage 2 makes rollouts to record; set custom.trainer_variant: stage2_rollout_aligned, or false",
                "custom.trainer_variant",
            )
        if has_pipeline:
            yield _problem(
                "rollout_matching.pipeline",
                "only stage 2 has a pipeline; set custom.trainer_variant: stage2_rollout_aligned, or remove it",
                "custom.trainer_variant",
            )
        return
    if not has_pipeline:
        yield _problem(
            "rollout_matching.pipeline",
            f"missing; rollout_matching.pipeline is required by custom.trainer_variant: "
            f"{config.custom.trainer_variant} and has no default. List its modules under objective and diagnostics",
            "custom.trainer_variant",
        )
    if config.custom.coord_soft_ce_w1 is not None:
        yield _problem(
            "custom.coord_soft_ce_w1",
            "belongs to stage 1; stage 2 declares its coordinate losses in rollout_matching.pipeline (coord_reg). "
            "Remove this section",
            "custom.trainer_variant",
        )


def _training_checks(training: TrainingConfig) -> Iterator[Problem]:
    if training.packing and not training.packing_drop_last:
        yield _problem(
            "training.packing_drop_last",
            "must be true with training.packing: segments left over at the end stay in the buffer, no step is added "
            "for them",
            "training.packing",
        )
    if training.packing and importlib.util.find_spec("binpacking") is None:
        yield _problem(
            "training.packing", "needs the package binpacking; pip install binpacking, or set training.packing: false"
        )
    if training.bf16 and training.fp16:
        yield _problem("training.fp16", "bf16 and fp16 exclude each other; set one of them to false", "training.bf16")
    if training.effective_batch_size is not None:
        if training.gradient_accumulation_steps is not None:
            yield _problem(
                "training.gradient_accumulation_steps",
                "follows from effective_batch_size; give one of the two",
                "training.effective_batch_size",
            )
        if training.effective_batch_size % training.per_device_train_batch_size:
            yield _problem(
                "training.effective_batch_size",
                f"must be a multiple of per_device_train_batch_size ({training.per_device_train_batch_size})",
                "training.per_device_train_batch_size",
            )


def _rollout_checks(config: RunConfig, rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    section = "rollout_matching"
    if rollout.decoding.top_k == 0:
        yield _problem(f"{section}.decoding.top_k", "0 keeps no token; write -1 to keep all, or a number from 1 on")
    if rollout.decode_mode == "greedy" and rollout.num_beams > 1:
        yield _problem(
            f"{section}.num_beams", "needs decode_mode: beam; greedy decoding has one beam", f"{section}.decode_mode"
        )
    if rollout.decode_mode == "beam":
        if rollout.num_beams < 2:
            yield _problem(f"{section}.num_beams", "decode_mode: beam needs at least 2", f"{section}.decode_mode")
        if rollout.decoding.temperature > 0:
            yield _problem(
                f"{section}.decoding.temperature",
                "decode_mode: beam does not sample; set the temperature to 0",
                f"{section}.decode_mode",
            )
        if rollout.rollout_backend == "vllm":
            yield _problem(
                f"{section}.decode_mode",
                "beam search needs rollout_backend: hf; with vllm write decode_mode: greedy",
                f"{section}.rollout_backend",
            )
    if rollout.max_new_tokens >= config.global_max_length:
        yield _problem(
            f"{section}.max_new_tokens",
            f"{rollout.max_new_tokens} leaves no room for the prompt in global_max_length "
            f"({config.global_max_length}); lower it, or raise global_max_length",
            "global_max_length",
        )
    if rollout.rollout_backend == "vllm":
        yield from _vllm_checks(rollout)


def _vllm_checks(rollout: RolloutMatchingConfig) -> Iterator[Problem]:
    section = "rollout_matching.vllm"
    if rollout.vllm.mode == "server" and rollout.vllm.server is None:
        yield _problem(
            f"{section}.server",
            "missing; mode: server needs server.servers[] with base_url and group_port of each. Without servers write "
            "vllm.mode: colocate or rollout_backend: hf",
            f"{section}.mode",
        )
    if rollout.vllm.sync.mode == "adapter" and not rollout.vllm.enable_lora:
        yield _problem(
            f"{section}.sync.mode",
            "adapter needs vllm.enable_lora: true; otherwise write full",
            f"{section}.enable_lora",
        )


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Rules that depend on the number of learner processes; call it once that number is known.

    Raises:
        ConfigError: with all of them, each with its dotted path.
    """
    problems: list[Problem] = []
    training, rollout = config.training, config.rollout_matching
    samples = training.per_device_train_batch_size * world_size
    if training.effective_batch_size is not None and training.effective_batch_size % samples:
        problems.append(
            _problem(
                "training.effective_batch_size",
                f"{training.effective_batch_size} is no multiple of per_device_train_batch_size x processes "
                f"= {training.per_device_train_batch_size} x {world_size}",
            )
        )
    if (
        rollout is not None
        and (rollout.rollout_backend, rollout.vllm.mode) == ("vllm", "server")
        and world_size > 1
        and rollout.vllm.sync.resolved(rollout.vllm.enable_lora) != "full"
    ):
        problems.append(
            _problem(
                "rollout_matching.vllm.sync.mode",
                f"'{rollout.vllm.sync.mode}' pushes adapters, which works from one learner process only, not from "
                f"{world_size}; write sync.mode: full",
            )
        )
    if problems:
        raise ConfigError("\n".join(f"{dotted(p.path)}: {p.message}" for p in problems))


def section_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with an empty mapping for each required section that is absent, so that the keys missing from it are
    reported by their own names."""
    required = [
        name
        for name, field in RunConfig.model_fields.items()
        if field.is_required() and isinstance(field.annotation, type) and issubclass(field.annotation, StrictModel)
    ]
    return {**data, **{name: {} for name in required if name not in data}}
