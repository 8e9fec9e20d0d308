"""COCO → JSONL: boxes, polygons, and everything that is left out by name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_mask

from coordexp.data.convert import (
    ConversionReport,
    convert_coco,
    convert_openimages,
    convert_panoptic,
    convert_voc,
    convert_yolo,
)
from coordexp.data.convert.coco import decode_runs
from coordexp.errors import DataError
from coordexp.geometry import mask_iou, to_bin
from coordexp.records import GTObject
from support.annotation_folders import SMALL, coco, objects_of, paint
from support.cli_runs import Cli


def from_coco(tmp_path: Path, annotations: list[Any], **options: Any) -> ConversionReport:
    images = options.pop("images", None)
    return convert_coco(coco(tmp_path, annotations, images), tmp_path / "images", tmp_path / "out", **options)


@pytest.mark.parametrize("written", [0, 0.0, "0", "0.0", False, "False", "false", None, "None", ""])
def test_these_values_mark_a_single_object(tmp_path: Path, written: Any) -> None:
    """Tables of Python and R write text."""
    annotation = {"bbox": [10, 6, 20, 12], "iscrowd": written, "ignore": written}
    report = from_coco(tmp_path, [annotation], options=SMALL)
    assert (report.objects_seen, report.skipped_objects) == (1, {})


COCO_OBJECTS = [
    ("bbox of 3", {"bbox": [1, 2, 3]}, "bbox", "malformed_geometry"),
    ("bbox of words", {"bbox": ["1", 2, 3, 4]}, "bbox", "malformed_geometry"),
    ("bbox missing", {}, "bbox", "malformed_geometry"),
    ("bbox of huge integers", {"bbox": [10**400, 6, 20, 12]}, "bbox", "malformed_geometry"),
    ("crowd", {"bbox": [1, 1, 5, 5], "iscrowd": 1}, "bbox", "crowd"),
    ("crowd as text", {"bbox": [1, 1, 5, 5], "iscrowd": "1"}, "bbox", "crowd"),
    ("crowd as a boolean", {"bbox": [1, 1, 5, 5], "iscrowd": True}, "bbox", "crowd"),
    ("region to ignore", {"bbox": [1, 1, 5, 5], "ignore": 1}, "bbox", "ignored"),
    ("unknown category", {"bbox": [1, 1, 5, 5], "category_id": 99}, "bbox", "unknown_category"),
    ("listed category", {"bbox": [1, 1, 5, 5], "category_id": [1]}, "bbox", "unknown_category"),
    ("unknown image", {"bbox": [1, 1, 5, 5], "image_id": 99}, "bbox", "unknown_image"),
    ("RLE", {"segmentation": {"counts": "abc", "size": [24, 40]}}, "poly", "malformed_geometry"),
    ("no segmentation", {"bbox": [1, 1, 5, 5]}, "poly", "no_segmentation"),
    ("polygon of 5", {"segmentation": [[1, 1, 9, 1, 9]]}, "poly", "malformed_geometry"),
    ("polygon of huge numbers", {"segmentation": [[1e300, 1, -1e300, 9, 9, 1e300]]}, "poly", "malformed_geometry"),
    ("polygon on a line", {"segmentation": [[1, 1, 9, 1, 5, 1]]}, "poly", "zero_area"),
    ("polygon outside", {"segmentation": [[50, 1, 60, 1, 55, 9]]}, "poly", "outside_image"),
    ("polygon next to a corner", {"segmentation": [[-10, 5, 5, -10, -10, -10]]}, "poly", "outside_image"),
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
    assert obj == GTObject("cat", "poly", tuple(v for x, y in expected for v in bins(x, y)))


def test_a_polygon_over_the_edge_is_cut_there(tmp_path: Path) -> None:
    report = from_coco(tmp_path, [{"segmentation": [[20, -12, 60, 12, 20, 36]]}], geometry="poly", options=SMALL)
    assert objects_of(report)[0].bins == (500, 0, 999, 0, 999, 999, 500, 999) and report.notes == {"clipped": 1}


def test_the_largest_of_several_parts_is_kept_and_reported(tmp_path: Path) -> None:
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
        {"id": 13, "file_name": "C:\\photos\\b.jpg"},
        {"id": 14, "file_name": "a.JPG"},  # not a.jpg
    ]
    annotations = [{"image_id": image_id, "bbox": [1, 1, 5, 5]} for image_id in (7, 8, 10)]
    report = from_coco(tmp_path, annotations, images=images, options=SMALL)
    assert report.images == 1 and report.images_seen == 9
    assert report.skipped_images == {
        "duplicate_image": 2,
        "unsafe_file_name": 2,
        "missing_image": 2,
        "unreadable_annotation": 2,
    }
    assert report.skipped_objects == {"image_skipped": 2}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"annotations": None}, "no list 'annotations'"),
        ({"categories": [{"id": 1}, {"id": 1}]}, r"categories\[1\]: the id 1 is used twice"),
        ({"categories": [{"name": "cat"}]}, r"categories\[0\] has no id"),
        ({"images": [{"id": 7, "file_name": "a.jpg"}, {"id": 7, "file_name": "b.jpg"}]}, "used twice"),
    ],
)
def test_invalid_coco_files_are_refused(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    path = coco(tmp_path, [])
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DataError, match=part):
        convert_coco(path, tmp_path / "images", tmp_path / "out")


def test_broken_coco_json_and_missing_folders_are_refused(tmp_path: Path) -> None:
    path = coco(tmp_path, [])
    path.write_text("{broken")
    with pytest.raises(DataError, match=r"instances\.json: "):
        convert_coco(path, tmp_path / "images", tmp_path / "out")
    with pytest.raises(DataError, match="images"):
        convert_coco(path, tmp_path / "gone", tmp_path / "out")
    with pytest.raises(DataError, match=r"gone\.json"):
        convert_coco(tmp_path / "gone.json", tmp_path / "images", tmp_path / "out")
    with pytest.raises(DataError, match=r"Annotations"):
        convert_voc(tmp_path, tmp_path / "out")


def test_a_conversion_that_keeps_no_image_fails_and_leaves_its_report(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing_image: 1"):
        from_coco(tmp_path, [], images=[{"id": 1, "file_name": "gone.jpg"}])
    report = json.loads((tmp_path / "out" / "instances.conversion_report.json").read_text())
    assert report["skipped_images"] == {"missing_image": 1}
    assert not (tmp_path / "out" / "instances.jsonl").exists()


def runs_of(mask: np.ndarray) -> dict[str, Any]:
    runs: Any = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": list(mask.shape), "counts": runs["counts"].decode()}


def rectangles(*boxes: tuple[int, int, int, int]) -> np.ndarray:
    mask = np.zeros((24, 40), dtype=bool)
    for x1, y1, x2, y2 in boxes:
        mask[y1:y2, x1:x2] = True
    return mask


def counts_of(mask: np.ndarray) -> list[int]:
    """The runs of a mask, column by column; the first is outside."""
    first, *others = (len(list(run)) for _, run in itertools.groupby([False, *mask.T.ravel().tolist()]))
    return [first - 1, *others]


@pytest.mark.parametrize("crowd", [0, 1])
@pytest.mark.parametrize(("as_list", "hole"), [(False, False), (True, False), (False, True)])
def test_a_run_length_mask_becomes_its_outline(tmp_path: Path, crowd: int, as_list: bool, hole: bool) -> None:
    mask = rectangles((10, 6, 30, 18), (0, 0, 2, 2))
    mask[10:14, 15:20] = not hole
    runs = runs_of(mask)
    if as_list:
        runs["counts"] = counts_of(decode_runs(runs, (40, 24)))
    report = from_coco(
        tmp_path, [{"segmentation": runs, "iscrowd": crowd}], geometry="poly", crowds="keep", options=SMALL
    )
    (obj,) = objects_of(report)
    box = GTObject("cat", "poly", tuple(k for x, y in ((10, 6), (30, 6), (30, 18), (10, 18)) for k in bins(x, y)))
    assert obj.kind == "poly" and mask_iou(obj, box) > 0.97
    further = ({"crowd_kept": 1} if crowd else {}) | ({"filled_holes": 1} if hole else {})
    assert report.notes == {"mask_traced": 1, "multipart_polygon": 1} | further


def bins(x: float, y: float) -> tuple[int, int]:
    return to_bin(x, 40), to_bin(y, 24)


def test_crowds_can_be_kept_as_boxes(tmp_path: Path) -> None:
    crowd = {"bbox": [10, 6, 20, 12], "iscrowd": 1, "segmentation": runs_of(rectangles((10, 6, 30, 18)))}
    report = from_coco(tmp_path, [crowd], crowds="keep", options=SMALL)
    assert [obj.kind for obj in objects_of(report)] == ["bbox_2d"]
    assert report.notes == {"crowd_kept": 1} and not report.skipped


def test_every_mask_that_was_encoded_is_decoded() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        mask = random.random(random.integers(1, 50, 2)) < random.random()
        assert (decode_runs(runs_of(mask), None) == mask).all()
        assert (decode_runs({"size": list(mask.shape), "counts": counts_of(mask)}, None) == mask).all()


@pytest.mark.parametrize(
    ("segmentation", "complaint"),
    [
        ({"size": [24, 40], "counts": "1"}, "add up to 1 pixels"),
        ({"size": [24, 40], "counts": [1, 2]}, "add up to 3"),
        ({"size": [24, 40], "counts": [-1, 961]}, "neither a list of numbers"),
        ({"size": [24, 40], "counts": "zzz"}, "add up to 30 pixels"),
        ({"size": [24, 40], "counts": "PPP"}, "no COCO text"),
        ({"size": [24, 40], "counts": "\ud800"}, "no COCO text"),
        ({"size": [40, 24], "counts": [960]}, "the image"),
        ({"size": [24, 40], "counts": [960]}, "empty"),
        ({"size": [2**20, 2**20], "counts": [2**40]}, "the mask is"),
        ({"size": "24x40", "counts": [960]}, "not .height, width"),
    ],
)
def test_a_broken_run_length_mask_is_left_out(tmp_path: Path, segmentation: Any, complaint: str) -> None:
    good = {"segmentation": [[1, 1, 9, 1, 9, 9]]}
    report = from_coco(tmp_path, [good, {"segmentation": segmentation}], geometry="poly", options=SMALL)
    assert report.skipped_objects == {"malformed_geometry": 1}
    assert complaint.split(".")[0] in report.problems[0].detail


# Panoptic


def panoptic(folder: Path) -> Path:
    paint(folder / "images" / "a.jpg")
    ids = np.zeros((24, 40), dtype=np.int64)
    ids[:, :] = 7
    ids[6:18, 10:30] = 70_000
    ids[0:4, 0:4] = 300
    (folder / "panoptic").mkdir()
    Image.fromarray(np.stack([ids >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)).save(
        folder / "panoptic" / "a.png"
    )
    segments = [
        {"id": 70_000, "category_id": 1, "bbox": [10, 6, 20, 12], "iscrowd": 0},
        {"id": 300, "category_id": 1, "bbox": [0, 0, 4, 4], "iscrowd": 1},
        {"id": 7, "category_id": 2, "bbox": [0, 0, 40, 24], "iscrowd": 0},
        {"id": 9, "category_id": 1, "bbox": [1, 1, 4, 4], "iscrowd": 0},  # not in the PNG
    ]
    content = {
        "images": [{"id": 7, "file_name": "a.jpg", "width": 40, "height": 24}],
        "annotations": [{"image_id": 7, "file_name": "a.png", "segments_info": segments}],
        "categories": [{"id": 1, "name": "cat", "isthing": 1}, {"id": 2, "name": "sky", "isthing": 0}],
    }
    (folder / "panoptic.json").write_text(json.dumps(content))
    return folder / "panoptic.json"


def test_panoptic_things_as_boxes_and_as_outlines(tmp_path: Path) -> None:
    path = panoptic(tmp_path)
    boxes = convert_panoptic(path, tmp_path / "images", tmp_path / "boxes", options=SMALL)
    assert [(obj.desc, obj.bins[:2]) for obj in objects_of(boxes)] == [("cat", bins(10, 6)), ("cat", bins(1, 1))]
    assert boxes.skipped == {"stuff": 1, "crowd": 1} and boxes.objects_seen == 4
    rings = convert_panoptic(path, tmp_path / "images", tmp_path / "rings", geometry="poly", stuff=True, options=SMALL)
    assert [(obj.desc, obj.kind) for obj in objects_of(rings)] == [("cat", "poly"), ("sky", "poly")]
    assert rings.skipped == {"crowd": 1, "no_segmentation": 1}
    with pytest.raises(DataError, match="--segments"):
        convert_panoptic(path, tmp_path / "images", tmp_path / "x", geometry="poly", segments_dir=tmp_path / "gone")


@pytest.mark.parametrize("form", ["coco", "yolo", "openimages"])
def test_categories_of_one_name_are_one_class_with_a_note(tmp_path: Path, form: str) -> None:
    path = coco(tmp_path, [{"bbox": [1, 1, 9, 9]}, {"bbox": [2, 2, 9, 9], "category_id": 2}])
    if form == "coco":
        content = json.loads(path.read_text())
        content["categories"][1]["name"] = "cat "
        path.write_text(json.dumps(content))
        report = convert_coco(path, tmp_path / "images", tmp_path / "out", options=SMALL)
    elif form == "yolo":
        (tmp_path / "images" / "a.txt").write_text("1 0.2 0.2 0.1 0.1\n2 0.5 0.5 0.2 0.2\n")
        (tmp_path / "data.yaml").write_text("train: images\nnames: {1: cat, 2: ' cat', 3: dog}\n")
        report = convert_yolo(tmp_path, tmp_path / "out", options=SMALL)
    else:
        header = "ImageID,LabelName,XMin,XMax,YMin,YMax"
        (tmp_path / "boxes.csv").write_text(f"{header}\na,1,0.1,0.2,0.1,0.2\na,2,0.5,0.6,0.5,0.6\n")
        (tmp_path / "class-descriptions.csv").write_text("1,cat\n2,cat\n3,dog\n4,dog\n")
        report = convert_openimages(tmp_path / "boxes.csv", tmp_path / "out", options=SMALL)
    assert report.notes["shared_name"] == 1 and report.objects_by_desc == {"cat": 2}
    (detail,) = (problem.detail for problem in report.problems if problem.reason == "shared_name")
    assert detail == "'cat' is the name of the categories 1, 2: one class"


@pytest.mark.parametrize("name", ["instances.json", "a.xml", "data.jsonl"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    words = {"instances.json": ["convert", "coco"], "a.xml": ["convert", "cvat"], "data.jsonl": ["check"]}[name]
    out = ["--out", tmp_path / "out"] if words[0] == "convert" else []
    refused = cli("data", *words, tmp_path / name, *out)
    assert refused.code == 2 and f"{name}: is a pointer of Git LFS without the file itself" in refused.err
