"""YAML, with what it ``extends``, to a :class:`RunConfig`; and back to YAML. Removed keys and values are
refused, each with its own guidance."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from coordexp.config.checks import cross_checks
from coordexp.config.legacy_table import REMOVED_KEYS, REMOVED_VALUES
from coordexp.config.root import RunConfig
from coordexp.config.sections import DEBUG_STANDS_FOR, Sections, section_defaults
from coordexp.config.source import Document, apply_arguments, dump_yaml, put, read_document
from coordexp.config.strict import KeyPath, Problem, dotted, problems_from
from coordexp.errors import ConfigError


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
        ConfigError: the text holds every problem, one a line: dotted path, file and line, what is wrong, what to do.
    """
    document = read_document(path, overrides)
    apply_arguments(document, arguments)
    return validate(document, str(path))


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate a configuration that is a mapping already; raises :class:`ConfigError` as :func:`load_config` does."""
    return validate(Document(copy.deepcopy(dict(data))), source)


def resolved_yaml(config: RunConfig) -> str:
    """Every key with its value, as YAML that loads back to an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


def validate(document: Document, source: str) -> RunConfig:
    """The configuration that ``document`` describes; ``source`` names it in errors."""
    _apply_debug(document)
    removed = list(take_removed(document.data))
    data = section_defaults(document.data)
    try:
        contradictions = list(cross_checks(Sections.model_validate(data)))
    except ValidationError as error:
        already = {problem.path for problem in document.problems}
        structural = [problem for problem in problems_from(error, RunConfig) if problem.path not in already]
        problems = [*removed, *structural, *_agreeing(data, [*removed, *structural, *document.problems])]
        raise _error(source, document, problems) from None
    if removed or contradictions or document.problems:
        # A removed key leaves a hole: what rests on it is not known yet.
        raise _error(source, document, [*removed, *_untouched(contradictions, [*removed, *document.problems])])
    return RunConfig.model_validate(data)


def _apply_debug(document: Document) -> None:
    """Put the keys of ``debug`` in place of those they stand for. Doing it twice changes nothing, so what it leaves
    loads back to itself."""
    section = document.data.get("debug")
    if not isinstance(section, dict) or section.get("enabled") is not True:
        return
    for key, target in DEBUG_STANDS_FOR.items():
        if section.get(key) is not None and isinstance(document.data.setdefault(target[0], {}), dict):
            put(document, target, section[key], document.where(("debug", key)))


def _agreeing(data: dict[str, Any], broken: list[Problem]) -> list[Problem]:
    """Cross-section findings of a configuration with broken keys: those keys fall back to defaults, and findings that
    rest on one of them are left out."""
    data = copy.deepcopy(data)
    for problem in broken:
        _restore_default(data, problem.path)
    try:
        sections = Sections.model_validate(data)
    except ValidationError:
        return []  # a key without a default that no example stands in for: what is reported already comes first
    return _untouched(cross_checks(sections), broken)


def _untouched(contradictions: Iterable[Problem], broken: list[Problem]) -> list[Problem]:
    def rests_on_broken(problem: Problem) -> bool:
        for path in (problem.path, *problem.reads):
            for other in broken:
                shared = min(len(path), len(other.path))
                if path[:shared] == other.path[:shared]:
                    return True
        return False

    return [problem for problem in contradictions if not rests_on_broken(problem)]


def _restore_default(data: dict[str, Any], path: KeyPath) -> None:
    """Replace what stands at ``path`` by its default; if it has none, by its example; else so for what holds it."""
    for end in range(len(path), 0, -1):
        here: Any = data
        for part in path[: end - 1]:
            here = here.get(part) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            continue
        known, default = _default_of(path[:end])
        if not known:
            here.pop(path[end - 1], None)
            return
        if default is not PydanticUndefined:
            here[path[end - 1]] = default
            return


def _default_of(path: KeyPath) -> tuple[bool, Any]:
    """(is this a declared key?, its default or example, else PydanticUndefined)."""
    section: Any = RunConfig
    field_info = None
    for part in path:
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return True, PydanticUndefined  # inside a list or a free mapping
        field_info = section.model_fields.get(str(part))
        if field_info is None:
            return False, PydanticUndefined
        members = [field_info.annotation, *getattr(field_info.annotation, "__args__", ())]
        section = next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)
    if field_info is None:
        return True, PydanticUndefined
    default = field_info.get_default()
    if default is PydanticUndefined and field_info.examples:
        return True, field_info.examples[0]
    return True, default


def _error(source: str, document: Document, problems: list[Problem]) -> ConfigError:
    problems = [*document.problems, *problems]
    lines = []
    for problem in dict.fromkeys(problems):
        where = document.where(problem.path)
        name = dotted(problem.path) or "(the file)"
        lines.append(f"  {name}{f' ({where})' if where else ''}: {problem.message}")
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{source}: {count}\n" + "\n".join(lines))


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
