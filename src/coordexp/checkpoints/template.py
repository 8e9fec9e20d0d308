"""The prompt that a checkpoint was trained with, in every configuration that uses the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeVar

from coordexp import distributed
from coordexp.checkpoints.card import read_card
from coordexp.config import RunConfig
from coordexp.config.resolved import EvaluationConfig
from coordexp.config.schema import DEFAULT_PROMPT
from coordexp.errors import ConfigError

logger = logging.getLogger("coordexp")
Config = TypeVar("Config", bound=RunConfig | EvaluationConfig)

_BUILT_IN = {"template.prompt": DEFAULT_PROMPT}  # null everywhere gives these


def with_own_template(config: Config, checkpoint: str | Path | None = None) -> Config:
    """``config`` with the prompt, system message, order of fields and order of objects that ``checkpoint`` (None:
    ``model.model``) was trained with, wherever ``config`` leaves them open. As it is if no run of CoordExp wrote the
    checkpoint, or with ``template.allow_prompt_change``.

    Raises:
        ConfigError: ``config`` names others, with which the checkpoint would answer badly.
    """
    checkpoint = Path(checkpoint or config.model.model)
    trained = None if config.template.allow_prompt_change else read_card(checkpoint).training
    if trained is None:
        return config
    custom, template = config.custom, config.template
    given_order = custom.object_field_order if "object_field_order" in custom.model_fields_set else None
    taken: dict[str, dict[str, Any]] = {"template": {}, "custom": {}}
    problems = []
    for section, name, given in (
        ("template", "prompt", template.prompt),
        ("template", "system", template.system),
        ("custom", "object_field_order", given_order),
    ):
        key, own = f"{section}.{name}", getattr(trained, name)
        if given is None:
            taken[section][name] = own
            if own not in (None, _BUILT_IN.get(key)) and own != getattr(getattr(config, section), name):
                _note(key, own, checkpoint)
        elif given != own:
            problems.append(f"{key}: {given!r}, but {checkpoint} was trained with {own!r}")
    if "object_ordering" not in custom.model_fields_set:  # naming another one is a choice that training can follow
        taken["custom"]["object_ordering"] = trained.object_ordering
        if trained.object_ordering != custom.object_ordering:
            _note("custom.object_ordering", trained.object_ordering, checkpoint)
    if problems:
        raise ConfigError(
            "\n".join(problems)
            + "\nWrite null or remove the key to take the checkpoint's own, or template.allow_prompt_change: true to "
            "use another one on purpose"
        )
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in taken.items()}
    )


def _note(key: str, own: Any, checkpoint: Path) -> None:
    if distributed.is_main():
        logger.warning("%s: %r, with which %s was trained; the configuration names none", key, own, checkpoint)
