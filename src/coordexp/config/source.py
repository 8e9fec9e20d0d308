"""YAML files and command-line words (``training.max_steps=3``) as plain data that knows where each key was written:
``extends``, environment variables, overrides.

The YAML is version 1.2: ``no`` and ``on`` are words, ``1e-3`` is a number, ``1:30`` and ``2026-01-31`` are text.
PyYAML's nodes give the positions: ruamel.yaml keeps positions too, but is 14 times slower, has no line for a key that
``<<`` brings, and stops at the first key that is given twice.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from coordexp.config.base import KeyPath, Problem, dotted, parse_dotted
from coordexp.errors import ConfigError, DataError
from coordexp.home import below_home
from coordexp.reading import SafeLoader, compose_yaml, read_text

_INTEGER = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$"
)
_RESOLVERS = (
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", _INTEGER, "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("merge", re.compile(r"^<<$"), "<"),
)
_SCALAR_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "bool", "int", "float", "null")}
_TEXT_TAG = "tag:yaml.org,2002:str"
_COLLECTION_TAGS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _Loader(SafeLoader):
    """The safe loader with the resolvers above instead of YAML 1.1's."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


class YAMLDumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or the loader above would not read as text."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        key: list(rows) for key, rows in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


for _kind, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, YAMLDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, list(_first))
# Python's null: the reader refuses it without quotes, so the dumper quotes it.
YAMLDumper.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^None$"), ["N"])


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text.encode()  # raises UnicodeEncodeError for half a character, of which PyYAML writes a code that it does not read
    # PyYAML's other styles do not bring every control character and line break back.
    return dumper.represent_scalar(_TEXT_TAG, text, style=None if text.isprintable() else '"')


YAMLDumper.add_representer(str, _represent_text)

# $${ is ${ itself; the rest is ${env:NAME}, ${env:NAME:-default}, or a mistake.
_REFERENCE = re.compile(r"\$\$\{|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}|\$\{[^}]*\}?")


@dataclass(slots=True)
class Document:
    """Merged YAML, where each of its keys was written, and what was wrong already."""

    data: dict[str, Any] = field(default_factory=dict)
    origin: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """Where the key at ``path`` was written, or else the nearest key around it; "" when nowhere."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origin:
                return self.origin[path[:end]]
        return ""


def out_of_range(value: Any, path: KeyPath = ()) -> Iterator[Problem]:
    """Whole numbers in a document's data of more than 64 bits, and others that would become 0 or infinite in float32,
    or their squares would."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from out_of_range(inner, (*path, key))
    elif isinstance(value, float) and math.isfinite(value) and value and not 1e-30 <= abs(value) <= 1e30:
        yield Problem(path, f"{value:g} is beyond what float32 computes with, 1e-30 to 1e30")
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        shown = str(value)[:40] if value.bit_length() < 10_000 else "a number"  # Python refuses to write longer ones
        yield Problem(path, f"{shown} has more than 64 bits; no number here is so large")


def read_document(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Document:
    """Read ``path`` with all that it extends, and put ``overrides`` (dotted key → value) on top. Raises ConfigError if
    it is unreadable as a whole; single mistakes are the document's ``problems``."""
    keys = checked_overrides(overrides)
    document = _read(Path(path), ())
    for key, value in keys.items():
        _put(document, parse_dotted(key), value, "override")
    return document


def checked_overrides(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """``overrides`` of the Python interface. Raises ConfigError for anything else than dotted keys with values."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(
            f'overrides: {overrides!r} is not a mapping of keys to values, as {{"training.max_steps": 100}}'
        )
    for key in overrides or {}:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(f'overrides: {key!r} is no key, such as "training.max_steps"')
    return dict(overrides or {})


def _put(document: Document, path: KeyPath, value: Any, origin: str) -> None:
    """Set one key; missing mappings are created, and a mapping merges with one that is there, as those of files do.
    Raises ConfigError for an index outside of a list."""
    here: Any = document.data
    for end, part in enumerate(path, start=1):
        if isinstance(here, list) != isinstance(part, int) or (isinstance(part, int) and part >= len(here)):
            held = f"has {len(here)} entries" if isinstance(here, list) else "is not a list"
            raise ConfigError(f"{origin} {dotted(path)}: there is no {part} in {dotted(path[: end - 1])}, which {held}")
        below = here.get(part) if isinstance(here, dict) else here[part]
        if end == len(path):
            if isinstance(value, dict) and isinstance(below, dict):
                for key, inner in value.items():
                    _put(document, (*path, key), inner, origin)
                return
            here[part] = value  # pyright: ignore[reportArgumentType, reportCallIssue]
            break
        if not isinstance(below, dict | list):
            if isinstance(path[end], int):
                held = "which no file sets" if below is None else f"which is {dump_value(below)}, not a list"
                what = f"there is no {path[end]} in {dotted(path[:end])}, {held}"
                raise ConfigError(f"{origin} {dotted(path)}: {what}; set the whole list")
            below = here[part] = {}  # pyright: ignore[reportArgumentType, reportCallIssue]
            document.origin[path[:end]] = origin
        here = below
    _forget(document, path)
    document.origin[path] = origin


def dump_yaml(data: Any, flow: bool = False) -> str:
    """YAML that :func:`read_document` reads back as ``data``: keys in order, ``${`` written as ``$${``; on one line
    with ``flow``."""
    width = 2**31 if flow else 100
    text = yaml.dump(
        _escaped(data), Dumper=YAMLDumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=flow
    )
    assert isinstance(text, str)
    return text


def dump_value(value: Any) -> str:
    """``value`` as :func:`dump_yaml` writes it after a key, on one line."""
    return dump_yaml([value], flow=True)[1:-2]


def shown_path(path: Path) -> str:
    """``path`` as a reader finds it: relative to the working directory if it is below that."""
    absolute = Path(os.path.abspath(path))
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value


def _read(path: Path, chain: tuple[Path, ...]) -> Document:
    absolute = path.resolve()
    if absolute in chain:
        loop = " -> ".join(shown_path(p) for p in (*chain, absolute))
        raise ConfigError(f"{path}: extends: leads back to a file that extends it ({loop}); break the cycle")
    own = _parse(path)
    parents = own.data.pop("extends", None)
    names = [parents] if isinstance(parents, str) else parents if isinstance(parents, list) else []
    if parents is not None and (not names or not all(isinstance(name, str) and name for name in names)):
        raise ConfigError(f"{own.where(('extends',))}: extends: expected a relative path or a list of them")
    parts = []
    for name in names:
        parent = absolute.parent / below_home(name)
        if not parent.is_file():
            raise ConfigError(f"{own.where(('extends',))}: extends: {name} does not exist (looked for {parent})")
        parts.append(_read(parent, (*chain, absolute)))
    merged = Document()
    for part in (*parts, own):
        merged.problems += [problem for problem in part.problems if problem not in merged.problems]
        _merge(merged, part, merged.data, part.data, ())
    return merged


def _merge(base: Document, top: Document, into: dict[str, Any], data: dict[str, Any], path: KeyPath) -> None:
    """Mappings merge key by key. Everything else replaces what was there, lists as a whole too: a list merged by
    position would tie a file to the order of another's entries."""
    for key, value in data.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            base.origin.setdefault(here, top.origin.get(here, ""))
            _merge(base, top, into[key], value, here)
            continue
        into[key] = value
        _forget(base, here)
        base.origin |= {p: where for p, where in top.origin.items() if p[: len(here)] == here}


def _forget(document: Document, path: KeyPath) -> None:
    for old in [p for p in document.origin if p[: len(path)] == path]:
        del document.origin[old]


def _parse(path: Path) -> Document:
    try:
        text = read_text(path)
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise ConfigError(f"{path}: no such file (working directory: {Path.cwd()})") from None
        raise ConfigError(str(error)) from error
    try:
        loader, node = compose_yaml(text, _Loader)
        if node is None:
            return Document()
        if not isinstance(node, yaml.MappingNode) or node.tag not in _COLLECTION_TAGS:
            raise ConfigError(f"{path}: expected a mapping of keys to values at the top")
        reader = _NodeReader(loader, shown_path(path))
        reader.document.data = reader.read(node, ())
        return reader.document
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{shown_path(path)}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or error
        line = "" if mark is None else "".join(text.splitlines()[mark.line : mark.line + 1])
        if re.match(r" *\t", line):
            problem = "the line starts with a tab; indent with spaces"
        elif any(re.match(r"[^{\[]*[{\[].*\$\{", part) for part in line.split("#")):
            problem = f"{problem}; ${{…}} inside of {{…}} or […] needs quotes, which make it text, or a line of its own"
        raise ConfigError(f"{where}: not valid YAML: {problem}") from error


class _NodeReader:
    """YAML nodes of one file as plain data, with the place of each key and the problems of single ones."""

    def __init__(self, loader: Any, name: str, with_lines: bool = True) -> None:
        self.loader = loader
        self.name = name
        self.with_lines = with_lines
        self.document = Document()

    def _where(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.with_lines else self.name

    def read(self, node: yaml.Node, here: KeyPath) -> Any:
        where = self._where(node)
        self.document.origin.setdefault(here, where)
        if node.tag not in (_SCALAR_TAGS if isinstance(node, yaml.ScalarNode) else _COLLECTION_TAGS):
            self._problem(here, f"the tag {node.tag} is not read here; write plain keys, values and lists")
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, here)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*here, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.MappingNode)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            key = self._key(key_node, here)
            if key in seen:
                self._problem((*here, key), f"given twice, on lines {seen[key]} and {line} of {self.name}; keep one")
            seen[key] = line
            self.document.origin[(*here, key)] = self._where(key_node)
        self.loader.flatten_mapping(node)  # `<<: *anchor` puts the anchor's keys before the mapping's own
        pairs = [(self._key(key_node, here), value) for key_node, value in node.value]
        return {key: self.read(value, (*here, key)) for key, value in pairs}

    def _key(self, node: yaml.Node, here: KeyPath) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag == _TEXT_TAG:
            return node.value
        where = f"{self._where(node)}: {dotted(here) or 'top level'}"
        shown = repr(node.value) if isinstance(node, yaml.ScalarNode) else "this key"
        raise ConfigError(f"{where}: keys must be text; quote {shown}")

    def _scalar(self, node: yaml.ScalarNode, here: KeyPath) -> Any:
        if node.tag == _TEXT_TAG and "${" in node.value:
            text = _REFERENCE.sub(lambda reference: self._replacement(reference, here), node.value)
            if node.style:  # quoted, or a block: text it stays
                return text
            node = yaml.ScalarNode(self.loader.resolve(yaml.ScalarNode, text, (True, False)), text)
        try:
            value = self.loader.construct_object(node, deep=True)
        except (ValueError, LookupError):  # PyYAML's constructors raise these for `!!int x`, `!!int ''`, `!!bool x`
            self._problem(here, f"cannot be read as {node.tag.rsplit(':', 1)[-1]}: {node.value[:40]!r}")
            return None
        if value == "None" and not node.style:
            self._problem(here, "None is text in YAML; write null for nothing, or the text in quotes")
            return None
        return value

    def _replacement(self, reference: re.Match[str], here: KeyPath) -> str:
        text = reference.group()
        if text == "$${":
            return "${"
        name = reference["name"]
        if name is None:
            inner = text[2:].rstrip("}")
            self._problem(
                here,
                f"{text} is not replaced; write ${{env:{inner.removeprefix('env:') or 'NAME'}}} for an environment "
                f"variable (${{env:NAME:-default}} with a default), or $${{ for the text itself",
            )
            return text
        value = os.environ.get(name)
        if not value and reference["default"] is not None:  # an empty one too, as in a shell
            value = reference["default"]
        if value is None:
            self._problem(
                here, f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}"
            )
            return ""
        self.document.origin[here] = f"{self.document.where(here)}, ${name}"
        return value

    def _problem(self, here: KeyPath, message: str) -> None:
        self.document.problems.append(Problem(here, message))


_COMMAND_LINE = "command line"
_KEY = re.compile(r"[^.\[\]=\s]+(\[\d+\])*(\.[^.\[\]=\s]+(\[\d+\])*)*")


def is_argument(word: str) -> bool:
    """Whether a word of a command line sets a key, ``key.path=value``; an existing file of that name is a path."""
    key, equals, _ = word.partition("=")
    return bool(equals and _KEY.fullmatch(key)) and not os.path.exists(word)


def apply_arguments(document: Document, arguments: Sequence[str]) -> None:
    """Put ``arguments`` (``key.path=value``) on top of ``document``; their place is "command line". Raises ConfigError
    for a word of another form, a key given twice, an index outside of a list; an invalid value is one of the document's
    problems."""
    complaints: list[str] = []
    given: dict[KeyPath, str] = {}
    for word in arguments:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key):
            complaints.append(f"{word!r}: expected key.path=value, e.g. training.max_steps=3")
        elif (path := parse_dotted(key)) in given:
            complaints.append(f"{key}: given twice, as {given[path]!r} and {text!r}; keep one")
        else:
            given[path] = text
    if complaints:
        raise ConfigError("\n".join(f"{_COMMAND_LINE}: {complaint}" for complaint in complaints))
    for path, text in given.items():
        value = None
        try:
            loader, node = _compose_word(text)
            reader = _NodeReader(loader, _COMMAND_LINE, with_lines=False)
            value = None if node is None else reader.read(node, path)
        except yaml.YAMLError as error:
            document.problems.append(Problem(path, f"not valid YAML: {getattr(error, 'problem', None) or error}"))
            reader = None
        _put(document, path, value, _COMMAND_LINE)
        if reader is not None:
            document.origin |= reader.document.origin
            document.problems += reader.document.problems


def _compose_word(text: str) -> tuple[Any, yaml.Node | None]:
    """As :func:`compose_yaml`, but text without quotes is taken as it stands: a shell knows no comments, and passes
    line breaks on. Raises yaml.YAMLError for a comment after anything else."""
    loader, node = compose_yaml(text, _Loader)
    whole = text.strip()
    is_plain = node is None or (isinstance(node, yaml.ScalarNode) and not node.style)
    if is_plain and not whole.startswith(("!", "&")):
        if whole and (node is None or node.value != whole):
            return loader, yaml.ScalarNode(_TEXT_TAG, whole)
    elif node is not None and (rest := text[node.end_mark.index :].strip()):
        raise yaml.YAMLError(f"{rest!r} would be a comment; put quotes around the whole text, or leave it out")
    return loader, node
