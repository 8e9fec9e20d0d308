"""Parameter groups: each part of the model with its own learning rate, and weight decay where it belongs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.optimization import GreedyLR
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_pt_utils import get_parameter_names

from coordexp import distributed
from coordexp.checkpoints.folder import Part, part_of
from coordexp.errors import ConfigError
from coordexp.training.master_weights import MasterWeights, refuse_master_weights, with_master_weights

if TYPE_CHECKING:
    from coordexp.config.training import TrainingConfig

_ORDER: tuple[Part, ...] = ("llm", "aligner", "vit", "coord")  # the first group's rate is the one that is logged


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Peak learning rates; None takes ``base``. ``coord``: the coordinate rows' offsets of LoRA runs."""

    base: float
    vit: float | None = None
    aligner: float | None = None
    coord: float | None = None

    def rate_of(self, part: Part) -> float:
        """The rate of one part of the model: its own, or the base rate."""
        own = None if part == "llm" else getattr(self, part)
        return self.base if own is None else own

    @property
    def differ(self) -> bool:
        """Whether any part learns at another rate than the rest."""
        return len({self.rate_of(part) for part in _ORDER}) > 1


def learning_rates(training: TrainingConfig) -> LearningRates:
    """The peaks that the ``training`` section names."""
    return LearningRates(training.learning_rate, training.vit_lr, training.aligner_lr, training.coord_lr)


def parameter_groups(
    model: torch.nn.Module, rates: LearningRates, weight_decay: float, decaying: Collection[str]
) -> list[dict[str, Any]]:
    """Trainable parameters by part, each part's decaying ones before the others; empty groups are left out.

    ``decaying`` are the names that transformers decays: all but biases and norms. DoRA's magnitudes are scales as norms
    are, and coordinate offsets are rows of a table whose decay would pull trained coordinates back to the untrained
    ones: neither decays.
    """
    groups: dict[tuple[Part, bool], list[torch.nn.Parameter]] = {
        (part, decays): [] for part in _ORDER for decays in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            part = part_of(name)
            decays = name in decaying and part != "coord" and "lora_magnitude_vector" not in name
            groups[part, decays].append(parameter)
    return [
        {
            "name": f"{part}" if decays else f"{part}, no decay",
            "params": parameters,
            "lr": rates.rate_of(part),
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (part, decays), parameters in groups.items()
        if parameters
    ]


def grouped(
    optimizer: tuple[Any, dict[str, Any]], groups: list[dict[str, Any]], rates: LearningRates
) -> tuple[Any, dict[str, Any]]:
    """transformers' ``(class, arguments)`` of an optimizer, with ``groups`` as its parameters.

    Raises:
        ConfigError: an optimizer that makes its own groups cannot take several learning rates.
    """
    optimizer_class, arguments = optimizer
    if {"params", "model", "optimizer_dict"} & arguments.keys() or not isinstance(optimizer_class, type):
        if rates.differ:
            raise ConfigError(
                "training.optim: this optimizer makes its own parameter groups and takes one learning rate; remove "
                "training.vit_lr, aligner_lr and coord_lr, or choose another optimizer"
            )
        return optimizer
    return optimizer_class, {**arguments, "params": groups}


def build_optimizer(
    model: torch.nn.Module, args: TrainingArguments, rates: LearningRates, *, master_weights: bool
) -> torch.optim.Optimizer:
    """The optimizer that ``args.optim`` names, over groups of ours: each part of the model has its own learning rate.

    ``master_weights``: it steps float32 copies of the weights.

    Raises:
        ConfigError: it takes one learning rate only, and several are given.
    """
    # Weight decay as in transformers: all but biases and norms.
    never = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    groups = parameter_groups(model, rates, args.weight_decay, get_parameter_names(model, [torch.nn.LayerNorm], never))
    found = Trainer.get_optimizer_cls_and_kwargs(args, model)  # pyright: ignore[reportArgumentType]
    optimizer_class, arguments = grouped(found, groups, rates)
    arguments = dict(arguments)
    if is_optimizer_factory(optimizer_class):  # makes its own groups of the model's parameters
        optimizer = optimizer_class()(model, **arguments)
    else:
        if master_weights:
            optimizer_class = with_master_weights(optimizer_class)
        # Layer-wise optimizers bring their own groups, under one of three names.
        own = [arguments.pop(name, None) for name in ("params", "model", "optimizer_dict")]
        optimizer = optimizer_class(next((one for one in own if one is not None), groups), **arguments)
    if isinstance(optimizer, MasterWeights):
        if distributed.world_size() == 1:
            optimizer.sum_in_float32()
    else:
        refuse_master_weights(optimizer)
    return optimizer


def build_scheduler(optimizer: Any, args: TrainingArguments, max_steps: int) -> Any:
    """The learning-rate schedule that ``args.lr_scheduler_type`` names, over ``max_steps`` steps."""
    return get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(max_steps),
        num_training_steps=max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # pyright: ignore[reportArgumentType]
    )


def needs_metric(scheduler: Any) -> bool:
    """Whether the schedule steps after evaluations, by their metric, and not after optimizer steps."""
    return isinstance(scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR))
