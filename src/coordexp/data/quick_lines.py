"""Dataset lines that are right beyond doubt, decoded by types in a small part of the time that the full rules take.

It refuses nothing: whatever it is not certain of is left to :mod:`coordexp.data.record_line`, which alone knows the
rules' words. What it takes, the full rules take too, and to the same record; a property test holds the two together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from coordexp.data.record_line import BadText, absolute_image, clean_desc, load_json
from coordexp.records import GEOMETRY_KINDS, NUM_BINS

_Bin = Annotated[int, Meta(ge=0, lt=NUM_BINS)]
_Side = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_BOX, _POLYGON = (GEOMETRY_KINDS.index(kind) for kind in ("bbox_2d", "poly"))
_LINE_STRINGS = 5  # the four keys and the image's path
_OBJECT_STRINGS = 3  # two keys and the description
_DEEPEST = 100  # brackets; Python's own decoder counts the levels around it too


class _Object(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    desc: str
    bbox_2d: Annotated[list[_Bin], Meta(min_length=4, max_length=4)] | UnsetType = UNSET
    poly: Annotated[list[_Bin], Meta(min_length=6)] | UnsetType = UNSET
    soft: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET


class _Line(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    images: tuple[str]
    width: _Side
    height: _Side
    objects: list[_Object]
    metadata: Raw | UnsetType = UNSET


_DECODER = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class QuickLine:
    """A line's values: the image's absolute path in the file system's own bytes, its size in pixels, an entry per
    object (``kinds``: its place in ``GEOMETRY_KINDS``), and the metadata, an empty one for none."""

    image: bytes
    width: int
    height: int
    descs: list[str]
    kinds: list[int]
    shapes: Sequence[Sequence[int]]
    softs: list[float | None]
    metadata: Mapping[str, Any]


def quick_line(text: bytes, folder: str) -> QuickLine | None:
    """The values of a line whose relative image starts at the absolute ``folder``; None where the full rules must say
    what the line is, which may be right for all that."""
    try:
        line = _DECODER.decode(text)
        image = line.images[0]
        if "\0" in image or not image.strip():
            return None
        strings = _LINE_STRINGS + (_OBJECT_STRINGS * len(line.objects))
        descs: list[str] = []
        kinds: list[int] = []
        shapes: list[list[int]] = []
        softs: list[float | None] = []
        for obj in line.objects:
            box, poly, soft = obj.bbox_2d, obj.poly, obj.soft
            if box is not UNSET:
                if poly is not UNSET or box[2] < box[0] or box[3] < box[1]:
                    return None
                kinds.append(_BOX)
                shapes.append(box)
            elif poly is UNSET or len(poly) % 2:
                return None
            else:
                kinds.append(_POLYGON)
                shapes.append(poly)
            if soft is UNSET:
                softs.append(None)
            else:
                strings += 1
                softs.append(soft)
            descs.append(clean_desc(obj.desc))
        metadata: dict[str, Any] = {}
        if line.metadata is not UNSET:
            raw = bytes(line.metadata)
            found = _metadata(raw)
            if found is None:
                return None
            metadata = found
            strings += 1 + _strings(raw)
        # A key that stands twice, of which the decoder keeps one, is a string that the values have no place for.
        if b"\\\\" in text or _strings(text) != strings:
            return None
        file = os.fsencode(absolute_image(image, folder))
        return QuickLine(file, line.width, line.height, descs, kinds, shapes, softs, metadata)
    except (msgspec.MsgspecError, BadText, UnicodeError, RecursionError):
        return None


def _strings(text: bytes) -> float:
    """How many strings stand in JSON without an escaped backslash; not whole where it is none."""
    return (text.count(b'"') - text.count(b'\\"')) / 2


def _metadata(raw: bytes) -> dict[str, Any] | None:
    if raw.count(b"[") + raw.count(b"{") > _DEEPEST:
        return None
    found = load_json(raw)
    return found if isinstance(found, dict) else None
