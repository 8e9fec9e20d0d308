"""What the quick way takes, the full rules take to the same record; what they refuse, it never takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordexp.data.quick_lines import quick_line
from coordexp.data.record_line import RefusedLine, parse_line
from coordexp.records import GEOMETRY_KINDS, GTObject, ImageRecord

PATH = Path("/data of/ä/set.jsonl")
BOX: dict[str, Any] = {"desc": "cup", "bbox_2d": [1, 2, 30, 40]}
POLYGON: dict[str, Any] = {"desc": "leaf", "poly": [1, 2, 30, 40, 5, 6]}
GOOD: dict[str, Any] = {"images": ["a/b.png"], "width": 8, "height": 6, "objects": [BOX, POLYGON]}


def quick(text: bytes) -> ImageRecord | None:
    found = quick_line(text, str(PATH.parent))
    if found is None:
        return None
    objects = [
        GTObject(desc, GEOMETRY_KINDS[kind], tuple(shape), soft)
        for desc, kind, shape, soft in zip(found.descs, found.kinds, found.shapes, found.softs, strict=True)
    ]
    image = Path(os.fsdecode(found.image))
    return ImageRecord(f"{PATH.name}:3", image, found.width, found.height, tuple(objects), found.metadata)


def full(text: bytes) -> ImageRecord | None:
    try:
        return parse_line(text, path=PATH, line=3)
    except RefusedLine:
        return None


def agree(text: bytes) -> bool:
    """Whether the quick way takes the line; it must then be to the record of the full rules, types included."""
    found = quick(text)
    assert found is None or repr(found) == repr(full(text))
    return found is not None


WORDS = st.text(max_size=6) | st.sampled_from(
    ["cup", "<|x|>", " ä ", "e\u0301", "\ud800", 'a"b', "a\\b", "\\", "\u2028"]
)
NUMBERS = st.integers(-2, 1001) | st.sampled_from([0, 999, 1000, 1.0, 1e2, True, None, "<|coord_5|>", 10**30, "7"])
SHAPES = st.lists(st.integers(0, 999), max_size=9) | st.lists(NUMBERS, min_size=4, max_size=6) | NUMBERS
SOFT = st.floats(allow_nan=True) | st.sampled_from([0, 1, 0.5, 1e-320, True, None, 2])
FIELDS = st.fixed_dictionaries(
    {"desc": WORDS}, optional={"bbox_2d": SHAPES, "poly": SHAPES, "soft": SOFT, "more": NUMBERS}
)
OBJECTS = st.just(BOX) | st.just(POLYGON) | FIELDS
PARTS = st.sampled_from(["a.png", "..", ".", "", "b", " ", "ü", "/", "x.tar", "\0", "\udc80"])
IMAGES = st.lists(PARTS, max_size=5).map("/".join)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
LINES = st.fixed_dictionaries(
    {"objects": st.lists(OBJECTS, max_size=3)},
    optional={
        "images": IMAGES.map(lambda image: [image]) | st.lists(IMAGES, max_size=2),
        "width": NUMBERS,
        "metadata": ANYTHING | st.dictionaries(WORDS, ANYTHING, max_size=2),
        "more": NUMBERS,
    },
)
SLOW = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(LINES, st.booleans())
def test_any_line_of_json(fields: dict[str, Any], ascii: bool) -> None:
    agree(json.dumps(GOOD | fields, ensure_ascii=ascii).encode("utf-8", "surrogatepass"))


RICH = json.dumps(
    GOOD | {"objects": [BOX | {"soft": 0.5}, POLYGON], "metadata": {"a": [1, {"b": "c\u00e4"}], "prepared": {"f": 3}}}
).encode()
STRUCTURE = [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b" ", b"0", b"-", b".", b"e5", b"null"]
BYTES = [b"\xff", b"\xc3", b"\0", b"\t", b'\\"', b"\\\\", b"\\u0041", b"\\ud800", b"\xef\xbb\xbf"]
PIECES = [*STRUCTURE, *BYTES, b'"width":', b'"desc":"x",', b'"metadata":{},']


@SLOW
@given(
    st.lists(
        st.tuples(st.integers(0, len(RICH)), st.integers(0, 9), st.sampled_from([b"", *PIECES])), min_size=1, max_size=3
    )
)
def test_any_damage_to_a_line(changes: list[tuple[int, int, bytes]]) -> None:
    text = RICH
    for at, cut, put in changes:
        text = text[:at] + put + text[at + cut :]
    agree(text)


@SLOW
@given(st.integers(0, len(RICH)), st.integers(0, len(RICH)), st.integers(0, len(RICH)))
def test_any_part_of_a_line_that_stands_twice(start: int, stop: int, at: int) -> None:
    agree(RICH[:at] + RICH[start:stop] + RICH[at:])


TAKEN = {
    "plain": GOOD,
    "no objects": GOOD | {"objects": []},
    "soft, a whole number": GOOD | {"objects": [BOX | {"soft": 1}]},
    "metadata": GOOD | {"metadata": {"prepared": {"factor": 32}, "id": [1.5, None, "a\u00e4"]}},
    "empty metadata": GOOD | {"metadata": {}},
    "escaped quotes": GOOD | {"objects": [BOX | {"desc": 'a "b" cup'}], "metadata": {'"': '"'}},
    "another script": GOOD | {"objects": [BOX | {"desc": " 杯子 "}], "images": ["图/杯.png"]},
    "an absolute image": GOOD | {"images": ["//x/../y//z.png"]},
    "an image above": GOOD | {"images": ["../../z.png"]},
}


@pytest.mark.parametrize("fields", TAKEN.values(), ids=TAKEN)
def test_lines_as_they_are_written_are_taken(fields: dict[str, Any]) -> None:
    for ascii in (False, True):
        assert agree(json.dumps(fields, ensure_ascii=ascii).encode() + b"\r\n")


LEFT = {
    "a key twice": b'{"width": 8, ' + json.dumps(GOOD).encode()[1:],
    "a key twice in an object": json.dumps(GOOD).encode().replace(b'"desc": "leaf"', b'"desc": "a", "desc": "leaf"'),
    "a key twice in metadata": json.dumps(GOOD).encode()[:-1] + b', "metadata": {"a": 1, "a": 2}}',
    "metadata twice": json.dumps(GOOD).encode()[:-1] + b', "metadata": {}, "metadata": {}}',
    "soft, null": json.dumps(GOOD | {"objects": [BOX | {"soft": None}]}).encode(),
    "both kinds": json.dumps(GOOD | {"objects": [BOX | POLYGON]}).encode(),
    "half a point": json.dumps(GOOD | {"objects": [POLYGON | {"poly": [1] * 7}]}).encode(),
    "inverted": json.dumps(GOOD | {"objects": [BOX | {"bbox_2d": [9, 9, 1, 1]}]}).encode(),
    "a control token": json.dumps(GOOD | {"objects": [BOX | {"desc": "<|im_end|>"}]}).encode(),
    "a NaN": json.dumps(GOOD | {"metadata": {"a": float("nan")}}).encode(),
    "not UTF-8": json.dumps(GOOD | {"metadata": {"a": "?"}}).encode().replace(b"?", b"\xff"),
    "nested too deeply": json.dumps(GOOD).encode()[:-1]
    + b', "metadata": {"a":'
    + b"[" * 90_000
    + b"]" * 90_000
    + b"}}",
}


@pytest.mark.parametrize("text", LEFT.values(), ids=LEFT)
def test_lines_that_the_full_rules_refuse_are_left_to_them(text: bytes) -> None:
    assert quick(text) is None and full(text) is None
