"""Objects → the JSON text that the model writes: one line, ``", "`` and ``": "``, coordinates as quoted tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coordexp.coords.vocab import COORD_TOKENS
from coordexp.errors import AppendError
from coordexp.records import GTObject

_MARK = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)
FieldOrder = Literal["desc_first", "geometry_first"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Text and the half-open character ranges of its objects.

    ``desc_spans``: *inside* the quotes of each desc. ``entry_spans``: from the separator before an entry (or its key,
    if there is none) to after its closing brace.
    """

    text: str
    desc_spans: tuple[tuple[int, int], ...]
    entry_spans: tuple[tuple[int, int], ...]

    def after(self, text: str) -> Fragment:
        """The same objects with ``text`` before them."""
        by = len(text)
        return Fragment(
            text + self.text,
            tuple([(start + by, end + by) for start, end in self.desc_spans]),
            tuple([(start + by, end + by) for start, end in self.entry_spans]),
        )


def serialize_objects(objects: Sequence[GTObject], field_order: FieldOrder = "desc_first") -> str:
    """The whole answer for ``objects``: ``{"object_1": {…}, …}``; ``{}`` when there are none."""
    return "{" + serialize_append(objects, "{", 1, field_order)


def serialize_append(
    objects: Sequence[GTObject], prefix_text: str, start_index: int, field_order: FieldOrder = "desc_first"
) -> str:
    """Continue an open root object: entries ``object_{start_index}`` … and the closing brace.

    The leading comma follows the last non-whitespace character of ``prefix_text``: none after ``{`` or ``,``, one
    after ``}``; other characters are an error.

    Raises:
        AppendError: ``prefix_text`` is not append-ready (it ends elsewhere, inside a string, or not at the root's
            depth), or ends with a comma and there is nothing to append.
    """
    depth = 0
    for mark in _MARK.findall(prefix_text):
        if mark == '"':  # a string that does not end
            raise AppendError(f"cannot append after {prefix_text[-40:]!r}: it ends inside a string")
        depth += (mark in "{[") - (mark in "}]") if len(mark) == 1 else 0
    if depth != 1 and prefix_text.rstrip()[-1:] in ("{", ",", "}"):  # append_fragment refuses other ends
        raise AppendError(
            f"cannot append after {prefix_text[-40:]!r}: {depth} brackets are open there, not the root's alone"
        )
    return append_fragment(objects, prefix_text, start_index, field_order).text


def append_fragment(
    objects: Sequence[GTObject], prefix_text: str, start_index: int, field_order: FieldOrder
) -> Fragment:
    """:func:`serialize_append` with positions, for the prefix of a parsed rollout: only its last character is
    checked."""
    last = prefix_text.rstrip()[-1:]
    if last not in ("{", ",", "}"):
        raise AppendError(
            f"cannot append after {prefix_text[-40:]!r}: an append-ready prefix ends with '{{', ',' or '}}'"
        )
    if last == "," and not objects:
        raise AppendError("the prefix ends with a comma, but nothing follows; cut before the comma")
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    entries: list[tuple[int, int]] = []
    at = 0

    def write(piece: str) -> None:
        nonlocal at
        parts.append(piece)
        at += len(piece)

    for offset, obj in enumerate(objects):
        entry_start = at
        write(", " if offset or last == "}" else "")
        write(f'"object_{start_index + offset}": {{')
        desc = json.dumps(obj.desc, ensure_ascii=False)
        geometry = f'"{obj.kind}": [' + ", ".join([f'"{COORD_TOKENS[k]}"' for k in obj.bins]) + "]"
        if field_order == "geometry_first":
            write(geometry + ", ")
        write('"desc": ')
        spans.append((at + 1, at + len(desc) - 1))
        write(desc)
        if field_order == "desc_first":
            write(", " + geometry)
        write("}")
        entries.append((entry_start, at))
    write("}")
    return Fragment("".join(parts), tuple(spans), tuple(entries))
