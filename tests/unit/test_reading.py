"""Users' files are read, or refused in words: also those that would end the process, or fill its memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from coordexp.config.source import apply_arguments, read_document
from coordexp.data.class_list import read_class_list
from coordexp.data.convert.csv_table import read_table
from coordexp.errors import ConfigError, CoordExpError, DataError
from coordexp.reading import read_json, read_text, read_xml, read_yaml
from coordexp.records import read_lines

DEEP = "nested too deeply"
MUCH = "more than 100,000 keys and values"
LOOKS = "not what it looks like"
BOMB = "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 10))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{k}: &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * 9)}]}}\n" for k in range(1, 10))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}]\n" for k in range(1, 1000))


@pytest.mark.parametrize("read", [read_yaml, read_document, read_class_list])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, DEEP),
        ("- " * 100_000, DEEP),
        ("{a: " * 100_000, DEEP),
        (CHAIN, DEEP),
        (BOMB, MUCH),
        (MERGED, MUCH),
        ("a: &a\n  b: *a\n", "this alias contains itself"),
        ("a: *b\n", "undefined alias"),
    ],
)
def test_yaml_that_grows_is_refused(read: Callable[[Path], object], text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(CoordExpError, match=says) as caught:
        read(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400


def test_a_nested_word_of_the_command_line_is_refused() -> None:
    document = read_document("configs/stage1/sft.yaml")
    apply_arguments(document, ["seed=" + "[" * 100_000])
    assert [DEEP in problem.message for problem in document.problems] == [True]


@pytest.mark.parametrize(
    "value",
    ["2001-99-99", "!!timestamp x", "!!bool x", "!!int ''", "9" * 5000, "1" + ":1" * 5000, "1" + ":1" * 500 + ".5"],
)
def test_a_yaml_value_that_cannot_be_made_is_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(f"names: [{value}]\n")
    with pytest.raises(DataError, match=LOOKS):
        read_yaml(tmp_path / "data.yaml")


def test_aliases_and_nesting_of_people_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a [1, &b {c: 2}]\nb: [*a, *b]\nd: &c 3\ne: *c\nf: " + "[" * 98 + "]" * 98)
    content = read_yaml(path)
    assert (content["b"], content["e"]) == ([[1, {"c": 2}], {"c": 2}], 3)
    path.write_text("names:\n" + "".join(f"  {k}: class {k}\n" for k in range(60_000)))
    assert len(read_class_list(path)) == 60_000


ENTITIES = '<!DOCTYPE a [<!ENTITY e0 "x">' + "".join(f'<!ENTITY e{k} "&e{k - 1};">' for k in range(1, 100_000))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ENTITIES + "]><a>&e99999;</a>", "declares <!ENTITY"),
        ('<!DOCTYPE a SYSTEM "x>y" [<!ENTITY % p "x">]><a/>', "declares <!ENTITY"),
        (f'<!DOCTYPE a [<!ATTLIST b c CDATA "{"x" * 10_000}">]><a>{"<b/>" * 10_000}</a>', "declares <!ATTLIST"),
        (f'<?xml version="1.0" encoding="punycode"?><a>{"x" * 1_000_000}</a>', "'punycode' is not read"),
        ('<?xml version="1.0" encoding="zip"?><a/>', "is not read"),
        ('<?xml version="1.0" encoding="klingon"?><a/>', "unknown encoding"),
        ("<a>", "broken XML"),
    ],
)
def test_xml_that_grows_or_names_no_encoding_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(DataError, match=says):
        read_xml(tmp_path / "a.xml")


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("", "utf-8"),
        ("<!DOCTYPE annotation>", "utf-8-sig"),
        ('<!DOCTYPE annotation SYSTEM "voc.dtd">', "utf-8"),
        ('\n<?xml version="1.0" encoding="gb18030"?>', "gb18030"),
        ('<?xml version="1.0" encoding="euc-kr"?>', "euc-kr"),
        ('<?xml version="1.0" encoding="utf-16"?>', "utf-16"),
        ('<?xml version="1.0" encoding="utf-16"?>', "utf-16-le"),
        ('<?xml version="1.0" encoding="utf-16"?>', "utf-8-sig"),  # as .NET's text writers do
        ("", "utf-16-be"),
    ],
)
def test_xml_is_read_in_its_encoding(head: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_bytes(f"{head}<annotation>手</annotation>".encode(encoding))
    assert read_xml(tmp_path / "a.xml").text == "手"


@pytest.mark.parametrize(
    "read", [read_text, read_json, read_yaml, read_xml, read_class_list, lambda path: list(read_lines(path))]
)
@pytest.mark.parametrize("name", ["/dev/zero", "pipe"])
def test_only_files_are_read(read: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is a device, a pipe or a socket; give a file"):
        read(tmp_path / name)
    with pytest.raises(ConfigError, match="is a device, a pipe or a socket; give a file"):
        read_document(tmp_path / name)


def test_a_long_value_is_shortened_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_text(f"names: [[{'x' * 1_000_000}]]")
    with pytest.raises(
        DataError, match=r"names.0. is .*x … 998,\d+ characters … x.* not text; put it in quotes"
    ) as caught:
        read_class_list(path)
    assert len(str(caught.value)) < 2000 and str(caught.value).startswith(str(path))
    path.write_text(f"a: &a {'x' * 1_000_000}\nnames: [[{'*a, ' * 1000}]]")
    with pytest.raises(DataError, match=MUCH):
        read_class_list(path)


def test_a_csv_cell_that_is_too_long_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"image,name,bbox\na.jpg,cat,0 0 1 1\na.jpg,{'x' * 200_000},0 0 1 1\n")
    with pytest.raises(DataError, match=re.escape(f"{path}:3: not readable as CSV: field larger than field limit")):
        read_table(path, None, True)


@pytest.mark.parametrize(
    ("text", "key"), [("a: 1\nb: 2\na: 3", "a"), ("names: {0: a, 0: b}", "0"), ("- {x: {y: 1, y: 1}}", "y")]
)
def test_a_key_that_is_given_twice_is_refused(text: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=f"the key '{key}' is given twice"):
        read_yaml(path)


def test_a_key_may_replace_that_of_a_mapping_that_is_merged_in(tmp_path: Path) -> None:
    path = tmp_path / "data.yaml"
    path.write_text("base: &base {x: 1, y: 2}\nother: &other {z: 3}\nown: {<<: *base, <<: *other, y: 4}\nagain: *base")
    assert read_yaml(path)["own"] == {"x": 1, "y": 4, "z": 3} and read_yaml(path)["again"] == {"x": 1, "y": 2}
