"""Refuses keys and values of the table of removed ones, each with its own guidance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coordexp.config.legacy_table import REMOVED_KEYS, REMOVED_VALUES
from coordexp.config.strict import KeyPath, Problem, dotted

# Everything that stood below this key stands below rollout_matching now.
OLD_ROLLOUT_SECTION = ("custom", "extra", "rollout_matching")


def take_removed(data: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every removed key or value in ``data``, and take it out, so that validation of the rest
    does not report it again as unknown."""
    yield from _take_old_section(data)
    for row in REMOVED_KEYS:
        for parent, last, path in list(_matches(data, tuple(row.pattern.split(".")), ())):
            del parent[last]
            if not parent:
                _prune(data, path[:-1])
            yield Problem(path, row.guidance)
    for (key, value), guidance in REMOVED_VALUES.items():
        for parent, last, path in list(_matches(data, tuple(key.split(".")), ())):
            if parent[last] == value:
                del parent[last]
                yield Problem(path, f"'{value}' is {guidance}")


def _take_old_section(data: dict[str, Any]) -> Iterator[Problem]:
    custom, extra, section = OLD_ROLLOUT_SECTION
    extra_section = data[custom].get(extra) if isinstance(data.get(custom), dict) else None
    if not isinstance(extra_section, dict) or section not in extra_section:
        return
    old = extra_section.pop(section)
    if not extra_section:
        del data[custom][extra]
    if not isinstance(old, dict) or not old:
        yield Problem(OLD_ROLLOUT_SECTION, f"moved; write the top-level section {section} instead")
        return
    for tail in _leaves(old, ()):
        new = dotted((section, *tail))
        rows = [row for row in REMOVED_KEYS if f"{new}.".startswith(f"{row.pattern}.")]
        guidance = rows[0].guidance if rows else f"moved; write {new} instead"
        yield Problem((*OLD_ROLLOUT_SECTION, *tail), guidance)


def _prune(data: dict[str, Any], path: KeyPath) -> None:
    """Take out a mapping that is empty now and that the table names too: it has been reported key by key."""
    if dotted(path) in {row.pattern for row in REMOVED_KEYS}:
        for parent, last, _ in list(_matches(data, tuple(str(part) for part in path), ())):
            del parent[last]


def _leaves(value: object, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path


def _matches(value: Any, pattern: tuple[str, ...], path: KeyPath) -> Iterator[tuple[dict[str, Any], str, KeyPath]]:
    """(the mapping that holds the key, the key, its path) for each place in ``value`` that ``pattern`` describes."""
    head, *rest = pattern
    if isinstance(value, dict):
        keys = list(value) if head == "*" else [head] if head in value else []
        for key in keys:
            if rest:
                yield from _matches(value[key], tuple(rest), (*path, key))
            else:
                yield value, key, (*path, key)
    elif isinstance(value, list) and head == "*" and rest:
        for index, item in enumerate(value):
            yield from _matches(item, tuple(rest), (*path, index))
