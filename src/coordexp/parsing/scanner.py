"""A strict JSON scanner over bytes that stops at the first break and keeps the byte span of every value.

JSON's structure is ASCII and no byte of a multi-byte UTF-8 character is, so scanning bytes is exact where scanning
decoded tokens would meet half characters. One extension to JSON: a coordinate token is allowed as an unquoted value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

MAX_DEPTH = 64  # deeper nesting is a loop, not an answer, and common JSON readers give up on it too
MAX_NUMBER_BYTES = 1000  # Python's own reader refuses integers of more than 4300 digits

WHITE_SPACE = b" \t\n\r"
# Only single bytes are repeated possessively: Python before 3.11.5 matches possessive groups wrongly
# (https://github.com/python/cpython/issues/106052).
_WS = rb"[ \t\n\r]*+"
_PLAIN = rb'[^"\\\x00-\x1f]*+'
_BODY = _PLAIN + rb'(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})' + _PLAIN + rb")*"
_NUMBER = rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?"

# Groups: 1 string body, 2 opening bracket, 3 bare coordinate, 4 delimited number or name.
_VALUE = re.compile(
    _WS + rb'(?:"(' + _BODY + rb')"|([{\[])|(<\|coord_[0-9]{1,3}\|>)'
    rb"|(" + _NUMBER + rb"(?=[ \t\n\r,\]}])|(?:true|false|null)(?=[ \t\n\r,\]}])))"
)
_KEY = re.compile(_WS + rb'"(' + _BODY + rb')"' + _WS + rb":")
_AFTER_MEMBER = re.compile(_WS + rb"([,}])")
_AFTER_ELEMENT = re.compile(_WS + rb"([,\]])")
_OBJECT_END = re.compile(_WS + rb"\}")
_ARRAY_END = re.compile(_WS + rb"\]")
_SPACE = re.compile(_WS)

# Beginnings that a longer answer could still complete; they distinguish a truncated entry from a malformed one.
_CUT_STRING = rb'"' + _BODY + rb"(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
_CUT_KEY = re.compile(_WS + rb"(?:" + _CUT_STRING + rb'(?:"' + _WS + rb")?)?\Z")
_CUT_VALUE = re.compile(
    _WS + rb"(?:" + _CUT_STRING + rb"|-?(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?"
    rb"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?)?\Z"
)
_CUT_SPACE = re.compile(_WS + rb"\Z")

# Nearly every array of an answer. Its elements get Nodes only on demand; see elements().
_COORD_STRING = rb'"<\|coord_[0-9]{1,3}\|>"' + _WS
_COORD_ARRAY = rb"\[(?:" + _WS + _COORD_STRING + rb",)*" + _WS + _COORD_STRING + rb"\]"
_COORDS = re.compile(_COORD_ARRAY)
# Both fields of nearly every entry, in one step each. Groups: 1 key, 2 string, 3 such an array, 4 separator.
_FIELD = re.compile(
    _WS + rb'"(' + _BODY + rb')"' + _WS + rb":" + _WS + rb'(?:("' + _BODY + rb'")|(' + _COORD_ARRAY + rb"))"
    + _WS + rb"([,}])"
)  # fmt: skip
_COORD_ELEMENT = re.compile(rb'"<\|coord_[0-9]{1,3}\|>"')

_CLOSING_BRACE = ord("}")
_OBJECT_KEY = re.compile(rb"object_([0-9]{1,18})")


class Kind(IntEnum):
    """Kind of a scanned value."""

    STRING = 0
    COORD = 1  # an unquoted coordinate token
    SCALAR = 2  # number, true, false, null
    ARRAY = 3
    OBJECT = 4
    COORDS = 5  # an array of nothing but quoted coordinate literals; see :func:`elements`


class Node(NamedTuple):
    """A complete value: ``data[start:end]``, quotes and brackets included. ``items`` holds the Nodes of an array or
    the Members of an object; none of an array of coordinates."""

    kind: Kind
    start: int
    end: int
    items: tuple[Any, ...] = ()


class Member(NamedTuple):
    """``"key": value``. ``key`` is the key as JSON reads it, UTF-8; ``start`` is the byte of its opening quote."""

    key: bytes
    start: int
    value: Node


@dataclass(frozen=True, slots=True)
class RootScan:
    """How far a root object could be read.

    ``entries``: its complete members. ``entry_open``: it stopped inside a further one. ``ran_out``: it stopped because
    the bytes ended where a longer answer could have continued. ``closed``: it reached the root's ``}``. ``stop``: the
    byte from which nothing has been accounted for.
    """

    entries: tuple[Member, ...]
    entry_open: bool
    ran_out: bool
    closed: bool
    stop: int


class _Break(Exception):
    """Control flow inside the scanner: no valid JSON continues here."""

    def __init__(self, ran_out: bool) -> None:
        self.ran_out = ran_out


def read_string(body: bytes) -> str:
    """The text of a string's bytes between its quotes. Invalid bytes and escapes become U+FFFD."""
    text = body.decode("utf-8", errors="replace")
    if "\\" not in text:
        return text
    # A lone surrogate escape is legal JSON but no text: it could not be written to any file again.
    return json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", errors="replace")


def elements(array: Node, data: bytes) -> Sequence[Node]:
    """The values that an ARRAY or COORDS node holds."""
    if array.kind is Kind.ARRAY:
        return array.items
    return [Node(Kind.STRING, *match.span()) for match in _COORD_ELEMENT.finditer(data, array.start, array.end)]


def object_index(key: bytes) -> int | None:
    """n of the key ``object_{n}``; None for other keys, and for more than 18 digits, which only a repetition writes."""
    match = _OBJECT_KEY.fullmatch(key)
    return int(match[1]) if match else None


class Scanner:
    """Reads ``data[:end]``. ``coord_starts`` holds the byte offsets at which a coordinate token starts."""

    def __init__(self, data: bytes, end: int, coord_starts: Collection[int]) -> None:
        self.data = data
        self.end = end
        self.coord_starts = coord_starts
        self._key_inside = False  # an ``object_{n}`` key was read inside the present entry

    def skip_space(self, pos: int) -> int:
        """The first position from ``pos`` on that holds no JSON white space."""
        match = _SPACE.match(self.data, pos, self.end)
        assert match is not None  # the pattern matches the empty string
        return match.end()

    def scan_root(self, start: int) -> RootScan:
        """Read the object with its ``{`` at ``start``, as far as it is valid JSON."""
        data, end = self.data, self.end
        entries: list[Member] = []

        def stopped(at: int, *, entry_open: bool = False, ran_out: bool = False, closed: bool = False) -> RootScan:
            return RootScan(tuple(entries), entry_open, ran_out, closed, at)

        pos = start + 1
        if close := _OBJECT_END.match(data, pos, end):
            return stopped(close.end(), closed=True)
        while True:
            key = _KEY.match(data, pos, end)
            if key is None:
                at = self.skip_space(pos)
                ran_out = _CUT_KEY.match(data, pos, end) is not None
                if data[at:end].startswith(b'"'):
                    return stopped(at + 1, entry_open=True, ran_out=ran_out)
                return stopped(pos - 1, ran_out=ran_out)
            self._key_inside = False
            try:
                value = self._value(key.end(), 1)
            except _Break as stop:
                # With an entry's key inside, a "}" is missing before that key, and entries are lost in this one.
                ran_out = stop.ran_out and not self._key_inside
                return stopped(key.end(), entry_open=True, ran_out=ran_out)
            entries.append(Member(_key_bytes(key[1]), key.start(1) - 1, value))
            sep = _AFTER_MEMBER.match(data, value.end, end)
            if sep is None:
                return stopped(value.end, ran_out=_CUT_SPACE.match(data, value.end, end) is not None)
            if sep[1] == b"}":
                return stopped(sep.end(), closed=True)
            pos = sep.end()

    def _value(self, pos: int, depth: int) -> Node:
        match = _VALUE.match(self.data, pos, self.end)
        if match is None:
            self._stop(pos, _CUT_VALUE)
        group = match.lastindex
        if group == 1:
            return Node(Kind.STRING, match.start(1) - 1, match.end())
        if group == 2:
            if depth > MAX_DEPTH:
                raise _Break(ran_out=False)
            if match[2] == b"{":
                return self._object(match.start(2), depth)
            if coords := _COORDS.match(self.data, match.start(2), self.end):
                return Node(Kind.COORDS, coords.start(), coords.end())
            return self._array(match.start(2), depth)
        if group == 3:
            # The same letters spelled by ordinary tokens are not a coordinate, so this is not JSON.
            if match.start(3) not in self.coord_starts:
                raise _Break(ran_out=False)
            return Node(Kind.COORD, match.start(3), match.end())
        if match.end() - match.start(4) > MAX_NUMBER_BYTES:
            raise _Break(ran_out=False)
        return Node(Kind.SCALAR, match.start(4), match.end())

    def _object(self, start: int, depth: int) -> Node:
        data, end = self.data, self.end
        pos = start + 1
        if close := _OBJECT_END.match(data, pos, end):
            return Node(Kind.OBJECT, start, close.end())
        members: list[Member] = []
        while True:
            # If nested too deep, not even an array of coordinates is allowed.
            match = (_FIELD.match(data, pos, end) if depth < MAX_DEPTH else None) or _KEY.match(data, pos, end)
            if match is None:
                self._stop(pos, _CUT_KEY)
            key = _key_bytes(match[1])
            self._key_inside = self._key_inside or (key.startswith(b"object_") and object_index(key) is not None)
            if match.re is _FIELD:
                is_string = match.start(2) >= 0
                value = Node(Kind.STRING, *match.span(2)) if is_string else Node(Kind.COORDS, *match.span(3))
                sep = match
            else:
                value = self._value(match.end(), depth + 1)
                sep = _AFTER_MEMBER.match(data, value.end, end)
            members.append(Member(key, match.start(1) - 1, value))
            if sep is None:
                self._stop(value.end, _CUT_SPACE)
            pos = sep.end()
            if data[pos - 1] == _CLOSING_BRACE:
                return Node(Kind.OBJECT, start, pos, tuple(members))

    def _array(self, start: int, depth: int) -> Node:
        data, end = self.data, self.end
        pos = start + 1
        if close := _ARRAY_END.match(data, pos, end):
            return Node(Kind.ARRAY, start, close.end())
        items: list[Node] = []
        while True:
            value = self._value(pos, depth + 1)
            items.append(value)
            sep = _AFTER_ELEMENT.match(data, value.end, end)
            if sep is None:
                self._stop(value.end, _CUT_SPACE)
            pos = sep.end()
            if sep[1] == b"]":
                return Node(Kind.ARRAY, start, pos, tuple(items))

    def _stop(self, pos: int, unfinished: re.Pattern[bytes]) -> NoReturn:
        raise _Break(ran_out=unfinished.match(self.data, pos, self.end) is not None)


def _key_bytes(body: bytes) -> bytes:
    # Keys compare as JSON reads them: "object\u005f1" is object_1, and a second object_1 must not be appended.
    return read_string(body).encode() if b"\\" in body else body
