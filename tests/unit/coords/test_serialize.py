"""Objects to text: the comma rule, numbering, field order and description spans."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.coords import COORD_TOKENS, append_fragment, serialize_append, serialize_objects
from coordexp.errors import AppendError
from coordexp.records import GTObject
from support.answers import CAT, LEAF, read_json

ONE = '{"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}'
A = GTObject("a", "bbox_2d", (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("prefix", "objects", "start", "fragment"),
    [
        ("{", [], 1, "}"),
        ("{", [A], 1, f'"object_1": {ONE}}}'),
        ("{ ", [A], 1, f'"object_1": {ONE}}}'),
        ("{,", [A], 1, f'"object_1": {ONE}}}'),
        ("{\n\t", [A], 1, f'"object_1": {ONE}}}'),
        ("{", [A, A], 4, f'"object_4": {ONE}, "object_5": {ONE}}}'),
        ('{"object_7": {}', [], 8, "}"),
        ('{"object_1": {"desc": "}{ \\"]["}', [], 2, "}"),  # brackets in strings do not count
        ('{"object_7": {}', [A], 8, f', "object_8": {ONE}}}'),
        ('{"object_7": {} ', [A], 8, f', "object_8": {ONE}}}'),
        ('{"object_7": {},', [A], 8, f'"object_8": {ONE}}}'),
        ('{"object_7": {}, ', [A], 8, f'"object_8": {ONE}}}'),
        ('{"note": {}', [A], 1, f', "object_1": {ONE}}}'),  # the comma follows the last character, not the keys
    ],
)
def test_append_follows_the_last_character(prefix: str, objects: list[GTObject], start: int, fragment: str) -> None:
    assert serialize_append(objects, prefix, start) == fragment


@pytest.mark.parametrize("prefix", ["", "  ", '{"object_1": [', '{"object_1": []', '{"object_1": "a"', "{\u200b"])
def test_append_elsewhere_is_refused(prefix: str) -> None:
    with pytest.raises(AppendError, match=re.escape(repr(prefix))):
        serialize_append([A], prefix, 1)


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        ('{"object_1": {', "2 brackets"),
        ('{"object_1": {"desc": {}', "2 brackets"),
        ('{"object_1": {"bbox_2d": [{}', "3 brackets"),
        ("{}", "0 brackets"),
        ('{"object_1": {}}', "0 brackets"),
        ('{"object_1": {"desc": "a}', "string"),
        ('{"object_1": {"desc": "a\\"}', "string"),
        ('{"object_1": {"desc": "}{"},"', "string"),
    ],
)
def test_append_outside_of_the_root_is_refused(prefix: str, named: str) -> None:
    with pytest.raises(AppendError, match=named):
        serialize_append([A], prefix, 2)


def test_trailing_comma_needs_an_object() -> None:
    with pytest.raises(AppendError, match="comma"):
        serialize_append([], '{"object_1": {},', 2)


def test_polygon_is_a_flat_quoted_list() -> None:
    assert serialize_objects([GTObject("t", "poly", (1, 2, 3, 4, 5, 6))]) == (
        '{"object_1": {"desc": "t", "poly": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>", '
        '"<|coord_5|>", "<|coord_6|>"]}}'
    )


@pytest.mark.parametrize("obj", [CAT, LEAF])
def test_field_order_swaps_the_two_fields_only(obj: GTObject) -> None:
    desc_first = read_json(serialize_objects([obj, obj], "desc_first"))
    geometry_first = read_json(serialize_objects([obj, obj], "geometry_first"))
    assert [[name for name, _ in body] for _, body in desc_first] == [["desc", obj.kind]] * 2
    assert [[name for name, _ in body] for _, body in geometry_first] == [[obj.kind, "desc"]] * 2
    assert [(key, sorted(body)) for key, body in desc_first] == [(key, sorted(body)) for key, body in geometry_first]


DESCS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
BOXES = st.tuples(*[st.integers(0, 999)] * 4)


@settings(max_examples=80)
@given(
    descs=st.lists(DESCS, max_size=4),
    box=BOXES,
    order=st.sampled_from(["desc_first", "geometry_first"]),
    start=st.integers(0, 99),
)
def test_text_is_json_and_spans_are_its_descriptions(descs, box, order, start) -> None:
    objects = [GTObject(desc, "bbox_2d", box) for desc in descs]
    fragment = append_fragment(objects, "{", start, order)
    assert fragment.text == serialize_append(objects, "{", start, order)
    assert "\n" not in fragment.text
    root = json.loads("{" + fragment.text)
    assert list(root) == [f"object_{start + i}" for i in range(len(descs))]
    assert [body["desc"] for body in root.values()] == descs
    assert all(body["bbox_2d"] == [COORD_TOKENS[k] for k in box] for body in root.values())
    assert [json.loads(f'"{fragment.text[a:b]}"') for a, b in fragment.desc_spans] == descs
    assert all(fragment.text[a - 1] == '"' == fragment.text[b] for a, b in fragment.desc_spans)


def test_non_ascii_is_kept() -> None:
    assert '"desc": "雪豹 🐆"' in serialize_objects([GTObject("雪豹 🐆", "bbox_2d", (1, 2, 3, 4))])


def test_what_no_answer_can_hold_is_refused() -> None:
    """Python would take -1 for the last coordinate token."""
    for bins in ((-1, 2, 3, 4), (1, 2, 3, 1000)):
        with pytest.raises(ValueError, match=r"'a' has a bin outside 0 … 999: \[-?1, 2, 3, (4|1000)\]"):
            serialize_append([GTObject("a", "bbox_2d", bins)], "{", 1)
    with pytest.raises(ValueError, match=r"field_order is 'desc'; write desc_first or geometry_first"):
        serialize_append([A], "{", 1, "desc")  # pyright: ignore[reportArgumentType]
