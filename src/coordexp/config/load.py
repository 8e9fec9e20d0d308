"""YAML, with what it ``extends``, to a :class:`RunConfig`; and back to YAML."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from coordexp.config.legacy import take_removed
from coordexp.config.root import RunConfig, section_defaults
from coordexp.config.strict import KeyPath, Problem, dotted, parse_dotted, problems_from
from coordexp.errors import ConfigError

# The C parser reads the same language some ten times faster; PyYAML may be built without it.
_SafeLoader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """YAML's safe loader, in which ``1e-3`` is a number (YAML 1.1 takes it for text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


@dataclass(slots=True)
class _Document:
    """Merged YAML, where each of its keys was written (for messages), and what was wrong already."""

    data: dict[str, Any] = field(default_factory=dict)
    origin: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read and validate a run's configuration.

    Args:
        path: a YAML file. ``extends:`` in it names one file or a list of files, relative to it; later files win over
            earlier ones and the file itself over all; mappings merge key by key, everything else (lists too) replaces.
        overrides: dotted key -> value, put on top, e.g. ``{"training.output_dir": "outputs/run"}``.

    Raises:
        ConfigError: the text holds every problem, one a line: dotted path, file and line, what is wrong, what to do.
    """
    path = Path(path)
    document = _read(path, ())
    for key, value in (overrides or {}).items():
        _put(document, parse_dotted(key), value)
    return _validate(document, str(path))


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """Validate a configuration that is a mapping already; raises :class:`ConfigError` as :func:`load_config` does."""
    return _validate(_Document(copy.deepcopy(dict(data))), source)


def resolved_yaml(config: RunConfig) -> str:
    """Every key with its value, as YAML that loads back to an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validate(document: _Document, source: str) -> RunConfig:
    removed = list(take_removed(document.data))
    data = section_defaults(document.data)
    found: list[Problem] = []
    try:
        config = RunConfig.model_validate(data, context={"problems": found})
    except ValidationError as error:
        structural = list(problems_from(error, RunConfig))
        problems = [*removed, *structural, *_agreeing(data, [*removed, *structural, *document.problems])]
        raise _error(source, document, problems) from None
    if removed or found or document.problems:
        # A removed key leaves a hole: what rests on it is not known yet.
        raise _error(source, document, [*removed, *_untouched(found, [*removed, *document.problems])])
    return config


def _agreeing(data: dict[str, Any], broken: list[Problem]) -> list[Problem]:
    """Cross-section findings of a configuration with broken keys: those keys fall back to defaults, and findings that
    rest on one of them are left out."""
    data = copy.deepcopy(data)
    for problem in broken:
        _restore_default(data, problem.path)
    found: list[Problem] = []
    try:
        RunConfig.model_validate(data, context={"problems": found})
    except ValidationError:
        return []  # a key without a default that no example stands in for: what is reported already comes first
    return _untouched(found, broken)


def _untouched(found: Iterable[Problem], broken: list[Problem]) -> list[Problem]:
    def rests_on_broken(problem: Problem) -> bool:
        for path in (problem.path, *problem.reads):
            for other in broken:
                shared = min(len(path), len(other.path))
                if path[:shared] == other.path[:shared]:
                    return True
        return False

    return [problem for problem in found if not rests_on_broken(problem)]


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


def _error(source: str, document: _Document, problems: list[Problem]) -> ConfigError:
    problems = [*document.problems, *problems]
    lines = []
    for problem in dict.fromkeys(problems):
        where = _origin(document, problem.path)
        name = dotted(problem.path) or "(the file)"
        lines.append(f"  {name}{f' ({where})' if where else ''}: {problem.message}")
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return ConfigError(f"{source}: {count}\n" + "\n".join(lines))


def _origin(document: _Document, path: KeyPath) -> str:
    """Where the key was written, or else the nearest key around it."""
    for end in range(len(path), 0, -1):
        if path[:end] in document.origin:
            return document.origin[path[:end]]
    return ""


def _read(path: Path, chain: tuple[Path, ...]) -> _Document:
    path = path.resolve() if chain else path
    if path.resolve() in chain:
        loop = " -> ".join(str(p) for p in (*chain, path))
        raise ConfigError(f"{path}: extends: leads back to a file that extends it ({loop}); break the cycle")
    own = _parse(path)
    parents = own.data.pop("extends", None)
    names = [parents] if isinstance(parents, str) else parents if isinstance(parents, list) else []
    if parents is not None and (not names or not all(isinstance(name, str) and name for name in names)):
        raise ConfigError(f"{path}: extends: expected a relative path or a list of them")
    merged = _Document()
    for name in names:
        parent = path.resolve().parent / name
        if not parent.is_file():
            raise ConfigError(f"{path}: extends: {name} does not exist (looked for {parent})")
        _merge(merged, _read(parent, (*chain, path.resolve())))
    _merge(merged, own)
    return merged


def _merge(base: _Document, top: _Document) -> None:
    base.problems += [problem for problem in top.problems if problem not in base.problems]
    _merge_mapping(base, top, base.data, top.data, ())


def _merge_mapping(base: _Document, top: _Document, into: dict[str, Any], data: dict[str, Any], path: KeyPath) -> None:
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            base.origin.setdefault(here, top.origin.get(here, ""))
            _merge_mapping(base, top, into[key], value, here)
            continue
        into[key] = value
        for old in [p for p in base.origin if p[: len(here)] == here]:
            del base.origin[old]
        base.origin |= {p: where for p, where in top.origin.items() if p[: len(here)] == here}


def _put(document: _Document, path: KeyPath, value: Any) -> None:
    here: Any = document.data
    for part in path[:-1]:
        if isinstance(part, int) and isinstance(here, list) and part < len(here):
            here = here[part]
        elif isinstance(here, dict):
            if not isinstance(here.get(part), dict | list):
                here[part] = {}
            here = here[part]
        else:
            raise ConfigError(f"override {dotted(path)}: there is no {part} to set it in")
    here[path[-1]] = value
    document.origin[path] = "override"


def _parse(path: Path) -> _Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (working directory: {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    document = _Document()
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return document
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: expected a mapping of keys to values at the top")
        document.data = _construct(loader, node, (), document, path, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    finally:
        loader.dispose()
    return document


def _construct(
    loader: Any, node: yaml.Node, here: KeyPath, document: _Document, path: Path, above: tuple[int, ...]
) -> Any:
    """A YAML node as plain data; notes where each key stands, and reports keys that are repeated or are not text."""
    where = f"{path}:{node.start_mark.line + 1}"
    document.origin.setdefault(here, where)
    if id(node) in above:
        raise ConfigError(f"{where}: {dotted(here)}: this alias contains itself")
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*here, i), document, path, above) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or key_node.tag != "tag:yaml.org,2002:str":
            raise ConfigError(f"{path}:{line}: {dotted(here) or 'top level'}: keys must be text; quote {key!r}")
        if key in seen:
            document.problems.append(
                Problem((*here, key), f"given twice, on lines {seen[key]} and {line} of {path}; keep one")
            )
        seen[key] = line
        document.origin[(*here, key)] = f"{path}:{line}"
    loader.flatten_mapping(node)  # `<<: *anchor` puts the anchor's keys before the mapping's own
    return {
        key.value: _construct(loader, value, (*here, key.value), document, path, above) for key, value in node.value
    }
