"""A resolved configuration, key by key, with where each value comes from; and what differs between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from coordexp.config.arguments import apply_arguments
from coordexp.config.load import validate
from coordexp.config.root import RunConfig
from coordexp.config.source import Document, dump_yaml, read_document
from coordexp.config.strict import KeyPath, dotted

DEFAULT = "default"
_SOURCE_COLUMN = 64


@dataclass(frozen=True, slots=True)
class Explained:
    """A valid configuration and where its values come from."""

    config: RunConfig
    document: Document

    def source(self, path: KeyPath) -> str:
        """``file:line`` of the value at ``path``, or "default". A list's items stand where the list stands."""
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


def explain_config(
    path: str | Path, overrides: Mapping[str, Any] | None = None, arguments: Sequence[str] = ()
) -> Explained:
    """Load as :func:`coordexp.config.load_config` does, and keep the sources."""
    document = read_document(path, overrides)
    apply_arguments(document, arguments)
    return Explained(validate(document, str(path)), document)


def annotated_yaml(explained: Explained, with_defaults: bool = True) -> Iterator[tuple[str, str]]:
    """(a line of YAML, its source) for the whole tree; the source is "" on lines that hold no value of their own."""
    yield from _mapping_lines(explained, explained.config.model_dump(mode="json"), (), "", with_defaults)


def with_sources(lines: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """(line, trailing comment) so that comments stand in one column; still valid YAML when joined."""
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
    """Is this a list of sections, such as servers or modules?"""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and item for item in value)


def _key(key: str) -> str:
    return _flow(key).replace("$${", "${")  # keys are not interpolated


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    return dump_yaml([value], flow=True)[1:-2]
