"""``data check``: findings with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.data.convert import convert_voc
from coordexp.data.dataset_check import ERRORS, Finding, check_jsonl, histogram
from coordexp.data.jsonl import read_jsonl, write_jsonl
from coordexp.data.subset import pack
from coordexp.records import GTObject, ImageRecord
from support.annotation_folders import KEEP, paint, voc, voc_object

BOX = {"desc": "cat", "bbox_2d": [10, 20, 300, 400]}


def line(*objects: Any, image: str = "a.png", **fields: Any) -> str:
    return json.dumps({"images": [image], "width": 40, "height": 24, "objects": list(objects), **fields})


def tokens(*bins: int) -> list[str]:
    return [f"<|coord_{k}|>" for k in bins]


def check(folder: Path, *lines: str) -> list[tuple[Finding, str]]:
    paint(folder / "a.png")
    (folder / "torn.png").write_bytes(b"no image")
    path = folder / "data.jsonl"
    path.write_text("".join(text + "\n" for text in lines))
    return [(found.finding, found.detail) for found in check_jsonl(path).problems]


@pytest.mark.parametrize(
    ("text", "finding", "detail"),
    [
        ("no JSON", Finding.SCHEMA, "broken JSON"),
        (line({"desc": "", "bbox_2d": [1, 2, 3, 4]}), Finding.SCHEMA, "desc is empty"),
        (line({"desc": "cat", "bbox_2d": [500, 600, 100, 50]}), Finding.XYWH_LOOKING, "is inverted"),
        (line({"desc": "cat", "bbox_2d": tokens(500, 600, 100, 50)}), Finding.XYWH_LOOKING, "is inverted"),
        (line({"desc": "cat", "bbox_2d": tokens(900, 600, 850, 950)}), Finding.SCHEMA, "is inverted"),
        (line(BOX, {"desc": "cat", "bbox_2d": [900, 600, 850, 950]}), Finding.SCHEMA, "is inverted"),  # no x, y, w, h
        (line({"desc": "cat", "bbox_2d": [10, 20, 1300, 400]}), Finding.OUT_OF_RANGE, "not pixels"),
        (line(BOX, image="gone.png"), Finding.MISSING_IMAGE, "gone.png"),
        (line(BOX, image="torn.png"), Finding.UNREADABLE_IMAGE, "torn.png"),
        (line(BOX, width=41), Finding.SIZE_MISMATCH, "40"),
        (line({"desc": "cat", "bbox_2d": [5, 5, 5, 9]}), Finding.DEGENERATE, "objects[0] 'cat' bbox_2d [5, 5, 5, 9]"),
        (line({"desc": "cat", "poly": [1, 1, 5, 5, 9, 9]}), Finding.DEGENERATE, "poly"),
        (line(BOX, BOX), Finding.DUPLICATE_OBJECT, "objects[1]"),
    ],
)
def test_each_problem_is_one_finding(tmp_path: Path, text: str, finding: Finding, detail: str) -> None:
    ((found, said),) = check(tmp_path, text)
    assert found is finding and detail in said


def test_an_empty_image_is_a_warning_and_a_dataset_without_objects_an_error(tmp_path: Path) -> None:
    paint(tmp_path / "b.png", (41, 24))
    found = check(tmp_path, line(), line(BOX, image="b.png", width=41))
    assert found == [(Finding.EMPTY_IMAGE, "no objects")] and Finding.EMPTY_IMAGE not in ERRORS
    assert [finding for finding, _ in check(tmp_path, line()) if finding in ERRORS] == [Finding.NO_OBJECTS]


def test_spellings_of_one_class_are_found(tmp_path: Path) -> None:
    objects = [BOX, BOX | {"desc": "Cat"}, BOX | {"desc": "traffic light"}, BOX | {"desc": "traffic_light"}]
    found = check(tmp_path, line(*objects))
    assert [finding for finding, _ in found] == [Finding.SPELLING] * 2
    assert "'cat' (1), 'Cat' (1)" in found[0][1]


def test_a_valid_dataset_has_no_findings(tmp_path: Path) -> None:
    assert check(tmp_path, line(BOX, {"desc": "leaf", "poly": [1, 1, 90, 1, 90, 90]})) == []


def test_soft_objects_are_counted(tmp_path: Path) -> None:
    soft = {**BOX, "soft": 0.5}
    assert check(tmp_path, line(BOX, {**soft, "desc": "dog"}), line(soft, BOX))[0][0] is Finding.DUPLICATE_OBJECT
    found = check_jsonl(tmp_path / "data.jsonl").to_json()
    assert (found["objects"], found["soft_objects"], found["errors"]) == (4, 2, 0)


def test_an_image_used_twice_and_one_stored_twice(tmp_path: Path) -> None:
    paint(tmp_path / "copy.png")
    found = check(tmp_path, line(BOX), line(BOX), line(BOX, image="copy.png"))
    assert [finding for finding, _ in found] == [Finding.DUPLICATE_IMAGE] * 2
    assert "a.png in data.jsonl:1, data.jsonl:2" in found[0][1]
    assert "same bytes in data.jsonl:1, data.jsonl:3" in found[1][1]


def test_copies_in_shards_of_different_sizes(tmp_path: Path) -> None:
    paint(tmp_path / "copy.png")
    paint(tmp_path / "large.bmp", (200, 100))
    check(tmp_path, line(BOX), line(image="large.bmp", width=200, height=100), line(BOX, image="copy.png"))
    pack(read_jsonl(tmp_path / "data.jsonl"), tmp_path / "packed" / "data.jsonl", 4000)
    assert len({shard.stat().st_size for shard in (tmp_path / "packed").glob("*.tar")}) == 2
    found = [one.detail for one in check_jsonl(tmp_path / "packed" / "data.jsonl").problems]
    assert "images with the same bytes in data.jsonl:1, data.jsonl:3" in found


def test_samples_that_are_too_long(tmp_path: Path) -> None:
    check(tmp_path, line(), line(BOX), line(BOX, {**BOX, "desc": "dog"}))
    found = check_jsonl(tmp_path / "data.jsonl", count_tokens=lambda r: 10 + 30 * len(r.objects), max_tokens=40)
    assert found.token_lengths == [10, 40, 70]
    assert [(f.finding, f.where) for f in found.problems if f.finding in ERRORS] == [(Finding.TOO_LONG, "data.jsonl:3")]
    assert found.to_json()["tokens"] == {"min": 10, "median": 40, "max": 70, "limit": 40}


def test_objects_that_the_conversion_left_out_are_named(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 2, 3, 20, 20), voc_object("dog", 5, 5, 5, 5))
    report = convert_voc(root, tmp_path / "out", options=KEEP)
    ((found),) = check_jsonl(report.jsonl).problems
    assert (found.finding, found.where) == (Finding.LEFT_OUT, "a.xml object 1")
    assert found.detail.startswith("zero_area: dog") and Finding.LEFT_OUT not in ERRORS


def test_histograms_name_their_ranges() -> None:
    assert histogram([0, 1, 3, 4, 4, 200], (0, 1, 2, 5, 100)) == {"0": 1, "1": 1, "2-4": 3, "100+": 1}


CELL = GTObject("cell", "bbox_2d", (100, 100, 500, 500))


def dataset(folder: Path, names: str = "ab") -> Path:
    for shade, name in enumerate(names):
        Image.new("RGB", (40, 30), (shade, 0, 0)).save(folder / f"{name}.png")
    write_jsonl([ImageRecord(name, folder / f"{name}.png", 40, 30, (CELL,)) for name in names], folder / "data.jsonl")
    return folder / "data.jsonl"


def test_an_image_that_is_cut_off_is_found_by_decoding_it(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:-30])
    assert check_jsonl(path).counts() == {}
    assert check_jsonl(path, deep=True).counts() == {Finding.UNREADABLE_IMAGE: 1}


def test_the_same_bytes_in_two_images_of_shards_are_found(tmp_path: Path) -> None:
    path, packed = dataset(tmp_path, "abc"), tmp_path / "packed" / "data.jsonl"
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes())
    pack(read_jsonl(path), packed, 1 << 20)
    for one in (path, packed):
        ((found),) = check_jsonl(one).problems
        assert found.finding is Finding.DUPLICATE_IMAGE and "data.jsonl:1, data.jsonl:3" in found.detail


@pytest.mark.parametrize(
    ("boxes", "found"),
    [
        ([[0, 0, 1, 1], [0, 0, 1, 2]], [Finding.SUBPIXEL, Finding.SUBPIXEL, Finding.SHARES_LOOKING]),
        ([[0, 0, 1, 1], [100, 100, 500, 500]], [Finding.SUBPIXEL]),
        ([[100, 100, 101, 500]], []),
        ([[100, 100, 102, 102]], []),
    ],
)
def test_objects_below_a_pixel_are_found(boxes: list[list[int]], found: list[Finding], tmp_path: Path) -> None:
    """At 640 x 480, as a converter leaves shares that it read as pixels."""
    paint(tmp_path / "b.png", (640, 480))
    objects = [{"desc": "crack", "bbox_2d": box} for box in boxes]
    text = line(*objects, image="b.png", width=640, height=480)
    assert [finding for finding, _ in check(tmp_path, text)] == found


@pytest.mark.parametrize(
    ("prepared", "says"),
    [
        ({"factor": 32}, "expected the whole numbers factor, min_pixels and max_pixels"),
        ({"factor": 0, "min_pixels": 1, "max_pixels": 2}, "resize factor is 0"),
        ({"factor": 32, "min_pixels": 1024, "max_pixels": 4096}, None),
    ],
)
def test_a_resize_rule_that_training_would_refuse_is_found(
    prepared: dict[str, int], says: str | None, tmp_path: Path
) -> None:
    check(tmp_path, line(BOX, metadata={"prepared": prepared}))
    checked = check_jsonl(tmp_path / "data.jsonl")
    found = [(problem.finding, problem.where) for problem in checked.problems]
    assert found == ([] if says is None else [(Finding.SCHEMA, "data.jsonl:1")])
    assert checked.errors == len(found) and (says is None or says in checked.problems[0].detail)
