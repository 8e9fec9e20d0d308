"""How a file that a user names is read: only regular files, as text, JSON, YAML or XML, whatever they hold.

A C parser that recurses would end the process, and a few lines can expand to any amount of memory; so nesting and
aliases of YAML are counted before its nodes are built, and XML with declarations that expand is refused.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn
from xml.etree import ElementTree

import yaml

from coordexp.errors import DataError

OWN_MARK = "written by CoordExp"  # in the first or the last kilobyte of single files that options name
LFS_MARK = b"version https://git-lfs"
LFS_POINTER = "a pointer of Git LFS without the file itself; run git lfs pull"


def open_file(path: Path) -> IO[bytes]:
    """A regular file's bytes. Raises DataError for another one: a device or a pipe may never end."""
    try:
        mode = path.stat().st_mode  # before it is opened: opening a pipe waits for a writer
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise DataError("is a device, a pipe or a socket; give a file", path=path)
        return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise DataError(f"not readable: {getattr(error, 'strerror', None) or error}", path=path) from error


def read_bytes(path: Path) -> bytes:
    """A regular file's content. Raises DataError, also for a pointer of Git LFS."""
    with open_file(path) as file:
        try:
            data = file.read()
        except OSError as error:
            raise DataError(f"not readable: {error.strerror}", path=path) from error
    if data.startswith(LFS_MARK):
        raise DataError(f"is {LFS_POINTER}", path=path)
    return data


def is_own(path: Path) -> bool:
    """Whether a file bears our mark, so that a command may replace it without a question. Raises DataError."""
    with open_file(path) as file:
        head = file.read(1024)
        file.seek(max(0, path.stat().st_size - 1024))
        return OWN_MARK.encode() in head + file.read()


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what Git leaves in place of a large one that was not downloaded. Raises DataError."""
    with open_file(path) as file:
        return file.read(len(LFS_MARK)) == LFS_MARK


def read_text(path: Path, errors: str = "strict") -> str:
    """A UTF-8 file's text, without the byte order mark that Windows editors write; line breaks are ``\\n``. ``errors``
    as for :meth:`bytes.decode`. Raises DataError."""
    try:
        text = read_bytes(path).decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start + 1}; save it as UTF-8", path=path) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path) -> Any:
    """A JSON file's content. Raises DataError like :func:`read_text`, and if it is not JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not readable as JSON: {error}", path=path) from error


def csv_rows(lines: Iterable[str], path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV that are not empty, each with the number of its last line. Raises DataError."""
    rows = csv.reader(lines, delimiter=delimiter)
    try:
        for row in rows:
            if row:
                yield rows.line_num, row
    except (csv.Error, UnicodeDecodeError) as error:  # of more than 131,072 characters in a cell
        raise DataError(f"not readable as CSV: {error}", path=path, line=rows.line_num) from error


# YAML. The C parser reads the same language some ten times faster; PyYAML may be built without it.
SafeLoader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DEEPEST = 100  # mappings and lists inside each other
_MOST_BY_ALIASES = 100_000  # keys and values


def read_yaml(path: Path) -> Any:
    """A YAML file's content, by YAML 1.1 as other tools read a ``data.yaml``. Raises DataError like :func:`read_text`,
    and if it is not YAML."""
    text = read_text(path)
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise DataError(f"not readable as YAML: {error}", path=path) from error


def parse_yaml(text: str) -> Any:
    """The content of YAML 1.1. Raises yaml.YAMLError, also for a key that is given twice: PyYAML keeps the last."""
    loader, node = compose_yaml(text)
    _check_keys(node)
    try:
        return None if node is None else loader.construct_document(node)
    # The date 2001-99-99, the number 1:1:…, `!!bool x`, `!!timestamp x`.
    except (ValueError, LookupError, AttributeError, OverflowError) as error:
        raise yaml.YAMLError(f"a value that is not what it looks like ({error}); put it in quotes") from error


def _check_keys(node: yaml.Node | None) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item)
    elif isinstance(node, yaml.MappingNode):
        given: set[tuple[str, str]] = set()
        for key, value in node.value:
            _check_keys(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in given:
                _refuse(f"the key {key.value!r} is given twice; remove one", key)
            given.add((key.tag, key.value))


class _Loader(SafeLoader):
    pass


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    value = yaml.SafeLoader.construct_yaml_int(loader, node)
    if value.bit_length() > 64:  # Python refuses to print one of thousands of digits
        raise ValueError("a number of more than 64 bits")
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def compose_yaml(text: str, loader_class: type = _Loader) -> tuple[Any, yaml.Node | None]:
    """The nodes of a text, None for an empty one, and the loader that makes values of them. Raises yaml.YAMLError, also
    for a text that is nested too deeply, or in which aliases expand to too much or contain themselves."""
    try:
        _check_nesting(text)
        loader = loader_class(text)
        return loader, loader.get_single_node()
    except UnicodeError as error:  # half a character, of a word on the command line
        raise yaml.YAMLError(f"not text: {error}") from error


def _check_nesting(text: str) -> None:
    # By the parser's events, which come without recursion.
    sizes: dict[str, tuple[int, int]] = {}  # by anchor: keys and values, and how deeply they are nested
    around: list[tuple[str | None, int, int]] = [(None, 0, 0)]  # the same of what is open
    by_aliases = 0
    for event in yaml.parse(text, Loader=SafeLoader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            around.append((anchor, 1, 1))
            size, depth = 0, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size, depth = around.pop()
        elif isinstance(event, yaml.AliasEvent):
            if anchor in (name for name, _, _ in around):
                _refuse("this alias contains itself", event)
            size, depth = sizes.get(anchor or "", (1, 0))  # an unknown one is refused by the composer
            by_aliases += size
            anchor = None
        elif isinstance(event, yaml.ScalarEvent):
            size, depth = 1 + len(event.value) // 64, 0  # a long text is many, for it is shown and copied
        else:
            continue
        if len(around) + depth > _DEEPEST:
            _refuse(f"nested too deeply (more than {_DEEPEST} mappings and lists inside each other)", event)
        if by_aliases > _MOST_BY_ALIASES:
            _refuse(f"more than {_MOST_BY_ALIASES:,} keys and values after aliases are expanded", event)
        if not isinstance(event, yaml.CollectionStartEvent):
            if anchor is not None:
                sizes[anchor] = size, depth
            name, of_outer, outer_depth = around[-1]
            around[-1] = name, of_outer + size, max(outer_depth, depth + 1)


def _refuse(problem: str, place: yaml.Event | yaml.Node) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


# XML
_XML_ENCODING = re.compile(r"^\s*<\?xml[^>]*?\sencoding\s*=\s*[\"']([A-Za-z0-9._-]+)[\"'][^>]*\?>")
# By Python's names. The rest are not encodings of text (zip, punycode: minutes for a megabyte), or unused.
_XML_ENCODINGS = frozenset((
    "utf-8", "utf-16", "utf-16-le", "utf-16-be", "ascii", "gb2312", "gbk", "gb18030", "big5", "shift_jis", "cp932",
    "euc_jp", "euc_kr", "cp949", "koi8-r", *(f"cp{number}" for number in range(1250, 1259)),
    *(f"iso8859-{number}" for number in range(1, 17)),
))  # fmt: skip
_XML_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
    (b"<\0", "utf-16-le"), (b"\0<", "utf-16-be"),
)  # fmt: skip
_XML_EXPANDS = re.compile(r"<!(ENTITY|ATTLIST)\b")  # can be written in no other way


def read_xml(path: Path) -> ElementTree.Element:
    """The root of an XML file, in UTF-8, UTF-16 or the encoding that it names. Raises DataError."""
    data = read_bytes(path)
    try:
        # The parser itself reads no encoding of several bytes a character, such as GBK.
        text = data.decode(_xml_encoding(data)).lstrip()
        if found := _XML_EXPANDS.search(text):
            raise ValueError(f"declares <!{found[1]} …>, which could expand to any size; remove its <!DOCTYPE …>")
        return ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise DataError(f"broken XML: {error}", path=path) from error


def _xml_encoding(data: bytes) -> str:
    for mark, encoding in _XML_MARKS:
        if data.startswith(mark):
            return encoding
    declared = _XML_ENCODING.match(data[:1000].decode("latin-1"))
    name = "utf-8" if declared is None else codecs.lookup(declared[1]).name
    if name not in _XML_ENCODINGS:
        raise LookupError(f"its encoding {name!r} is not read; save it as UTF-8")
    return name
