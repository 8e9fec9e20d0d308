"""Lines of YOLO, LabelMe, CSV and LVIS; areas and canonical forms of polygons, and polygons with fewer vertices."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.data import read_jsonl
from coordexp.data.convert import (
    ConversionReport,
    ImageOptions,
    convert_coco,
    convert_csv,
    convert_labelme,
    convert_yolo,
)
from coordexp.data.polygons import canonical_ring, shape_area, signed_ring_area, simplify_ring
from coordexp.errors import DataError
from coordexp.records import GTObject
from support.annotation_folders import KEEP, SMALL, objects_of, paint

CAT_BOX = GTObject("cat", "bbox_2d", (250, 250, 749, 749))  # the middle of a 40 x 24 image


def yolo(folder: Path, label: str) -> Path:
    paint(folder / "images" / "train" / "a.jpg")
    (folder / "labels" / "train").mkdir(parents=True)
    (folder / "labels" / "train" / "a.txt").write_text(label)
    (folder / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n")
    return folder


GOOD = "0 0.5 0.5 0.5 0.5\n"


@pytest.mark.parametrize(
    ("label", "objects", "skipped"),
    [
        ("0 0.5 0.5 0.5 0.5", [CAT_BOX], {}),
        ("0 0.5 0.5 0.5 0.5\n\n  1 0.5 0.5 0.5 0.5  \n", [CAT_BOX, GTObject("dog", "bbox_2d", CAT_BOX.bins)], {}),
        ("0 0.25 0.25 0.75 0.25 0.75 0.75", [GTObject("cat", "poly", (250, 250, 749, 250, 749, 749))], {}),
        ("0.0 0.5 0.5 0.5 0.5", [CAT_BOX], {}),
        (GOOD + "7 0.5 0.5 0.5 0.5", [CAT_BOX], {"unknown_category": 1}),
        (GOOD + "0 0.5 0.5 0.5", [CAT_BOX], {"malformed_geometry": 1}),
        (GOOD + "0 0.5 0.5 0.5 0.5 0.9", [CAT_BOX], {"malformed_geometry": 1}),  # a prediction with its confidence
        (GOOD + "0 0.1 0.1 0.9 0.1 0.9 0.9 0.5", [CAT_BOX], {"malformed_geometry": 1}),
        (GOOD + "cat 0.5 0.5 0.5 0.5", [CAT_BOX], {"malformed_geometry": 1}),
        (GOOD + "0 0.5 nan 0.5 0.5", [CAT_BOX], {"malformed_geometry": 1}),
    ],
)
def test_yolo_lines(tmp_path: Path, label: str, objects: list[GTObject], skipped: dict[str, int]) -> None:
    report = convert_yolo(yolo(tmp_path / "in", label), tmp_path / "out", options=SMALL)
    assert objects_of(report) == tuple(objects)
    assert report.skipped == skipped
    assert [problem.reason for problem in report.problems if problem.reason in skipped] == list(skipped)


def labelme(folder: Path, *shapes: object, **fields: object) -> Path:
    paint(folder / "a.jpg")
    content = {"shapes": list(shapes), "imagePath": "a.jpg", "imageWidth": 40, "imageHeight": 24, **fields}
    (folder / "a.json").write_text(json.dumps(content))
    return folder


def shape(kind: str | None, *points: object, label: object = "cat") -> dict[str, object]:
    return {"label": label, "points": list(points), "shape_type": kind}


@pytest.mark.parametrize(
    ("fields", "objects", "skipped"),
    [
        (shape("rectangle", [10, 6], [30, 18]), [CAT_BOX], {}),
        (shape("rectangle", [30, 6], [10, 18]), [CAT_BOX], {}),  # any two opposite corners
        (shape("rectangle", [10, 6], [30, 6], [30, 18], [10, 18]), [CAT_BOX], {}),  # newer versions write four
        (shape("polygon", [10, 6], [30, 6], [30, 18]), [GTObject("cat", "poly", (250, 250, 749, 250, 749, 749))], {}),
        (shape(None, [10, 6], [30, 6], [30, 18]), [GTObject("cat", "poly", (250, 250, 749, 250, 749, 749))], {}),
        (shape("circle", [20, 12], [20, 18]), [GTObject("cat", "bbox_2d", (350, 250, 649, 749))], {}),
        (shape("point", [20, 12]), [], {"unsupported_shape": 1}),
        (shape("linestrip", [1, 1], [5, 5], [9, 1]), [], {"unsupported_shape": 1}),
        (shape("mask", [1, 1], [5, 5]), [], {"unsupported_shape": 1}),
        (shape("polygon", [1, 1], [5, 5]), [], {"malformed_geometry": 1}),
        (shape("rectangle", [1, 1], [5, 5], [9, 9]), [], {"malformed_geometry": 1}),
        (shape("rectangle", [1, "1"], [5, 5]), [], {"malformed_geometry": 1}),
        (shape("rectangle", [1, 1], [5, 5], label=None), [], {"empty_desc": 1}),
        ("no shape", [], {"malformed_geometry": 1}),
    ],
)
def test_labelme_shapes(tmp_path: Path, fields: object, objects: list[GTObject], skipped: dict[str, int]) -> None:
    good = [shape("rectangle", [10, 6], [30, 18])] if skipped else []
    report = convert_labelme(labelme(tmp_path / "in", *good, fields), tmp_path / "out", options=SMALL)
    found = objects_of(report)[len(good) :]
    assert [(obj.desc, obj.kind) for obj in found] == [(obj.desc, obj.kind) for obj in objects]
    for got, wanted in zip(found, objects, strict=True):
        assert max(abs(a - b) for a, b in zip(got.bins, wanted.bins, strict=True)) <= 1
    assert report.skipped == skipped


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shapes": None}, "unreadable_annotation"),
        ({"imagePath": None}, "unreadable_annotation"),
        ({"imagePath": "gone.jpg"}, "missing_image"),
        ({"imageWidth": 400}, "size_mismatch"),
    ],
)
def test_labelme_files_that_cannot_be_used(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    folder = labelme(tmp_path / "in", shape("rectangle", [10, 6], [30, 18]), **fields)
    good = labelme(tmp_path / "in" / "deeper", shape("rectangle", [10, 6], [30, 18]))
    report = convert_labelme(folder, tmp_path / "out", options=SMALL)
    assert (report.images, report.skipped_images) == (1, {reason: 1})
    assert read_jsonl(report.jsonl)[0].metadata["source"]["file"] == f"{good.name}/a.jpg"


CORNERS = (250, 250, 749, 250, 749, 749, 250, 749)


@pytest.mark.parametrize(
    ("make", "given", "geometry", "expected"),
    [
        (labelme, shape("rectangle", [10, 6], [30, 18]), "poly", GTObject("cat", "poly", CORNERS)),
        (labelme, shape("polygon", [10, 6], [30, 6], [30, 18]), "poly", GTObject("cat", "poly", CORNERS[:6])),
        (labelme, shape("polygon", [10, 6], [30, 6], [30, 18]), "bbox", CAT_BOX),
        (yolo, "0 0.25 0.25 0.75 0.25 0.75 0.75", "bbox", CAT_BOX),
        (yolo, "0 0.5 0.5 0.5 0.5", "poly", GTObject("cat", "poly", CORNERS)),
    ],
)
def test_shapes_in_another_geometry(
    tmp_path: Path, make: Callable[..., Path], given: Any, geometry: Any, expected: GTObject
) -> None:
    convert = convert_yolo if make is yolo else convert_labelme
    report = convert(make(tmp_path / "in", given), tmp_path / "out", geometry=geometry, options=SMALL)
    assert objects_of(report) == (expected,)


def test_circles_as_polygons(tmp_path: Path) -> None:
    folder = labelme(tmp_path / "in", shape("circle", [20, 12], [20, 18]))
    (disc,) = objects_of(convert_labelme(folder, tmp_path / "out", geometry="poly", options=SMALL))
    assert disc.kind == "poly" and len(disc.bins) == 48


@pytest.mark.parametrize("options", [SMALL, KEEP], ids=["resized", "as they are"])
def test_labelme_images_inside_their_annotations(tmp_path: Path, options: ImageOptions) -> None:
    folder = labelme(tmp_path / "in", shape("rectangle", [10, 6], [30, 18]))
    data = base64.b64encode((folder / "a.jpg").read_bytes()).decode()
    (folder / "a.jpg").unlink()
    longest = "l" * 251
    for name, embedded in (("b", data), ("c", "no base64!"), ("d", None), (longest, data)):
        content = json.loads((folder / "a.json").read_text()) | {"imagePath": f"{name}.jpg", "imageData": embedded}
        (folder / f"{name[:200]}.json").write_text(json.dumps(content))
    (folder / "a.json").unlink()
    report = convert_labelme(folder, tmp_path / "out", options=options)
    record, other = read_jsonl(report.jsonl)
    assert record.objects == other.objects == (CAT_BOX,)
    assert report.skipped_images == {"unreadable_image": 1, "missing_image": 1}
    assert report.notes == {"embedded_image": 2}
    assert other.image.name == f"{longest}.jpg"
    assert record.image == (tmp_path / "out" / "images" / "in" / "b.jpg").resolve()
    assert not list((tmp_path / "out").rglob(".*")), "nothing is left behind"


def table(folder: Path, text: str) -> Path:
    paint(folder / "a.jpg")
    paint(folder / "b.jpg")
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return folder / "t.csv"


CSV_BOX = "a.jpg,cat,10,6,30,18"


@pytest.mark.parametrize(
    ("lines", "objects", "skipped"),
    [
        (["image,name,x1,y1,x2,y2", CSV_BOX], [[CAT_BOX]], {}),
        (["filename;class;xmin;ymin;xmax;ymax", CSV_BOX.replace(",", ";")], [[CAT_BOX]], {}),
        (["xmin,ymin,xmax,ymax,label,path,weather", "10,6,30,18,cat,a.jpg,sunny"], [[CAT_BOX]], {}),
        (["image,name,x1,y1,x2,y2", "a.jpg,,,,,", f"{CSV_BOX}", "b.jpg,,,,,"], [[CAT_BOX], []], {}),
        (["image,name,x1,y1,x2,y2", CSV_BOX, "a.jpg,cat,ten,6,30,18"], [[CAT_BOX]], {"malformed_geometry": 1}),
        (["image,name,x1,y1,x2,y2", CSV_BOX, "C:\\photos\\a.jpg,cat,1,1,9,9"], [[CAT_BOX]],
         {"duplicate_image": 1, "image_skipped": 1}),
        (["image,name,x1,y1,x2,y2", "/home/another/photos/a.jpg,cat,10,6,30,18"], [[CAT_BOX]], {}),
        (["image,name,x1,y1,x2,y2,polygon", f"{CSV_BOX},10 6 30 6 30 18"],
         [[GTObject("cat", "poly", (250, 250, 749, 250, 749, 749))]], {}),
    ],
)  # fmt: skip
def test_csv_tables(tmp_path: Path, lines: list[str], objects: list[list[GTObject]], skipped: dict[str, int]) -> None:
    report = convert_csv(table(tmp_path / "in", "\n".join(lines)), tmp_path / "out", options=SMALL)
    assert [list(record.objects) for record in read_jsonl(report.jsonl)] == objects
    assert report.skipped == skipped


def test_a_csv_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "in", "a.jpg,10,6,30,18,cat\n")
    with pytest.raises(DataError, match=r"t\.csv:1: .*'image' \(or filename"):
        convert_csv(path, tmp_path / "out")


@pytest.mark.parametrize("folder", ["", "train2017"])
def test_lvis_names_its_files_by_url(tmp_path: Path, folder: str) -> None:
    paint(tmp_path / "images" / folder / "07.jpg")
    content = {
        "images": [{"id": 7, "coco_url": "http://images.example/train2017/07.jpg", "width": 40, "height": 24}],
        "annotations": [{"id": 1, "image_id": 7, "category_id": 2, "bbox": [10, 6, 20, 12]}],
        "categories": [{"id": 2, "name": "baby_buggy", "synonyms": ["pram"]}],
    }
    path = tmp_path / "lvis.json"
    path.write_text(json.dumps(content))
    report = convert_coco(path, tmp_path / "images", tmp_path / "out", lvis=True, options=SMALL)
    assert objects_of(report) == (GTObject("baby buggy", "bbox_2d", CAT_BOX.bins),)


# --- fewer vertices ---

SQUARE_WITH_NOTCH = (0, 0, 500, 0, 500, 3, 501, 0, 999, 0, 999, 999, 0, 999)


def test_vertices_with_the_smallest_triangles_are_removed_first() -> None:
    assert simplify_ring(SQUARE_WITH_NOTCH, 4) == (0, 0, 999, 0, 999, 999, 0, 999)
    assert simplify_ring(SQUARE_WITH_NOTCH, 7) == SQUARE_WITH_NOTCH


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=40), st.integers(3, 12))
def test_simplified_rings_keep_the_order_of_vertices(points: list[tuple[int, int]], cap: int) -> None:
    bins = tuple(value for point in points for value in point)
    kept = simplify_ring(bins, cap)
    assert len(kept) == min(len(bins), 2 * cap)
    rest = iter(points)
    assert all(point in rest for point in zip(kept[0::2], kept[1::2], strict=True))


def test_the_report_has_the_cost_of_fewer_vertices(tmp_path: Path) -> None:
    paint(tmp_path / "images" / "a.jpg", (400, 400))
    ring = [value for a in range(90) for value in (200 + 150 * math.cos(a / 14), 200 + 150 * math.sin(a / 14))]
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 400, "height": 400}],
        "annotations": [{"id": k, "image_id": 1, "category_id": 1, "segmentation": [part]}
                        for k, part in enumerate([ring, ring[:12]])],
        "categories": [{"id": 1, "name": "disc"}],
    }  # fmt: skip
    path = tmp_path / "data.json"
    path.write_text(json.dumps(content))
    options = ImageOptions(resize=False, max_vertices=12)
    report: ConversionReport = convert_coco(
        path, tmp_path / "images", tmp_path / "out", geometry="poly", options=options
    )
    assert [len(obj.bins) // 2 for obj in read_jsonl(report.jsonl)[0].objects] == [12, 6]
    written = json.loads(report.path.read_text())["simplification"]
    assert written["polygons"] == 1 and 0.9 < written["min_iou"] == written["mean_iou"] < 1
    assert report.notes["simplified"] == 1 and "to 12, IoU 0.9" in report.problems[0].detail


def test_a_simplified_polygon_starts_at_the_top_most_vertex_that_is_left(tmp_path: Path) -> None:
    paint(tmp_path / "images" / "a.jpg", (999, 999))
    ring = [50, 0, 100, 20, 999, 500, 500, 999, 0, 10]  # the first vertex is removed, and the last one is the highest
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 999, "height": 999}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "segmentation": [ring]}],
        "categories": [{"id": 1, "name": "leaf"}],
    }
    (tmp_path / "data.json").write_text(json.dumps(content))
    options = ImageOptions(resize=False, max_vertices=4)
    report = convert_coco(
        tmp_path / "data.json", tmp_path / "images", tmp_path / "out", geometry="poly", options=options
    )
    assert objects_of(report) == (GTObject("leaf", "poly", (0, 10, 100, 20, 999, 500, 500, 999)),)


def test_without_a_cap_nothing_is_simplified(tmp_path: Path) -> None:
    report = convert_yolo(yolo(tmp_path / "in", "0 0.25 0.25 0.75 0.25 0.75 0.75"), tmp_path / "out", options=KEEP)
    assert report.simplification() is None
    with pytest.raises(DataError, match="max_vertices"):
        ImageOptions(max_vertices=2)


def test_sizes_without_resizing_are_refused() -> None:
    with pytest.raises(DataError, match="--no-resize"):
        ImageOptions(resize=False, factor=16)


# --- area and canonical form ---

POINTS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=9)


def flat(points: list[tuple[int, int]]) -> list[int]:
    return [value for point in points for value in point]


@pytest.mark.parametrize(
    ("kind", "points", "area"),
    [
        ("bbox_2d", (2, 3, 12, 8), 50),
        ("bbox_2d", (2, 3, 2, 8), 0),
        ("poly", (0, 0, 4, 0, 0, 3), 6),
        ("poly", (0, 3, 4, 0, 0, 0), 6),  # the other way round
        ("poly", (0, 0, 4, 0, 8, 0), 0),
    ],
)
def test_area(kind: str, points: tuple[int, ...], area: float) -> None:
    assert shape_area(kind, points) == area


def test_rings_that_run_clockwise_on_the_screen_have_positive_areas() -> None:
    assert signed_ring_area((0, 0, 4, 0, 4, 3, 0, 3)) == 12 == -signed_ring_area((0, 3, 4, 3, 4, 0, 0, 0))
    assert canonical_ring([5, 5] * 4) == ()


@given(POINTS, st.integers(0, 8), st.booleans())
def test_the_canonical_ring_is_the_same_from_any_start_and_direction(
    points: list[tuple[int, int]], start: int, turned: bool
) -> None:
    written = canonical_ring(flat(points))
    assert canonical_ring(written) == written
    assert shape_area("poly", written) == shape_area("poly", flat(points))
    other = points[start % len(points) :] + points[: start % len(points)]
    other = other[::-1] if turned else other
    again = canonical_ring(flat([point for point in other for _ in range(2)]))  # each point twice
    tops = [point for point in zip(written[::2], written[1::2], strict=True) if point == written[:2]]
    if signed_ring_area(written) and len(tops) == 1:  # a ring that meets its first point again has two writings
        assert again == written
