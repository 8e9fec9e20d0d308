"""COCO → JSONL: boxes, polygons, and everything that is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordexp.data.convert import ConversionReport, convert_coco, convert_voc, to_bin
from coordexp.errors import DataError
from coordexp.records import GTObject
from support.annotation_folders import SMALL, coco, objects_of


def from_coco(tmp_path: Path, annotations: list[Any], **options: Any) -> ConversionReport:
    images = options.pop("images", None)
    return convert_coco(coco(tmp_path, annotations, images), tmp_path / "images", tmp_path / "out", **options)


COCO_OBJECTS = [
    ("zero width", {"bbox": [5, 5, 0, 5]}, "bbox", "zero_area"),
    ("negative width", {"bbox": [5, 5, -2, 5]}, "bbox", "inverted"),
    ("outside", {"bbox": [40, 0, 5, 5]}, "bbox", "outside_image"),
    ("bbox of 3", {"bbox": [1, 2, 3]}, "bbox", "malformed_geometry"),
    ("bbox of words", {"bbox": ["1", 2, 3, 4]}, "bbox", "malformed_geometry"),
    ("bbox missing", {}, "bbox", "malformed_geometry"),
    ("crowd", {"bbox": [1, 1, 5, 5], "iscrowd": 1}, "bbox", "crowd"),
    ("unknown category", {"bbox": [1, 1, 5, 5], "category_id": 99}, "bbox", "unknown_category"),
    ("listed category", {"bbox": [1, 1, 5, 5], "category_id": [1]}, "bbox", "unknown_category"),
    ("unknown image", {"bbox": [1, 1, 5, 5], "image_id": 99}, "bbox", "unknown_image"),
    ("empty name", {"bbox": [1, 1, 5, 5], "category_id": 3}, "bbox", "empty_desc"),
    ("RLE", {"segmentation": {"counts": "abc", "size": [24, 40]}}, "poly", "rle_segmentation"),
    ("no segmentation", {"bbox": [1, 1, 5, 5]}, "poly", "no_segmentation"),
    ("polygon of 5", {"segmentation": [[1, 1, 9, 1, 9]]}, "poly", "malformed_geometry"),
    ("polygon on a line", {"segmentation": [[1, 1, 9, 1, 5, 1]]}, "poly", "zero_area"),
    ("polygon outside", {"segmentation": [[50, 1, 60, 1, 55, 9]]}, "poly", "outside_image"),
    ("tiny polygon", {"segmentation": [[5, 5, 5.001, 5, 5, 5.001]]}, "poly", "collapsed_polygon"),
    ("no mapping", "annotation", "bbox", "unknown_image"),
]


@pytest.mark.parametrize(
    ("annotation", "geometry", "reason"), [case[1:] for case in COCO_OBJECTS], ids=[case[0] for case in COCO_OBJECTS]
)
def test_coco_objects_left_out_are_counted_and_located(
    tmp_path: Path, annotation: Any, geometry: Any, reason: str
) -> None:
    good = {"bbox": [1, 1, 8, 8], "segmentation": [[1, 1, 9, 1, 9, 9]]}
    report = from_coco(tmp_path, [good, annotation], geometry=geometry, options=SMALL)
    assert len(objects_of(report)) == 1
    assert report.skipped_objects == {reason: 1} and (report.objects_seen, report.objects) == (2, 1)
    assert [(p.reason, p.object_index) for p in report.problems] == [(reason, 1)]


def test_polygons_are_written_clockwise_from_the_top_without_repeated_points(tmp_path: Path) -> None:
    ring = [(20, 2), (4, 12), (20, 22), (30, 12), (30, 12), (20, 2)]  # counter-clockwise on the screen, closed
    flat = [value for point in ring for value in point]
    (obj,) = objects_of(from_coco(tmp_path, [{"segmentation": [flat]}], geometry="poly", options=SMALL))
    expected = [(20, 2), (30, 12), (20, 22), (4, 12)]
    assert obj == GTObject("cat", "poly", tuple(v for x, y in expected for v in (to_bin(x, 40), to_bin(y, 24))))


def test_of_several_parts_the_largest_is_kept_and_noted(tmp_path: Path) -> None:
    parts = [[0, 0, 2, 0, 2, 2], [10, 5, 30, 5, 30, 20], [1, 9, 3, 9, 3, 12]]
    report = from_coco(tmp_path, [{"segmentation": parts}], geometry="poly", options=SMALL)
    assert min(objects_of(report)[0].bins[::2]) == to_bin(10, 40)
    assert report.notes == {"multipart_polygon": 1}


def test_coco_images_left_out_are_counted(tmp_path: Path) -> None:
    images = [
        {"id": 7, "file_name": "a.jpg", "width": 40, "height": 24},
        {"id": 8, "file_name": "a.jpg"},
        {"id": 9, "file_name": "../a.jpg"},
        {"id": 10, "file_name": "gone.jpg"},
        {"id": 11},
        {"file_name": "b.jpg"},
        {"id": 12, "file_name": "./a.jpg"},
    ]
    annotations = [{"image_id": image_id, "bbox": [1, 1, 5, 5]} for image_id in (7, 8, 10)]
    report = from_coco(tmp_path, annotations, images=images, options=SMALL)
    assert report.images == 1 and report.images_seen == 7
    assert report.skipped_images == {
        "duplicate_image": 2,
        "unsafe_file_name": 1,
        "missing_image": 1,
        "unreadable_annotation": 2,
    }
    assert report.skipped_objects == {"unknown_image": 1, "image_skipped": 1}


FATAL_COCO = [
    ("no list", {"annotations": None}, "no list 'annotations'"),
    ("category id twice", {"categories": [{"id": 1}, {"id": 1}]}, r"categories\[1\]: the id 1 is used twice"),
    ("category without id", {"categories": [{"name": "cat"}]}, r"categories\[0\] has no id"),
    ("image id twice", {"images": [{"id": 7, "file_name": "a.jpg"}, {"id": 7, "file_name": "b.jpg"}]}, "used twice"),
]


@pytest.mark.parametrize(("changes", "part"), [case[1:] for case in FATAL_COCO], ids=[case[0] for case in FATAL_COCO])
def test_a_coco_file_that_cannot_be_understood_is_refused(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    path = coco(tmp_path, [])
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DataError, match=part):
        convert_coco(path, tmp_path / "images", tmp_path / "out")


def test_broken_coco_json_and_missing_folders_are_refused(tmp_path: Path) -> None:
    path = coco(tmp_path, [])
    path.write_text("{broken")
    with pytest.raises(DataError, match=r"instances\.json: not readable as JSON"):
        convert_coco(path, tmp_path / "images", tmp_path / "out")
    with pytest.raises(DataError, match="images folder not found"):
        convert_coco(path, tmp_path / "gone", tmp_path / "out")
    with pytest.raises(DataError, match="annotation file not found"):
        convert_coco(tmp_path / "gone.json", tmp_path / "images", tmp_path / "out")
    with pytest.raises(DataError, match=r"no folder .*Annotations"):
        convert_voc(tmp_path, tmp_path / "out")


def test_a_conversion_that_keeps_no_image_fails_and_leaves_its_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no usable image \(missing_image: 1\)"):
        from_coco(tmp_path, [], images=[{"id": 1, "file_name": "gone.jpg"}])
    report = json.loads((tmp_path / "out" / "instances.conversion_report.json").read_text())
    assert report["skipped_images"] == {"missing_image": 1}
    assert not (tmp_path / "out" / "instances.jsonl").exists()
