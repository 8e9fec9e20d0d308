"""A key that is accepted is read by the program, and its default is defined once, in config."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from coordexp.cli import convert, data, model, view
from coordexp.config import RunConfig
from coordexp.config.base import default_of
from coordexp.config.rollout import RolloutMatchingConfig, VLLMConfig
from coordexp.config.schema import OWN_KEYS, CustomConfig, TrainingConfig
from coordexp.coords import serialize_append, serialize_objects
from coordexp.data import convert as converters
from coordexp.geometry import barycentric_targets, mask_iou
from coordexp.inference.completion import CompletionRules
from coordexp.matching import MatchingConfig
from coordexp.modeling.load import export_checkpoint
from coordexp.modeling.tiny import build_tiny_checkpoint
from coordexp.targets import TransportConfig
from coordexp.viewer.collect import collect
from coordexp.viewer.render import render
from coordexp.viewer.serve import make_server

SOURCE = Path(__file__).parents[3] / "src"


def test_every_key_is_read_by_the_program() -> None:
    read = {
        node.attr
        for path in SOURCE.rglob("*.py")
        if SOURCE / "coordexp" / "config" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    # Sections that a library is handed whole: transformers (but for the keys that it does not know), vLLM.
    handed_over = {("TrainingConfig", key) for key in TrainingConfig.model_fields.keys() - OWN_KEYS}
    handed_over |= {("VLLMConfig", key) for key in VLLMConfig.model_fields}
    handed_over |= {("TrainingConfig", "effective_batch_size")}  # decides gradient_accumulation_steps while loading
    keys = set(leaves(RunConfig))
    assert len(keys) > 150
    unread = {(section, key) for section, key in keys if key not in read} - handed_over
    assert sorted(".".join(pair) for pair in unread) == []


def test_every_key_says_what_it_means() -> None:
    """By the string below it, in the reference and in editors."""
    silent = {f"{section.__name__}.{key}" for section, key, field in fields_below(RunConfig) if not field.description}
    assert sorted(silent) == []


def fields_below(section: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
    for key, field in section.model_fields.items():
        yield section, key, field
        for inner in sections_of(field.annotation):
            yield from fields_below(inner)


def leaves(section: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """(section, key) of every key that holds a value rather than a section, and that can hold more than one."""
    for key, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        for one in inner:
            yield from leaves(one)
        # ``Literal[True]``: the key documents what the program does, and there is nothing to choose.
        if not inner and not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1):
            yield section.__name__, key


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


# --- defaults of functions and commands that import no configuration ---


def test_public_functions_have_the_defaults_of_the_keys() -> None:
    keys = {
        (serialize_append, "field_order"): default_of(CustomConfig, "object_field_order"),
        (serialize_objects, "field_order"): default_of(CustomConfig, "object_field_order"),
        (mask_iou, "resolution"): default_of(RolloutMatchingConfig, "maskiou_resolution"),
        **{(barycentric_targets, key): default_of(RolloutMatchingConfig, f"ot_{key}") for key in
           ("cost", "epsilon", "iters")},
    }  # fmt: skip
    found = {(call, name): inspect.signature(call).parameters[name].default for call, name in keys}
    assert found == keys


def test_records_built_without_yaml_have_the_same_defaults() -> None:
    section = RolloutMatchingConfig()
    fields = MatchingConfig.__dataclass_fields__
    assert {key: getattr(section, key) for key in fields} == {key: getattr(MatchingConfig(), key) for key in fields}
    assert TransportConfig() == TransportConfig(section.ot_cost, section.ot_epsilon, section.ot_iters)


COMMANDS: list[tuple[Callable[..., object], Callable[..., object]]] = [
    (convert.voc_command, converters.convert_voc),
    (convert.instances_command, converters.convert_coco),
    (convert.yolo_command, converters.convert_yolo),
    (convert.labelme_command, converters.convert_labelme),
    (convert.panoptic_command, converters.convert_panoptic),
    (convert.csv_command, converters.convert_csv),
    (data.complete_command, CompletionRules),
    (model.tiny_command, build_tiny_checkpoint),
    (model.export_command, export_checkpoint),
    (view.view, collect),
    (view.view, render),
    (view.view, make_server),
]


def test_command_options_have_the_functions_defaults() -> None:
    others = {}
    for command, called in COMMANDS:
        options, parameters = inspect.signature(command).parameters, inspect.signature(called).parameters
        shared = [name for name in options.keys() & parameters.keys() if has_default(options[name])]
        assert shared, (command, called)
        others |= {
            (command.__name__, called.__name__, name): (options[name].default, parameters[name].default)
            for name in shared
            if has_default(parameters[name]) and options[name].default != parameters[name].default
        }
    assert others == {}


def has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty
