"""Parameter groups: each part of the model with its own learning rate, and weight decay where it belongs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from coordexp.checkpoints.folder import Part, part_of
from coordexp.errors import ConfigError

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
