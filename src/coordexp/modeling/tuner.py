"""Which weights are trained: whole parts of the model, or LoRA/DoRA adapters beside them and the coordinate rows.

A frozen part gets no adapter, whichever modules are named. Adapters and coordinate rows train in float32, whatever
the model's own number type is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coordexp.checkpoints.folder import part_of
from coordexp.config.data import TunerConfig
from coordexp.errors import ConfigError
from coordexp.modeling.coord_offset import add_coord_offset
from coordexp.modeling.weights import ADAPTER

ALL_LINEAR = "all-linear"
_TABLES = ("lm_head", "embed_tokens")


def tune(model: Any, config: TunerConfig, coord_ids: Sequence[int]) -> None:
    """Freeze what ``config`` freezes and attach what it trains.

    Raises:
        ConfigError: nothing is left to train, or names that match no module that can be adapted.
    """
    freeze = {"vit": config.freeze_vit, "aligner": config.freeze_aligner, "llm": config.freeze_llm}
    frozen = {part for part, frozen in freeze.items() if frozen}
    if config.train_type == "full":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) not in frozen)
    else:
        model.requires_grad_(False)
        _add_adapters(model, config, frozen)
        if config.train_coord_rows:
            add_coord_offset(model, coord_ids)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "tuner: freeze_vit, freeze_aligner and freeze_llm leave nothing to train; set at least one of them to false"
        )


def _add_adapters(model: Any, config: TunerConfig, frozen: set[str]) -> None:
    from peft import LoraConfig

    targets = _targets(model, config.target_modules, frozen)
    saved = _matching(model, config.modules_to_save, "tuner.modules_to_save", frozen)
    _refuse_tables(saved, "tuner.modules_to_save")
    if not targets and not saved:
        if config.train_coord_rows:
            return  # every part is frozen: the coordinate rows alone are trained
        raise ConfigError("tuner.target_modules: every part is frozen, so no module can get adapters; unfreeze one")
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]  # peft only divides by the rank
        lora_dropout=config.lora_dropout,
        use_dora=config.use_dora,
        target_modules=targets,
        modules_to_save=saved or None,
    )
    model.add_adapter(lora, ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _targets(model: Any, names: Sequence[str], frozen: set[str]) -> list[str]:
    if ALL_LINEAR in names:
        if len(names) > 1:
            raise ConfigError(f"tuner.target_modules: {ALL_LINEAR} stands alone; drop the other names, or drop it")
        linear = (name for name, module in model.named_modules() if type(module) is torch.nn.Linear)
        return [name for name in linear if part_of(name) not in frozen and name.split(".")[-1] not in _TABLES]
    targets = _matching(model, names, "tuner.target_modules", frozen)
    _refuse_tables(targets, "tuner.target_modules")
    for name in targets:
        module = model.get_submodule(name)
        if type(module) is not torch.nn.Linear:
            raise ConfigError(
                f"tuner.target_modules: {name} is a {type(module).__name__}; adapters go on linear layers. Name those, "
                f"or write {ALL_LINEAR}"
            )
    return targets


def _matching(model: Any, ends: Sequence[str], key: str, frozen: set[str]) -> list[str]:
    """Modules whose dotted names end like one of ``ends``, outside frozen parts."""
    names = [name for name, _ in model.named_modules() if name]
    targets: list[str] = []
    for end in ends:
        matching = [name for name in names if name == end or name.endswith(f".{end}")]
        if not matching:
            raise ConfigError(f"{key}: the model has no module whose name ends in {end!r}; see `coordexp model info`")
        targets += [name for name in matching if part_of(name) not in frozen and name not in targets]
    return targets


def _refuse_tables(names: Sequence[str], key: str) -> None:
    for name in names:
        if name.split(".")[-1] in _TABLES:
            raise ConfigError(
                f"{key}: {name} is the embedding or the head; tuner.train_coord_rows trains its 1000 coordinate rows, "
                "and tuner.train_type: full the whole table"
            )
