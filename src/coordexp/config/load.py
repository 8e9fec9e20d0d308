"""YAML, with what it ``extends``, to a :class:`RunConfig`; and back to YAML."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from coordexp.config.base import KeyPath, Problem, StrictModel, dotted, problems_from, section_of
from coordexp.config.checks import cross_checks
from coordexp.config.removed_keys import take_removed
from coordexp.config.schema import RunConfig
from coordexp.config.source import Document, apply_arguments, dump_yaml, read_document
from coordexp.errors import ConfigError

Section = TypeVar("Section", bound=StrictModel)


def load_config(
    path: str | Path, overrides: Mapping[str, Any] | None = None, arguments: Sequence[str] = ()
) -> RunConfig:
    """Read and validate a run's configuration.

    Args:
        path: a YAML file. ``extends:`` in it names one file or a list of files, relative to it; later files win over
            earlier ones and the file itself over all; mappings merge key by key, everything else (lists too) replaces.
        overrides: dotted key -> value, put on top, e.g. ``{"training.output_dir": "outputs/run"}``.
        arguments: words of a command line, put on top of that, e.g. ``["training.max_steps=3"]``; values are YAML.

    Raises:
        ConfigError: the text has every problem, one a line: dotted path, file and line, what is wrong, what to do.
    """
    document = read_document(path, overrides)
    apply_arguments(document, arguments)
    return validate(document, str(path))


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate a configuration that is a mapping already; raises :class:`ConfigError` as :func:`load_config` does."""
    return validate(Document(copy.deepcopy(dict(data))), source)


def parse_section(section: type[Section], data: Mapping[str, Any], source: str) -> Section:
    """Validate a mapping as ``section`` alone, without rules between keys; raises :class:`ConfigError`."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        raise _error(source, Document(), list(problems_from(error, section))) from None


def resolved_yaml(config: RunConfig) -> str:
    """Every key with its value, as YAML that loads back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def validate(document: Document, source: str) -> RunConfig:
    """The configuration that ``document`` describes; ``source`` names it in errors."""
    problems = [*document.problems, *take_removed(document.data)]
    # An absent section counts as empty, so that the keys missing from it are reported by name.
    data = {
        key: {} for key, field in RunConfig.model_fields.items() if field.is_required() and section_of(field.annotation)
    }
    data |= document.data
    config = None
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        unreadable = {problem.path for problem in document.problems}
        problems += [problem for problem in problems_from(error, RunConfig) if problem.path not in unreadable]
    broken = {path for problem in problems for path in (problem.path, problem.meant) if path is not None}
    if config is None or broken:
        config = _without(broken, RunConfig, data, ())
    problems += cross_checks(config, partial=bool(broken))
    if problems:
        raise _error(source, document, problems)
    return config


def _without(broken: set[KeyPath], section: type[StrictModel], data: dict[str, Any], path: KeyPath) -> Any:
    """``data`` as a section without its broken keys: reading one raises AttributeError."""
    absent, values = set(), {}
    for key, field in section.model_fields.items():
        here = (*path, key)
        inner, value = section_of(field.annotation), data.get(key)
        is_broken = any(other[: len(here)] == here for other in broken)
        if here in broken or (is_broken and not (inner and isinstance(value, dict))):
            absent.add(key)
        elif key in data and inner and isinstance(value, dict):
            values[key] = _without(broken, inner, value, here) if is_broken else inner.model_validate(value)
        elif key in data:
            values[key] = value
    part: Any = section.model_construct(**values)
    for key in absent:
        part.__dict__.pop(key, None)  # model_construct has filled in the default
    return part


def _error(source: str, document: Document, problems: Sequence[Problem]) -> ConfigError:
    lines = []
    for problem in dict.fromkeys(problems):
        where = document.where(problem.path)
        name = dotted(problem.path) or "(the file)"
        lines.append(f"  {name}{f' ({where})' if where else ''}: {problem.message}")
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{source}: {count}\n" + "\n".join(lines))
