"""YAML, with the files that it ``extends``, to a :class:`RunConfig`; and back to YAML, with the source of each value.
Also the differences of two configurations, and a JSON Schema for editors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic import Field, ValidationError, create_model

from coordexp.config.base import KeyPath, Problem, StrictModel, dotted, problems_from, section_of
from coordexp.config.checks import cross_checks
from coordexp.config.environment import LOGGERS, OPTIMIZERS, SCHEDULES
from coordexp.config.removed_keys import take_removed
from coordexp.config.schema import RunConfig
from coordexp.config.source import (
    Document,
    apply_arguments,
    dump_value,
    dump_yaml,
    out_of_range,
    read_document,
)
from coordexp.errors import ConfigError

Section = TypeVar("Section", bound=StrictModel)
DEFAULT = "default"  # the source of a value that no file has
_MOST_SHOWN = 40  # problems of one file
_FRAGMENT = "# Fragment"  # begins a file that others extend, and that is none to start
_SOURCE_COLUMN = 64
_ENVIRONMENT = r"\$\{env:"


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
        ConfigError: the text has every problem, one a line: dotted path, file and line, the problem, the fix.
    """
    return explain_config(path, arguments, overrides).config


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate a configuration that is a mapping already; raises :class:`ConfigError` as :func:`load_config` does."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {data!r} is no mapping of sections, as a YAML file has them")
    return validate(Document(copy.deepcopy(dict(data))), source)


def parse_section(section: type[Section], document: Document, source: str) -> Section:
    """Validate a document as ``section`` alone, with those rules between keys that read nothing else; raises
    :class:`ConfigError`, also for problems that the document has already."""
    problems = [*document.problems, *out_of_range(document.data)]
    unreadable = {problem.path for problem in problems}
    try:
        parsed: Any = section.model_validate(document.data)
    except ValidationError as error:
        problems += [problem for problem in problems_from(error, section) if problem.path not in unreadable]
    else:
        problems = problems or list(cross_checks(parsed, partial=True))
        if not problems:
            return parsed
    raise _error(source, document, problems) from None


def resolved_yaml(config: StrictModel) -> str:
    """Every key with its value, as YAML that loads back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def validate(document: Document, source: str) -> RunConfig:
    """The configuration that ``document`` describes; ``source`` names it in errors."""
    problems = [*document.problems, *take_removed(document.data), *out_of_range(document.data)]
    unreadable = {problem.path for problem in problems}
    # An absent section counts as empty, so that the keys missing from it are reported by name.
    data = {
        key: {} for key, field in RunConfig.model_fields.items() if field.is_required() and section_of(field.annotation)
    }
    data |= document.data
    config = None
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
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
        elif is_broken and inner and isinstance(value, dict):
            values[key] = _without(broken, inner, value, here)
        elif key in data:
            values[key] = value
    # The others are validated, for rules see values as a valid configuration has them: text is a list of one, say.
    part: Any = _with_optional(section, frozenset(absent)).model_validate(values)
    for key in absent:
        part.__dict__.pop(key)
    return part


@cache
def _with_optional(section: type[StrictModel], keys: frozenset[str]) -> type[StrictModel]:
    if not keys:
        return section
    optional: Any = {key: (Any, Field(None, validate_default=False)) for key in keys}
    return create_model(section.__name__, __base__=section, **optional)


def _error(source: str, document: Document, problems: Sequence[Problem]) -> ConfigError:
    lines = []
    for problem in dict.fromkeys(problems):
        where = document.where(problem.path)
        name = dotted(problem.path) or "(the file)"
        lines.append(f"  {name}{f' ({where})' if where else ''}: {problem.message}")
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    if len(lines) > _MOST_SHOWN:
        lines[_MOST_SHOWN:] = [f"  and {len(lines) - _MOST_SHOWN} more"]
    return ConfigError(f"{source}: {count}\n" + "\n".join(lines))


@dataclass(frozen=True, slots=True)
class Explained:
    """A valid configuration and the sources of its values."""

    config: RunConfig
    document: Document

    def source(self, path: KeyPath) -> str:
        """``file:line`` of the value at ``path``, or "default". An item of a list has the place of its list."""
        if path in self.document.origin:
            return self.document.origin[path]
        inside_list = any(isinstance(part, int) for part in path)
        return self.document.where(path) if inside_list else DEFAULT

    def values(self) -> dict[str, tuple[str, str]]:
        """Dotted path → (value as YAML, source), for every leaf."""
        tree = self.config.model_dump(mode="json")
        return {dotted(path): (dump_value(value), self.source(path)) for path, value in _leaves(tree, ())}


Side = tuple[str, str] | None  # (value as YAML, source); None where a configuration has no such leaf


def explain_config(
    path: str | Path, arguments: Sequence[str] = (), overrides: Mapping[str, Any] | None = None
) -> Explained:
    """Load as :func:`load_config` does, and keep the sources."""
    document = read_document(path, overrides)
    with Path(path).open(encoding="utf-8") as file:
        if file.readline().startswith(_FRAGMENT):
            raise ConfigError(f"{path}: is a fragment, not a configuration of its own; start a file that extends it")
    apply_arguments(document, arguments)
    return Explained(validate(document, str(path)), document)


def annotated_yaml(explained: Explained, with_defaults: bool = True) -> Iterator[tuple[str, str]]:
    """(a line of YAML, a trailing comment with its source) for the whole tree, with the comments in one column; valid
    YAML when joined. Lines without a value of their own have no comment."""
    for line, source in _mapping_lines(explained, explained.config.model_dump(mode="json"), (), "", with_defaults):
        yield line, f"{' ' * max(2, _SOURCE_COLUMN - len(line))}# {source}" if source else ""


def differences(left: Explained, right: Explained) -> Iterator[tuple[str, Side, Side]]:
    """(dotted path, left, right) of every leaf with different values, in the order of the schema."""
    a, b = left.values(), right.values()
    for path in dict.fromkeys([*a, *b]):
        if (a.get(path) or ("",))[0] != (b.get(path) or ("",))[0]:
            yield path, a.get(path), b.get(path)


def _mapping_lines(
    explained: Explained, data: Mapping[str, Any], path: KeyPath, indent: str, with_defaults: bool
) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            inner = list(_mapping_lines(explained, value, here, indent + "  ", with_defaults))
            if inner:
                yield f"{indent}{_key(key)}:", ""
                yield from inner
        elif _is_entries(value):
            yield f"{indent}{_key(key)}:", ""
            for index, item in enumerate(value):
                inner = list(_mapping_lines(explained, item, (*here, index), indent + "    ", True))
                first, source = inner[0]
                yield f"{indent}  - {first[len(indent) + 4 :]}", source
                yield from inner[1:]
        elif with_defaults or explained.source(here) != DEFAULT:
            yield f"{indent}{_key(key)}: {dump_value(value)}", explained.source(here)


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif _is_entries(value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _is_entries(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and item for item in value)


def _key(key: str) -> str:
    return dump_value(key).replace("$${", "${")  # keys are not interpolated


def json_schema_text() -> str:
    """The JSON Schema (draft 2020-12) as in configs/coordexp.schema.json, without the rules between keys. Sections may
    be partial, because a file may extend another; entries of lists may not."""
    schema = RunConfig.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    whole = _inside_lists(schema, definitions)
    for name, definition in definitions.items():
        if name not in whole:
            definition.pop("required", None)
    _name_what_transformers_has(definitions["TrainingConfig"]["properties"])
    del schema["required"]
    for node in (*definitions.values(), schema):
        _adapt(node)
    schema["anyOf"] = [{"required": ["extends"]}, _whole_file(RunConfig)]
    schema["properties"] = {
        "extends": {
            "description": "file or files to start from, relative to this one; later ones win, this file wins over all",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        },
        **schema["properties"],
    }
    whole_schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "CoordExp run"}
    return json.dumps(whole_schema, indent=1, ensure_ascii=False) + "\n"


def _inside_lists(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """Definitions used in lists only. Lists are replaced as a whole, so their entries are complete."""
    names: set[str] = set()

    def walk(node: Any, inside: bool) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item, inside)
        elif isinstance(node, dict):
            name = str(node.get("$ref", "")).rsplit("/", 1)[-1]
            if name:
                if inside:
                    names.add(name)
                walk(definitions[name], inside)
            for key, value in node.items():
                walk(value, inside or key in ("items", "prefixItems"))

    walk({key: value for key, value in schema.items() if key != "$defs"}, False)
    return names


def _name_what_transformers_has(training: dict[str, Any]) -> None:
    training["optim"]["enum"] = sorted(OPTIMIZERS)
    training["lr_scheduler_type"]["enum"] = list(SCHEDULES)
    one, several = training["report_to"]["anyOf"]
    one["enum"] = several["items"]["enum"] = ["none", *LOGGERS]


def _whole_file(section: type[StrictModel]) -> dict[str, Any]:
    """What a file that extends none must contain, at every depth."""
    required = [name for name, field in section.model_fields.items() if field.is_required()]
    sections = {name: section_of(field.annotation) for name, field in section.model_fields.items()}
    below = {name: whole for name, inner in sections.items() if inner is not None and (whole := _whole_file(inner))}
    return ({"required": required} if required else {}) | ({"properties": below} if below else {})


def _adapt(node: Any) -> None:
    """Allow ``${env:NAME}`` where a number, a truth value or one of several words is expected; refuse a path of blanks;
    drop what editors would show twice, and the source's line breaks, which they show as paragraphs."""
    if isinstance(node, list):
        for item in node:
            _adapt(item)
    elif isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if isinstance(node.get("default"), dict):
            del node["default"]  # a section's default is that of its keys
        if node.get("type") in ("integer", "number", "boolean") and "const" not in node and "enum" not in node:
            node["type"] = [node["type"], "string"]
            node["pattern"] = _ENVIRONMENT
        if isinstance(node.get("description"), str):
            node["description"] = " ".join(node["description"].split())
        if node.get("format") == "path":
            node["pattern"] = r"\S"
        for value in node.values():
            _adapt(value)
        if isinstance(node.get("enum"), list):
            words = {key: node.pop(key) for key in ("enum", "type", "minLength") if key in node}
            node["anyOf"] = [words, {"type": "string", "pattern": _ENVIRONMENT}]
