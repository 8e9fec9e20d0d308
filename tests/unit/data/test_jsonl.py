"""The JSONL contract: valid lines, the errors of invalid ones, and writing."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from coordexp.data import check_dataset, order_objects, read_jsonl, write_jsonl
from coordexp.errors import DataError
from coordexp.records import GTObject, ImageRecord

# --- reading ---

BOX = {"desc": "cup", "bbox_2d": [1, 2, 30, 40]}


def line(**changes: Any) -> str:
    """A good line with some fields changed; ``None`` takes a field out."""
    fields: dict[str, Any] = {"images": ["a.png"], "width": 8, "height": 6, "objects": [BOX]}
    fields.update(changes)
    return json.dumps({key: value for key, value in fields.items() if value is not None})


def with_object(**fields: Any) -> str:
    return line(objects=[BOX, fields])


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "set.jsonl"
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in lines) + b"\n")
    return path


def save_image(path: Path, size: tuple[int, int] = (8, 6), **options: Any) -> None:
    Image.new("RGB", size, (9, 99, 199)).save(path, **options)


BAD_LINES = [
    ("broken json", '{"images": ["a.png"], ', ["broken JSON", "column"]),
    ("two values", line() + line(), ["broken JSON"]),
    ("not an object", "[1, 2]", ["expected a JSON object", "images, width, height, objects"]),
    ("not utf-8", b'{"images": ["\xff"]}', ["not UTF-8", "byte 14"]),
    ("byte order mark", "\ufeff" + line(), ["byte order mark"]),
    ("NaN", '{"images": ["a.png"], "width": NaN}', ["NaN is not a JSON value"]),
    ("huge integer", '{"width": ' + "9" * 5000 + "}", ["unreadable JSON"]),
    ("nested too deeply", "[" * 100_000, ["JSON"]),
    ("duplicate key", '{"width": 1, "width": 2}', ["duplicate key 'width'"]),
    ("duplicate key in object", line()[:-3] + ', "desc": "mug"}]}', ["duplicate key 'desc'"]),
    ("unknown key", line(imagse=["b.png"]), ["field 'imagse'", "valid fields: images"]),
    ("unknown far key", line(zzz=1), ["unknown field 'zzz'", "valid fields: images, width"]),
    ("unknown object key", with_object(desc="a", bbox=[1] * 4), ["objects[1]", "'bbox'", "valid fields: desc"]),
    ("missing fields", line(width=None, objects=None), ["missing width, objects", "objects may be []"]),
    ("images empty", line(images=[]), ["exactly one path", "[] (list)"]),
    ("images two", line(images=["a.png", "b.png"]), ["exactly one path"]),
    ("images a string", line(images="a.png"), ["exactly one path", "'a.png' (str)"]),
    ("images a number", line(images=[3]), ["exactly one path"]),
    ("images blank", line(images=[" "]), ["exactly one path"]),
    ("images NUL", line(images=["a\0.png"]), ["NUL"]),
    ("width zero", line(width=0), ["width must be a positive integer", "0 (int)"]),
    ("width huge", line(width=1 << 31), ["width must be a positive integer of at most 31 bits", "2147483648 (int)"]),
    ("width bool", line(width=True), ["width must be a positive integer", "True (bool)"]),
    ("height float", line(height=6.0), ["height must be a positive integer", "6.0 (float)"]),
    ("objects a mapping", line(objects={}), ["objects must be a list", "[] for an empty image"]),
    ("object a list", line(objects=[BOX, [1]]), ["objects[1]", "expected a JSON object with desc"]),
    ("earlier rule", line(metadata={"bin_rule": "pixel_centres"}), ["convert or train again", "delete bin_rule"]),
    ("unknown rule", line(metadata={"bin_rule": "W"}), ["metadata.bin_rule is 'W'", "from edge to edge"]),
    ("metadata a list", line(metadata=[1]), ["metadata must be a JSON object"]),
    ("desc missing", with_object(bbox_2d=[1, 2, 3, 4]), ["objects[1]", "missing desc"]),
    ("desc empty", with_object(desc=" \u3000 ", bbox_2d=[1, 2, 3, 4]), ["objects[1]", "desc is empty"]),
    ("desc number", with_object(desc=7, bbox_2d=[1, 2, 3, 4]), ["desc must be a string", "7 (int)"]),
    ("desc newline", with_object(desc="a\nb", bbox_2d=[1, 2, 3, 4]), ["control character U+000A"]),
    ("desc line separator", with_object(desc="a\u2028b", bbox_2d=[1, 2, 3, 4]), ["control character U+2028"]),
    ("desc paragraph", with_object(desc="a\u2029b", bbox_2d=[1, 2, 3, 4]), ["control character U+2029"]),
    ("desc surrogate", with_object(desc="a\ud800", bbox_2d=[1, 2, 3, 4]), ["control character U+D800"]),
    ("desc turn end", with_object(desc="a<|im_end|>", bbox_2d=[1, 2, 3, 4]), ["'<|im_end|>'", "control token"]),
    ("desc coord token", with_object(desc="<|coord_5|>", bbox_2d=[1, 2, 3, 4]), ["'<|coord_5|>'", "control token"]),
    ("no geometry", with_object(desc="a"), ["objects[1]", "exactly one of bbox_2d or poly", "neither"]),
    ("two geometries", with_object(desc="a", bbox_2d=[1, 2, 3, 4], poly=[1] * 6), ["exactly one of", "both"]),
    ("bbox null", with_object(desc="a", bbox_2d=None), ["bbox_2d must be a flat list", "None"]),
    ("bbox of 5", with_object(desc="a", bbox_2d=[1, 2, 3, 4, 5]), ["bbox_2d has 5 values", "expected 4"]),
    ("bbox x inverted", with_object(desc="a", bbox_2d=[50, 2, 30, 9]), ["inverted", "x + width"]),
    ("bbox y inverted", with_object(desc="a", bbox_2d=[1, 20, 30, 9]), ["inverted", "[x1, y1, x2, y2]"]),
    ("polygon of 7", with_object(desc="a", poly=[1] * 7), ["objects[1]", "poly has 7 values", "even number >= 6"]),
    ("polygon of 4", with_object(desc="a", poly=[1] * 4), ["poly has 4 values", "3 points"]),
    ("polygon of pairs", with_object(desc="a", poly=[[1, 2], [3, 4], [5, 6]]), ["poly[0] is a list", "flat"]),
    ("value 1000", with_object(desc="a", bbox_2d=[1, 2, 3, 1000]), ["bbox_2d[3] is 1000", "not pixels", "999 * x"]),
    ("value negative", with_object(desc="a", bbox_2d=[-1, 2, 3, 4]), ["bbox_2d[0] is -1", "0..999"]),
    ("value float", with_object(desc="a", bbox_2d=[0.1, 2, 3, 4]), ["bbox_2d[0] is 0.1 (float)", "norm1000 integers"]),
    ("value whole float", with_object(desc="a", bbox_2d=[1.0, 2, 3, 4]), ["bbox_2d[0] is 1.0 (float)"]),
    ("value bool", with_object(desc="a", bbox_2d=[True, 2, 3, 4]), ["bbox_2d[0] is True (bool)"]),
    ("value string", with_object(desc="a", bbox_2d=["1", 2, 3, 4]), ["bbox_2d[0] is '1'", "<|coord_0|>"]),
    ("token 1000", with_object(desc="a", bbox_2d=["<|coord_1000|>", 2, 3, 4]), ["<|coord_1000|>", "<|coord_999|>"]),
    *(
        (f"soft {weight!r}", with_object(**BOX, soft=weight), ["objects[1]", "soft must be a number above 0", shown])
        for weight, shown in [(True, "True (bool)"), (0, "0 (int)"), (1.01, "1.01 (float)"), ("0.8", "'0.8' (str)"),
                              (None, "leave it out")]
    ),
    ("token padded", with_object(desc="a", bbox_2d=["<|coord_007|>", 2, 3, 4]), ["'<|coord_007|>'", "expected"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "parts"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES])
def test_a_bad_line_is_refused_with_file_line_and_fix(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    # A byte order mark is at the start of a file, and so on line 1.
    at_start = isinstance(text, str) and text.startswith("\ufeff")
    path = write(tmp_path, text) if at_start else write(tmp_path, line(), text)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{1 if at_start else 2}: ")
    for part in parts:
        assert part in message
    assert caught.value.line == (1 if at_start else 2)


def test_a_line_becomes_a_record(tmp_path: Path) -> None:
    cafe = {"desc": "  cafe\u0301 ☕ ", "bbox_2d": ["<|coord_0|>", 2, 2, "<|coord_999|>"]}
    leaf = {"desc": "leaf", "poly": [5, 5, 9, 5, 7, 8]}
    text = line(images=["sub/../a.png"], objects=[cafe, leaf], metadata={"source": [1]})
    (record,) = read_jsonl(write(tmp_path, "", text))
    assert record.sample_id == "set.jsonl:2"
    assert record.image == tmp_path / "a.png"
    assert (record.width, record.height) == (8, 6)
    assert record.objects == (
        GTObject("caf\u00e9 ☕", "bbox_2d", (0, 2, 2, 999)),
        GTObject("leaf", "poly", (5, 5, 9, 5, 7, 8)),
    )
    assert record.metadata == {"source": [1]}


def test_an_empty_image_an_absolute_path_and_a_degenerate_box_are_legal(tmp_path: Path) -> None:
    path = write(
        tmp_path, line(objects=[]), line(images=["/data/b.png"]), with_object(desc="dot", bbox_2d=[4, 4, 4, 4])
    )
    empty, absolute, dot = read_jsonl(path)
    assert empty.objects == ()
    assert absolute.image == Path("/data/b.png")
    assert dot.objects[1].bins == (4, 4, 4, 4)


def test_a_line_separator_inside_a_string_does_not_split_the_line(tmp_path: Path) -> None:
    raw = json.dumps(json.loads(line(metadata={"note": "a\u2028b"})), ensure_ascii=False)
    assert read_jsonl(write(tmp_path, raw))[0].metadata == {"note": "a\u2028b"}


def test_limit_counts_records_and_stops_reading_after_them(tmp_path: Path) -> None:
    path = write(tmp_path, line(), "", line(), "{broken")
    assert [record.sample_id for record in read_jsonl(path, limit=2)] == ["set.jsonl:1", "set.jsonl:3"]
    with pytest.raises(DataError, match="limit"):
        read_jsonl(path, limit=0)


@pytest.mark.parametrize("content", [b"", b"\n  \n", None], ids=["empty", "blank lines", "missing"])
def test_a_file_without_records_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "set.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"set\.jsonl"):
        read_jsonl(path)


def test_one_error_lists_the_first_twenty_problems(tmp_path: Path) -> None:
    path = write(tmp_path, *["{broken"] * 12, line(), *[line(width=0)] * 13)
    with pytest.raises(DataError) as caught:
        read_jsonl(path)
    message = str(caught.value)
    assert "25 problems" in message and "… and 5 more" in message
    shown = [text for text in message.splitlines() if text.startswith(f"  {path}:")]
    assert len(shown) == 20
    assert f"{path}:12: broken JSON" in message and f"{path}:14: width must be" in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ["image not found", "gone.png"]),
        (b"not an image", ["not a readable image"]),
        (b"", ["not a readable image"]),
        ((10, 6), ["width=8, height=6", "10x6"]),
    ],
)
def test_an_unusable_image_is_named_with_its_line(tmp_path: Path, content: Any, parts: list[str]) -> None:
    save_image(tmp_path / "a.png")
    if isinstance(content, tuple):
        save_image(tmp_path / "gone.png", content)
    elif content is not None:
        (tmp_path / "gone.png").write_bytes(content)
    path = write(tmp_path, line(), line(images=["gone.png"]))
    records = read_jsonl(path)
    for check in (lambda: read_jsonl(path, check_images=True), lambda: check_dataset(records)):
        with pytest.raises(DataError, match=r"set\.jsonl:2: ") as caught:
            check()
        assert all(part in str(caught.value) for part in parts)


def test_the_size_is_that_of_the_upright_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    save_image(tmp_path / "a.png", (6, 8), exif=exif)
    assert len(read_jsonl(write(tmp_path, line()), check_images=True)) == 1


def test_bad_lines_and_images_are_reported_in_line_order(tmp_path: Path) -> None:
    path = write(tmp_path, line(images=["gone.png"]), "{broken", line(images=["gone.png"]))
    with pytest.raises(DataError) as caught:
        read_jsonl(path, check_images=True)
    message = str(caught.value)
    assert "3 problems" in message
    assert message.index(":1: ") < message.index(":2: broken") < message.index(":3: ")


OBJECTS = (
    GTObject("low", "bbox_2d", (0, 50, 10, 60)),
    GTObject("right", "bbox_2d", (90, 10, 99, 20)),
    GTObject("left", "poly", (40, 30, 20, 10, 5, 30)),
    GTObject("tie", "bbox_2d", (90, 10, 95, 15), 0.5),
)


def test_sorted_is_by_top_then_left_and_sorted_x_by_left_then_top_with_ties_in_file_order() -> None:
    assert [obj.desc for obj in order_objects(OBJECTS, "sorted")] == ["left", "right", "tie", "low"]
    assert [obj.desc for obj in order_objects(OBJECTS, "sorted_x")] == ["low", "left", "right", "tie"]
    assert order_objects(OBJECTS, "file") == OBJECTS


def test_random_order_is_a_seeded_permutation() -> None:
    orders = [order_objects(OBJECTS, "random", random.Random(seed)) for seed in range(12)]
    assert all(sorted(order, key=OBJECTS.index) == list(OBJECTS) for order in orders)
    assert len(set(orders)) > 3
    assert orders[5] == order_objects(OBJECTS, "random", random.Random(5))


def test_random_order_without_a_generator_and_unknown_orders_are_refused() -> None:
    with pytest.raises(DataError, match="random"):
        order_objects(OBJECTS, "random")
    with pytest.raises(DataError, match="center"):
        order_objects(OBJECTS, "center")  # type: ignore[arg-type]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["images", "width", "height", "objects", "desc", "bbox_2d", "poly"]) | st.text(), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_value_is_either_a_record_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    path = write(tmp_path_factory.getbasetemp(), json.dumps(value))
    with pytest.raises(DataError):
        read_jsonl(path)


# --- writing ---

bins = st.integers(0, 999)
descs = (
    st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1)
    .map(lambda text: unicodedata.normalize("NFC", text).strip())
    .filter(lambda text: text and "<|" not in text)
)
boxes = st.tuples(bins, bins, bins, bins).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)
rings = st.lists(st.tuples(bins, bins), min_size=3, max_size=9).map(lambda ps: tuple(v for p in ps for v in p))
softs = st.none() | st.floats(0, 1, exclude_min=True)
gt_objects = st.builds(GTObject, descs, st.just("bbox_2d"), boxes, softs) | st.builds(
    GTObject, descs, st.just("poly"), rings, softs
)


def record(folder: Path, *objects: GTObject, name: str = "a.png", **metadata: Any) -> ImageRecord:
    return ImageRecord("anything", folder / name, 8, 6, tuple(objects), metadata)


@given(st.lists(st.lists(gt_objects, max_size=5), min_size=1, max_size=4))
def test_objects_survive_the_round_trip(tmp_path_factory: pytest.TempPathFactory, images: list[list[GTObject]]) -> None:
    folder = tmp_path_factory.getbasetemp()
    written = [record(folder, *objects, name=f"{at}.png", at=at) for at, objects in enumerate(images)]
    assert write_jsonl(written, folder / "set.jsonl") == len(images)
    read = read_jsonl(folder / "set.jsonl")
    assert [r.objects for r in read] == [r.objects for r in written]
    assert [r.image for r in read] == [r.image for r in written]
    assert [dict(r.metadata) for r in read] == [dict(r.metadata) for r in written]


def test_images_are_relative_so_that_a_dataset_can_move(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write_jsonl([record(old / "images"), record(tmp_path)], old / "set.jsonl")
    lines = [json.loads(text) for text in (old / "set.jsonl").read_text().splitlines()]
    assert [entry["images"] for entry in lines] == [["images/a.png"], ["../a.png"]]
    old.rename(new)
    assert read_jsonl(new / "set.jsonl")[0].image == new / "images" / "a.png"


def test_only_soft_objects_have_the_field_soft(tmp_path: Path) -> None:
    write_jsonl(
        [record(tmp_path, GTObject("a", "bbox_2d", (0, 0, 9, 9)), GTObject("b", "poly", (0, 0, 9, 9, 0, 9), 0.8))],
        tmp_path / "set.jsonl",
    )
    objects = json.loads((tmp_path / "set.jsonl").read_text())["objects"]
    assert objects == [{"desc": "a", "bbox_2d": [0, 0, 9, 9]}, {"desc": "b", "poly": [0, 0, 9, 9, 0, 9], "soft": 0.8}]


@pytest.mark.parametrize(
    ("objects", "metadata", "part"),
    [
        ([GTObject("a", "bbox_2d", (9, 0, 1, 1))], {}, "inverted"),
        ([GTObject("a", "bbox_2d", (0, 0, 1, 1000))], {}, "not pixels"),
        ([GTObject("", "bbox_2d", (0, 0, 1, 1))], {}, "desc is empty"),
        ([GTObject("a", "bbox_2d", (0, 0, 1, 1), 1.5)], {}, "soft must be a number above 0"),
        ([GTObject("\ud800", "bbox_2d", (0, 0, 1, 1))], {}, "cannot write anything"),
        ([], {"at": float("nan")}, "cannot write anything"),
        ([], {"at": Path("a")}, "cannot write anything"),
    ],
)
def test_invalid_records_are_not_written_and_the_old_file_is_kept(
    tmp_path: Path, objects: list[GTObject], metadata: dict[str, Any], part: str
) -> None:
    path = tmp_path / "set.jsonl"
    write_jsonl([record(tmp_path)], path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=part):
        write_jsonl([record(tmp_path), record(tmp_path, *objects, **metadata)], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"
