"""A resolved configuration with the source of each value, the differences of two, and a JSON Schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from coordexp.config.base import KeyPath, dotted
from coordexp.config.load import validate
from coordexp.config.schema import RunConfig
from coordexp.config.source import Document, apply_arguments, dump_yaml, read_document

DEFAULT = "default"
_SOURCE_COLUMN = 64


@dataclass(frozen=True, slots=True)
class Explained:
    """A valid configuration and where its values come from."""

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
        return {dotted(path): (_flow(value), self.source(path)) for path, value in _leaves(tree, ())}


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that two configurations do not share; a missing one is None."""

    path: str
    left: tuple[str, str] | None
    right: tuple[str, str] | None


def explain_config(path: str | Path, arguments: Sequence[str] = ()) -> Explained:
    """Load as :func:`coordexp.config.load_config` does, and keep the sources."""
    document = read_document(path)
    apply_arguments(document, arguments)
    return Explained(validate(document, str(path)), document)


def annotated_yaml(explained: Explained, with_defaults: bool = True) -> Iterator[tuple[str, str]]:
    """(a line of YAML, its source) for the whole tree; the source is "" on lines that hold no value of their own."""
    yield from _mapping_lines(explained, explained.config.model_dump(mode="json"), (), "", with_defaults)


def with_sources(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(line, trailing comment), with the comments in one column; still valid YAML when joined."""
    for line, source in lines:
        yield line, f"{' ' * max(2, _SOURCE_COLUMN - len(line))}# {source}" if source else ""


def differences(left: Explained, right: Explained) -> list[Difference]:
    """Every leaf whose value differs, in the order of the schema."""
    a, b = left.values(), right.values()
    paths = list(dict.fromkeys([*a, *b]))
    return [Difference(p, a.get(p), b.get(p)) for p in paths if (a.get(p) or ("",))[0] != (b.get(p) or ("",))[0]]


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
            yield from _list_lines(explained, value, here, indent + "  ")
        elif with_defaults or explained.source(here) != DEFAULT:
            yield f"{indent}{_key(key)}: {_flow(value)}", explained.source(here)


def _list_lines(explained: Explained, items: Sequence[Any], path: KeyPath, indent: str) -> Iterator[tuple[str, str]]:
    for index, item in enumerate(items):
        here = (*path, index)
        lines = list(_mapping_lines(explained, item, here, indent + "  ", True))
        first, source = lines[0]
        yield f"{indent}- {first[len(indent) + 2 :]}", source
        yield from lines[1:]


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
    return _flow(key).replace("$${", "${")  # keys are not interpolated


def _flow(value: Any) -> str:
    return dump_yaml([value], flow=True)[1:-2]


_ENVIRONMENT = r"\$\{env:"


def json_schema() -> dict[str, Any]:
    """Draft 2020-12, without the rules between keys. Sections may be partial, because a file may extend another;
    entries of lists may not."""
    schema = RunConfig.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    whole = _inside_lists(schema, definitions)
    for name, definition in definitions.items():
        if name not in whole:
            definition.pop("required", None)
    required = schema.pop("required")
    for node in (*definitions.values(), schema):
        _adapt(node)
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    schema["properties"] = {
        "extends": {
            "description": "file or files to start from, relative to this one; later ones win, this file wins over all",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        },
        **schema["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "CoordExp run"}


def json_schema_text() -> str:
    """The schema as text, as in configs/coordexp.schema.json."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _inside_lists(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """Definitions used in lists only. Lists are replaced as a whole, so their entries are complete."""
    names: set[str] = set()

    def walk(node: Any, inside: bool) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item, inside)
        elif isinstance(node, dict):
            name = str(node.get("$ref", "")).rsplit("/", 1)[-1]
            if name and (inside, name) not in seen:
                seen.add((inside, name))
                if inside:
                    names.add(name)
                walk(definitions[name], inside)
            for key, value in node.items():
                walk(value, inside or key in ("items", "prefixItems"))

    seen: set[tuple[bool, str]] = set()
    walk({key: value for key, value in schema.items() if key != "$defs"}, False)
    return names


def _adapt(node: Any) -> None:
    """Allow ``${env:NAME}`` where a number or a truth value is expected; drop what editors would show twice."""
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
        for value in node.values():
            _adapt(value)
