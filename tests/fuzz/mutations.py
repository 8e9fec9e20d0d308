"""Changes of a sound input by a seeded generator: the same seed gives the same input on every machine."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 255, 1 << 31, 1 << 62, 1 << 64, 10**30, 0.5, -0.0, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), float("-inf"), "", " ", "a", "1", "nan", "\ud800", "\0", "\u2028", "\x1b[2J", "é" * 300,
    "=1+1", "[1", "../../etc/passwd", "/etc/passwd", "/dev/zero", "C:\\a.jpg", "<image>", [], [1], [[[]]], [0] * 300,
    {}, {"a": {}}, {"id": 1}, "data:image/png;base64,AAAA", "http://127.0.0.1/x.png",
)  # fmt: skip
_WORDS = (
    *(b"0", b"-1", b"1e400", b"nan", b"inf", b"-", b"99999999999999999999999", b"0.1", b"1:30", b"~", b"null", b"true"),
    *(b"[", b"]", b"{", b"}", b"(", b")", b"'", b'"', b",", b";", b":", b"\t", b"\n", b"\r", b"\0", b"<", b">", b"</"),
    *(b"&amp;", b"&x;", b"<!--", b"<![CDATA[", b"<?xml version='1.0' encoding='utf-16'?>", b"<!DOCTYPE a>"),
    *(b"<?xml version='1.0' encoding='punycode'?>", b'<!DOCTYPE a [<!ENTITY b "c">]>'),
    *(b'<!DOCTYPE a [<!ATTLIST b c CDATA "d">]>', b"[" * 20_000, b"? " * 2_000, b"2001-99-99", b"#", b"&a "),
    *(b"*a", b"<<: ", b"!!python/name:os", b"? ", b"- ", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80"),
    *(b"\xe2\x80\xa8", b"\\"),
    *(b"\\ud800", b"../", b"/", b"%00", b"${env:HOME}", b"a" * 300, "手".encode(), b"=1+1", b"\x1b[2J"),
)
_TOKEN = re.compile(rb"-?\d+\.?\d*|\w+|[^\w\s]|\s+")
_MOST = 4  # changes of one input


def mutate(draw: random.Random, data: bytes) -> bytes:
    """``data`` after one to four changes: of the values of JSON, of words, of bytes."""
    values = _lines_of_json(data)
    for _ in range(draw.randint(1, _MOST)):
        kind = draw.random()
        if values is not None and kind < 0.5:
            at = draw.randrange(len(values))
            values[at] = change_value(draw, values[at])
            data = b"\n".join(json.dumps(value).encode() for value in values)
        else:
            values = None  # the rest may not be JSON
            data = change_words(draw, data) if kind < 0.85 else change_bytes(draw, data)
    return data


def _lines_of_json(data: bytes) -> list[Any] | None:
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()] or None
    except (ValueError, RecursionError):
        return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    # Each container inside `value` with each of its keys.
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


def change_value(draw: random.Random, value: Any) -> Any:
    """``value`` with one of its parts replaced, removed, repeated, renamed or wrapped."""
    places = list(_places(value))
    if not places or draw.random() < 0.03:
        return copy.deepcopy(draw.choice(ODD))  # later changes must not change the next input
    inside, key = draw.choice(places)
    match draw.choice(("replace", "replace", "replace", "remove", "repeat", "rename", "wrap", "move")):
        case "remove":
            del inside[key]
        case "repeat" if isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        case "rename" if isinstance(inside, dict):
            inside[draw.choice((str(key).upper(), f"{key}s", "", "id", "name"))] = inside.pop(key)
        case "wrap":
            inside[key] = [inside[key]] if draw.random() < 0.5 else {"a": inside[key]}
        case "move":
            other, place = draw.choice(places)
            inside[key] = json.loads(json.dumps(other[place])) if _has(other, place) else None
        case _:
            inside[key] = copy.deepcopy(draw.choice(ODD))
    return value


def _has(inside: Any, key: Any) -> bool:
    return key in inside if isinstance(inside, dict) else key < len(inside)


def change_words(draw: random.Random, data: bytes) -> bytes:
    """A number, word or sign replaced, removed, repeated or swapped; or a line so."""
    parts = data.splitlines(keepends=True) if draw.random() < 0.2 else _TOKEN.findall(data)
    if not parts:
        return draw.choice(_WORDS)
    at = draw.randrange(len(parts))
    match draw.choice(("replace", "replace", "insert", "remove", "repeat", "swap")):
        case "replace":
            parts[at] = draw.choice(_WORDS)
        case "insert":
            parts.insert(at, draw.choice(_WORDS))
        case "remove":
            del parts[at]
        case "repeat":
            parts[at] *= draw.choice((2, 3, 500))
        case _:
            other = draw.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
    return b"".join(parts)


def change_bytes(draw: random.Random, data: bytes) -> bytes:
    """Bits turned, bytes replaced, inserted, removed or moved, or the end cut off. Places at the front are likelier:
    the headers of pictures are there."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = int(len(changed) * draw.random() ** draw.choice((1, 3)))
        span = draw.choice((1, 1, 2, 4, 16, 200))
        match draw.choice(("turn", "turn", "number", "number", "random", "insert", "remove", "copy", "cut")):
            case "turn" if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case "number":
                odd = draw.choice((0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
                size = draw.choice((1, 2, 4))
                changed[at : at + size] = (odd & ((1 << 8 * size) - 1)).to_bytes(size, draw.choice(("big", "little")))
            case "insert":
                changed[at:at] = draw.randbytes(span)
            case "remove":
                del changed[at : at + span]
            case "copy":
                start = draw.randrange(len(changed) + 1)
                changed[at : at + span] = changed[start : start + span]
            case "cut" if draw.random() < 0.3:
                del changed[at:]
            case _:
                changed[at : at + span] = draw.randbytes(span)
    return bytes(changed)
