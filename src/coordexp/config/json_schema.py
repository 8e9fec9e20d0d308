"""The schema as JSON Schema, for editors: completion, hover texts and red lines while a YAML is written."""

from __future__ import annotations

import json
from typing import Any

from coordexp.config.root import RunConfig

_ENVIRONMENT = r"\$\{env:"


def json_schema() -> dict[str, Any]:
    """Draft 2020-12. It says less than :func:`coordexp.config.load_config` checks: no rules between keys. Sections may
    be partial, because a file may extend another; entries of lists may not."""
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
    """The schema as the file that ships beside the configurations."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _inside_lists(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """Definitions that only stand inside lists. Lists are replaced as a whole, so their entries are complete."""
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
    """Lets ``${env:NAME}`` stand where a number or a truth value is expected; drops what editors show twice."""
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
