"""Everything besides weights, tokenizer and processor that a checkpoint's answers depend on: its card, :data:`CARD`.

Training, ``model merge``, ``model export``, ``model expand-vocab`` and ``model tiny`` write it whole, next to the
weights; everything that answers with a checkpoint reads it here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from coordexp import distributed
from coordexp.config import RunConfig, resolved_rollout
from coordexp.config.resolved import EvaluationConfig
from coordexp.config.schema import DEFAULT_PROMPT
from coordexp.coords import FieldOrder
from coordexp.data.files import write_atomically
from coordexp.data.preparation import NO_RESIZE, ImagePreparation
from coordexp.errors import CheckpointError, ConfigError, DataError
from coordexp.hub import name_of
from coordexp.records import BIN_RULE, check_bin_rule, from_json, to_json

logger = logging.getLogger("coordexp")
Config = TypeVar("Config", bound=RunConfig | EvaluationConfig)

CARD = "coordexp.json"
_REPLACED = ("image_preparation.json", "classes.json", "calibration.json", "resolved_config.yaml")
_LEAST = 1e-6  # logit(0) and logit(1) are infinite


@dataclass(frozen=True, slots=True)
class Calibration:
    """How raw confidences become probabilities, by Platt's method (1999): p = sigmoid(slope · logit(raw) + intercept).
    ``coordexp evaluate --calibrate`` fits it (:func:`coordexp.evaluation.confidence.fit`).

    ``objects``: number of predictions it was fitted on; ``right``: of correct ones; ``data``: their dataset.
    """

    slope: float = 1.0
    intercept: float = 0.0
    objects: int = 0
    right: int = 0
    data: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and math.isfinite(self.intercept) and self.slope > 0):
            raise ValueError("a calibration's slope must be above 0, and both of its numbers finite")

    def __call__(self, raw: float) -> float:
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, self.slope * logit(raw) + self.intercept))))


def check_calibrates(answers: int, tiles: object, constant_score: float | None) -> None:
    """Raise ConfigError unless an evaluation has the confidences to which a calibration is fitted."""
    if answers > 1 or tiles is not None or constant_score is not None:
        raise ConfigError(
            "calibrate: fits the confidences of single answers to whole images; leave out tiles, answers and "
            "--constant-score"
        )


def logit(probability: float) -> float:
    clamped = min(1 - _LEAST, max(_LEAST, probability))
    return math.log(clamped / (1 - clamped))


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The settings of the run that trained the checkpoint, by which it answers. ``dtype``: number type of the
    weights in that run; ``val_jsonl``: its validation data."""

    prompt: str
    system: str | None
    object_field_order: FieldOrder
    object_ordering: str
    train_type: Literal["full", "lora"]
    dtype: str
    global_max_length: int
    max_new_tokens: int
    repeat_terminate: Mapping[str, bool | int | None]
    val_jsonl: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The contents of :data:`CARD`. ``training``: None if no run of CoordExp trained the checkpoint; ``preparation``:
    how the images of its training data were resized; ``classes``: the names in that data, whose positions are class
    ids, empty if unknown; ``calibration``: of confidences, None without one; ``base``: fingerprint of the model that
    its adapters belong to, None for a plain model and in cards of earlier versions; ``source``: the model of the hub
    of its weights, ``OWNER/NAME@COMMIT``, None if unknown."""

    schema_version: Literal[1]
    training: Training | None
    preparation: ImagePreparation
    classes: tuple[str, ...]
    calibration: Calibration | None
    base: str | None = None
    source: str | None = None


UNTRAINED = Card(schema_version=1, training=None, preparation=NO_RESIZE, classes=(), calibration=None)


def card_of_run(config: RunConfig, preparation: ImagePreparation, classes: tuple[str, ...]) -> Card:
    """The card of a checkpoint that the run of ``config`` trains on such data."""
    rollout = resolved_rollout(config)
    training = Training(
        prompt=DEFAULT_PROMPT if config.template.prompt is None else config.template.prompt,
        system=config.template.system,
        object_field_order=config.custom.object_field_order,
        object_ordering=config.custom.object_ordering,
        train_type=config.tuner.train_type,
        dtype=config.model.dtype,
        global_max_length=config.global_max_length,
        max_new_tokens=rollout.max_new_tokens,
        repeat_terminate=rollout.repeat_terminate.model_dump(mode="json"),
        val_jsonl=None if config.custom.val_jsonl is None else str(config.custom.val_jsonl),
    )
    source = read_card(config.model.model).source
    return replace(UNTRAINED, training=training, preparation=preparation, classes=classes, source=source)


def read_card(folder: str | Path) -> Card:
    """The card of the checkpoint in ``folder``; :data:`UNTRAINED` if it has none, as other programs write checkpoints.
    The ``source`` of a model in the hub's cache is that model. Raises CheckpointError for a card that cannot be read,
    or the files of an earlier version in its place."""
    path, source = Path(folder) / CARD, name_of(folder)
    try:
        written = path.read_bytes()
        card = from_json(Card, written, "a checkpoint's card")
    except FileNotFoundError:
        old = [name for name in _REPLACED if path.with_name(name).is_file()]
        if old and any(path.parent.glob("*.safetensors")):  # not the folder of a run that has saved no model yet
            raise CheckpointError(
                f"{folder}: has no {CARD}, but {', '.join(old)} as earlier versions wrote them; train it again, or "
                f"write {CARD} from them, as docs/prediction.md shows"
            ) from None
        return replace(UNTRAINED, source=source)
    except (OSError, DataError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); restore the checkpoint's files") from error
    try:
        check_bin_rule(msgspec.json.decode(written)["preparation"].get(BIN_RULE))
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return card if source is None else replace(card, source=source)


def write_card(card: Card, folder: str | Path) -> Path:
    """Write ``card`` into ``folder``, in place of an earlier one."""
    path = Path(folder) / CARD
    write_atomically(path, msgspec.json.format(to_json(card), indent=2).decode("utf-8") + "\n")
    return path


def training_of(folder: Path) -> Training | None:
    """The settings by which the checkpoint in ``folder`` answers; None, with a warning, if no run trained it."""
    training = read_card(folder).training
    if training is None:
        why = "its card names none" if (folder / CARD).is_file() else f"it has no {CARD}"
        logger.warning(
            f"{folder}: no run of CoordExp trained this checkpoint ({why}); it answers the default prompt in float32, "
            "with images as they are and without class ids"
        )
    return training


def settings_for_answers(training: Training | None) -> dict[str, Any]:
    """``template`` of a configuration that answers as in training."""
    return {} if training is None else {"prompt": training.prompt, "system": training.system}


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
    taken: dict[str, dict[str, Any]] = {"template": {}, "custom": {}}
    problems = []
    for key in ("template.prompt", "template.system", "custom.object_field_order", "custom.object_ordering"):
        section, name = key.split(".")
        values: Any = getattr(config, section)
        own, given = getattr(trained, name), getattr(values, name)
        if given is None or name not in values.model_fields_set:
            taken[section][name] = own
            # null everywhere gives the default prompt
            if own not in (None, DEFAULT_PROMPT, given):
                distributed.warn(f"{key}: {own!r}, with which {checkpoint} was trained; the configuration names none")
        elif given != own and name != "object_ordering":  # training can follow another order of objects
            problems.append(f"{key}: {given!r}, but {checkpoint} was trained with {own!r}")
    if problems:
        raise ConfigError(
            "\n".join(problems)
            + "\nWrite null or remove the key to take the checkpoint's own, or template.allow_prompt_change: true to "
            "use another one on purpose"
        )
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in taken.items()}
    )
