"""What is written reads back unchanged, and appears whole or not at all."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import read_jsonl, write_jsonl
from coordexp.errors import DataError
from coordexp.records import GTObject, ImageRecord

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


def test_images_are_written_relative_to_the_file(tmp_path: Path) -> None:
    write_jsonl([record(tmp_path / "images"), record(tmp_path.parent)], tmp_path / "set.jsonl")
    lines = [json.loads(text) for text in (tmp_path / "set.jsonl").read_text().splitlines()]
    assert [entry["images"] for entry in lines] == [["images/a.png"], ["../a.png"]]


def test_a_dataset_still_reads_after_it_moved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write_jsonl([record(tmp_path / "old" / "images")], tmp_path / "old" / "set.jsonl")
    (tmp_path / "old").rename(tmp_path / "new")
    assert read_jsonl(tmp_path / "new" / "set.jsonl")[0].image == tmp_path / "new" / "images" / "a.png"


def test_only_soft_objects_say_so(tmp_path: Path) -> None:
    write_jsonl(
        [record(tmp_path, GTObject("a", "bbox_2d", (0, 0, 9, 9)), GTObject("b", "poly", (0, 0, 9, 9, 0, 9), 0.8))],
        tmp_path / "set.jsonl",
    )
    objects = json.loads((tmp_path / "set.jsonl").read_text())["objects"]
    assert objects == [{"desc": "a", "bbox_2d": [0, 0, 9, 9]}, {"desc": "b", "poly": [0, 0, 9, 9, 0, 9], "soft": 0.8}]


BAD_RECORDS = [
    ("inverted", [GTObject("a", "bbox_2d", (9, 0, 1, 1))], {}, "inverted"),
    ("pixels", [GTObject("a", "bbox_2d", (0, 0, 1, 1000))], {}, "not pixels"),
    ("empty desc", [GTObject("", "bbox_2d", (0, 0, 1, 1))], {}, "desc is empty"),
    ("soft", [GTObject("a", "bbox_2d", (0, 0, 1, 1), 1.5)], {}, "soft must be a number above 0"),
    ("surrogate", [GTObject("\ud800", "bbox_2d", (0, 0, 1, 1))], {}, "cannot write anything"),
    ("metadata", [], {"at": float("nan")}, "cannot write anything"),
    ("metadata type", [], {"at": Path("a")}, "cannot write anything"),
]


@pytest.mark.parametrize(("objects", "metadata", "part"), [c[1:] for c in BAD_RECORDS], ids=[c[0] for c in BAD_RECORDS])
def test_what_the_reader_would_refuse_is_not_written_and_the_old_file_stays(
    tmp_path: Path, objects: list[GTObject], metadata: dict[str, Any], part: str
) -> None:
    path = tmp_path / "set.jsonl"
    write_jsonl([record(tmp_path)], path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=part):
        write_jsonl([record(tmp_path), record(tmp_path, *objects, **metadata)], path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "a temporary file was left behind"
