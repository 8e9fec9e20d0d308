"""Odd folders, one line a case: each converts exactly, or what is left out stands in the report by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from coordexp.data import read_jsonl
from coordexp.data.convert import (
    ConversionReport,
    convert_coco,
    convert_csv,
    convert_labelme,
    convert_lvis,
    convert_voc,
    convert_yolo,
)
from coordexp.errors import DataError
from coordexp.records import ImageRecord
from support.annotation_folders import SMALL, coco, paint, voc, voc_object, voc_xml

BOX = (256, 261, 768, 782)  # the middle half of a 40 x 24 image
PIXELS = [10, 6, 30, 18]
BOM = "\ufeff"
LINE = "0 0.5 0.5 0.5 0.5"


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def told(report: ConversionReport) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """By image: descriptions and bins."""
    records = read_jsonl(report.jsonl, check_images=True)
    return {r.metadata["source"]["file"]: [(obj.desc, obj.bins) for obj in r.objects] for r in records}


# --- YOLO ---


def yolo_with_bom_and_windows_line_ends(root: Path) -> Path:
    paint(root / "images" / "train" / "a.jpg")
    written(root / "labels" / "train" / "a.txt", f"{BOM}{LINE}\r\n")
    return written(root / "data.yaml", f"{BOM}train: images\\train\r\nnames: [cat]\r\n")


def yolo_classes_with_bom(root: Path) -> Path:
    paint(root / "images" / "a.jpg")
    written(root / "labels" / "a.txt", LINE)
    written(root / "classes.txt", f"{BOM}cat\r\n")
    return root


def yolo_nested_upper_case_and_not_ascii(root: Path) -> Path:
    paint(root / "images" / "train" / "jour 1" / "été.JPG")
    written(root / "labels" / "train" / "jour 1" / "été.txt", LINE)
    return written(root / "data.yaml", "train: images/train\nnames:\n  0: cat\n")


def yolo_labels_beside_images_below_a_folder_called_images(root: Path) -> Path:
    paint(root / "images" / "set" / "a.jpg")
    written(root / "images" / "set" / "a.txt", LINE)
    return written(root / "images" / "data.yaml", "train: set\nnames: [cat]\n")


def yolo_list_that_leaves_its_folder(root: Path) -> Path:
    for part in ("one", "two"):
        paint(root / part / "images" / "a.jpg")
        written(root / part / "labels" / "a.txt", LINE)
    written(root / "lists" / "train.txt", "../one/images/a.jpg\r\n..\\two\\images\\a.jpg\r\n")
    return written(root / "lists" / "data.yaml", "train: train.txt\nnames: [cat]\n")


def yolo_list_of_a_part(root: Path) -> Path:
    """Labels of images that the list does not name are another split's, not lost."""
    for stem in "ab":
        paint(root / "images" / f"{stem}.jpg")
        written(root / "labels" / f"{stem}.txt", LINE)
    written(root / "train.txt", "./images/a.jpg\n")
    return written(root / "data.yaml", "train: train.txt\nnames: [cat]\n")


def yolo_empty_and_missing_labels(root: Path) -> Path:
    for stem in "abc":
        paint(root / "images" / "train" / f"{stem}.jpg")
    written(root / "labels" / "train" / "a.txt", LINE)
    written(root / "labels" / "train" / "b.txt", "\r\n")
    return written(root / "data.yaml", "train: images/train\nnames: [cat]\n")


def yolo_lost_images(root: Path) -> Path:
    paint(root / "images" / "train" / "a.jpg")
    written(root / "labels" / "train" / "a.txt", LINE)
    written(root / "labels" / "train" / "deep" / "b.txt", LINE)
    return written(root / "data.yaml", "train: images/train\nnames: [cat]\n")


CAT = ("cat", BOX)
YOLO: list[tuple[Callable[[Path], Path], dict[str, Any], dict[str, int]]] = [
    (yolo_with_bom_and_windows_line_ends, {"a.jpg": [CAT]}, {}),
    (yolo_classes_with_bom, {"a.jpg": [CAT]}, {}),
    (yolo_nested_upper_case_and_not_ascii, {"jour 1/été.JPG": [CAT]}, {}),
    (yolo_labels_beside_images_below_a_folder_called_images, {"a.jpg": [CAT]}, {}),
    (yolo_list_that_leaves_its_folder, {"one/images/a.jpg": [CAT], "two/images/a.jpg": [CAT]}, {}),
    (yolo_list_of_a_part, {"images/a.jpg": [CAT]}, {}),
    (yolo_empty_and_missing_labels, {"a.jpg": [CAT], "b.jpg": [], "c.jpg": []}, {"no_label_file": 1}),
    (yolo_lost_images, {"a.jpg": [CAT]}, {"missing_image": 1}),
]


@pytest.mark.parametrize(("make", "objects", "counted"), YOLO, ids=[make.__name__ for make, _, _ in YOLO])
def test_yolo_folders(
    tmp_path: Path, make: Callable[[Path], Path], objects: dict[str, Any], counted: dict[str, int]
) -> None:
    report = convert_yolo(make(tmp_path / "in"), tmp_path / "out", options=SMALL)
    assert told(report) == objects
    assert report.skipped + report.notes == counted
    inside = (tmp_path / "out" / "images" / "data").rglob("*.[jJ]*")
    assert len(list(inside)) == len(objects), "every image lies below the output's own folder"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"classes.txt": "caf\xe9".encode("latin-1")}, r"classes.txt: not UTF-8 at byte 4"),
        ({"data.yaml": b"train: images\nnames: [cat, no]\n"}, r"names\[1\] is False, not text; put it in quotes"),
        ({"data.yaml": b"train: images\nkpt_shape: [2, 2]\nnames: [cat]\n"}, "kpt_shape: labels of keypoints"),
        ({"data.yaml": b"train: images\nnames: [caf\xe9]\n"}, "data.yaml: not UTF-8"),
        ({"data.yaml": b"train: images\nnames: [cat]\nnc: 2\n"}, "nc is 2, but names holds 1"),
        ({"data.yaml": b"trian: images\nnames: [cat]\n"}, "unknown key 'trian'; did you mean 'train'"),
        ({"data.yaml": b"train: images\nnames: [cat]\nchannels: 10\n"}, "channels: images of 3 channels are read"),
        ({"data.yaml": b"train: images\nnames: [cat]\nmasks_dir: m\n"}, "masks_dir: labels are masks"),
    ],
    ids=[
        "names in Latin-1",
        "a name that YAML reads as no",
        "keypoints look like polygons",
        "YAML in Latin-1",
        "another number of names",
        "a misspelled key",
        "many channels",
        "masks",
    ],
)
def test_yolo_folders_that_are_refused(tmp_path: Path, files: dict[str, bytes], complaint: str) -> None:
    paint(tmp_path / "images" / "a.jpg")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        convert_yolo(tmp_path, tmp_path / "out")


# --- LabelMe ---

RECTANGLE = {"label": "cat", "points": [PIXELS[:2], PIXELS[2:]], "shape_type": "rectangle"}


def labelme(path: Path, image_path: str, encoding: str = "utf-8") -> None:
    content = {"shapes": [RECTANGLE], "imagePath": image_path, "imageWidth": 40, "imageHeight": 24}
    written(path, json.dumps(content, ensure_ascii=False), encoding)


@pytest.mark.parametrize(
    ("image", "annotation", "image_path", "encoding", "named"),
    [
        ("a.jpg", "a.json", "C:\\Users\\me\\photos\\a.jpg", "utf-8", "a.jpg"),
        ("a.jpg", "a.json", "/home/another/a.jpg", "utf-8", "a.jpg"),
        ("a.jpg", "a.json", "\\\\server\\share\\a.jpg", "utf-8", "a.jpg"),
        ("images/a.jpg", "labels/a.json", "..\\images\\a.jpg", "utf-8", "images/a.jpg"),  # labelme --output
        ("sub dir/猫.JPG", "sub dir/猫.json", "猫.JPG", "utf-8-sig", "sub dir/猫.JPG"),
    ],
    ids=["Windows path", "another machine's path", "network path", "labels beside images", "BOM and not ASCII"],
)
def test_labelme_paths(tmp_path: Path, image: str, annotation: str, image_path: str, encoding: str, named: str) -> None:
    paint(tmp_path / "in" / image)
    labelme(tmp_path / "in" / annotation, image_path, encoding)
    report = convert_labelme(tmp_path / "in", tmp_path / "out", options=SMALL)
    assert told(report) == {named: [CAT]}
    assert not report.skipped and not report.notes


def test_labelme_images_outside_the_folder_keep_apart(tmp_path: Path) -> None:
    for part in ("one", "two"):
        paint(tmp_path / part / "a.jpg")
        labelme(tmp_path / "labels" / f"{part}.json", f"../{part}/a.jpg")
    report = convert_labelme(tmp_path / "labels", tmp_path / "out", options=SMALL)
    assert told(report) == {"one/a.jpg": [CAT], "two/a.jpg": [CAT]}


def test_labelme_files_that_are_something_else_are_counted_and_our_own_report_is_none(tmp_path: Path) -> None:
    paint(tmp_path / "a.jpg")
    labelme(tmp_path / "a.json", "a.jpg")
    labelme(tmp_path / "gbk.json", "照片.jpg", "gbk")  # LabelMe on a Chinese Windows, years ago
    written(tmp_path / "settings.json", "{}")
    for _ in range(2):  # into the same folder, twice
        report = convert_labelme(tmp_path, tmp_path / "out", options=replace(SMALL, overwrite=True))
        assert (report.images, report.skipped_images) == (1, {"unreadable_annotation": 2})
        assert any("not UTF-8" in problem.detail for problem in report.problems)


# --- COCO and LVIS ---

COCO_IMAGE = {"id": 7, "file_name": "a.jpg", "width": 40, "height": 24}
XYWH = {"bbox": [10, 6, 20, 12]}


@pytest.mark.parametrize("convert", [convert_coco, convert_lvis])
@pytest.mark.parametrize(
    ("file", "fields", "counted"),
    [
        ("a.jpg", {}, {}),
        ("sub\\deep\\A 1.JPG", {}, {}),  # Label Studio on Windows
        ("été/猫.jpg", {}, {}),
        ("./a.jpg", {}, {}),
        ("a.jpg", {"width": 40.0, "height": 24.0}, {}),  # pandas writes whole numbers like this
        ("a.jpg", {"width": 10**400}, {"size_missing": 1}),
    ],
)
def test_coco_files(
    tmp_path: Path, convert: Callable[..., ConversionReport], file: str, fields: Any, counted: dict[str, int]
) -> None:
    path = coco(tmp_path, [XYWH], [{**COCO_IMAGE, "file_name": file, **fields}])
    named = file.replace("\\", "/").removeprefix("./")
    paint(tmp_path / "images" / named)
    text = path.read_text(encoding="utf-8")
    written(path, text.replace("\n", "\r\n"), "utf-8-sig")
    report = convert(path, tmp_path / "images", tmp_path / "out", options=SMALL)
    assert told(report) == {named: [CAT]}
    assert report.skipped + report.notes == counted


@pytest.mark.parametrize(
    ("image", "annotation", "geometry", "images", "objects"),
    [
        ({"file_name": "C:\\photos\\b.jpg"}, XYWH, "bbox", "unsafe_file_name", "unknown_image"),
        ({"file_name": "../b.jpg"}, XYWH, "bbox", "unsafe_file_name", "unknown_image"),
        ({"file_name": "a.JPG"}, XYWH, "bbox", "missing_image", "image_skipped"),  # a.jpg is another name
        ({}, {**XYWH, "iscrowd": 1, "segmentation": {"counts": [1, 2], "size": [24, 40]}}, "bbox", None, "crowd"),
        ({}, {**XYWH, "segmentation": {"counts": "1", "size": [24, 40]}}, "poly", None, "malformed_geometry"),
        ({}, {"bbox": [10**400, 6, 20, 12]}, "bbox", None, "malformed_geometry"),
    ],
)
def test_what_coco_cannot_give_is_counted(
    tmp_path: Path, image: Any, annotation: Any, geometry: Any, images: str | None, objects: str
) -> None:
    paint(tmp_path / "images" / "b.jpg")
    good = {"image_id": 7, "bbox": PIXELS, "segmentation": [[1, 1, 9, 1, 9, 9]]}
    odd = {"id": 8, "file_name": "b.jpg", "width": 40, "height": 24, **image}
    path = coco(tmp_path, [good, {**annotation, "image_id": 8}], [COCO_IMAGE, odd])
    report = convert_coco(path, tmp_path / "images", tmp_path / "out", geometry=geometry, options=SMALL)
    assert report.skipped_images == ({} if images is None else {images: 1})
    assert report.skipped_objects == {objects: 1}
    assert {problem.reason for problem in report.problems} >= {images or objects}


def test_boxes_of_run_length_masks_are_read(tmp_path: Path) -> None:
    path = coco(tmp_path, [{**XYWH, "iscrowd": 0, "segmentation": {"counts": "1", "size": [24, 40]}}])
    report = convert_coco(path, tmp_path / "images", tmp_path / "out", options=SMALL)
    assert told(report) == {"a.jpg": [CAT]} and not report.skipped


# --- VOC ---


def voc_beside(root: Path) -> dict[str, Any]:
    """labelImg's default: XML and images in one folder, with the annotator's own path in <filename>."""
    paint(root / "a.JPG")
    voc_xml(root, "a", voc_object("cat", *PIXELS), filename="C:\\photos\\a.JPG")
    (root / "Annotations" / "a.xml").rename(root / "a.xml")
    return {"annotations_dir": ".", "images_dir": "."}


def voc_nested(root: Path) -> dict[str, Any]:
    paint(root / "JPEGImages" / "jour 1" / "a.JPG")
    voc_xml(root, "a", voc_object("cat", *PIXELS), filename="a.JPG")
    (root / "Annotations" / "jour 1").mkdir()
    (root / "Annotations" / "a.xml").rename(root / "Annotations" / "jour 1" / "a.xml")
    return {}


def voc_named_by_the_xml(root: Path) -> dict[str, Any]:
    """Two images of one stem: <filename> says which."""
    paint(root / "JPEGImages" / "2007.1.jpg", (24, 40))
    paint(root / "JPEGImages" / "2007.1.png")
    voc_xml(root, "2007.1", voc_object("cat", *PIXELS), filename="2007.1.png")
    return {}


def voc_split(root: Path) -> dict[str, Any]:
    for stem in ("photo 1", "b"):
        paint(root / "JPEGImages" / f"{stem}.jpg")
        voc_xml(root, stem, voc_object("cat", *PIXELS))
    written(root / "ImageSets" / "Main" / "train.txt", f"{BOM}photo 1\r\nb.jpg\r\n")
    return {"split": "train"}


VOC: list[tuple[Callable[[Path], dict[str, Any]], list[str]]] = [
    (voc_beside, ["a.JPG"]),
    (voc_nested, ["jour 1/a.JPG"]),
    (voc_named_by_the_xml, ["2007.1.png"]),
    (voc_split, ["photo 1.jpg", "b.jpg"]),
]


@pytest.mark.parametrize(("make", "images"), VOC, ids=[make.__name__ for make, _ in VOC])
def test_voc_folders(tmp_path: Path, make: Callable[[Path], dict[str, Any]], images: list[str]) -> None:
    arguments = make(tmp_path / "in")
    report = convert_voc(tmp_path / "in", tmp_path / "out", options=SMALL, **arguments)
    assert told(report) == {image: [CAT] for image in images}
    assert not report.skipped and not report.notes


def voc_moved(root: Path, home: str, annotations: str, images: str) -> Path:
    """A VOC folder whose parts are called something else, somewhere below ``root``."""
    made = voc(root / "made", voc_object("cat", *PIXELS))
    for old, new in (("Annotations", annotations), ("JPEGImages", images)):
        (root / home / new).parent.mkdir(parents=True, exist_ok=True)
        (made / old).rename(root / home / new)
    made.rmdir()
    return root / home


@pytest.mark.parametrize(
    ("home", "annotations", "images"),
    [
        ("VOCdevkit/VOC2007", "Annotations", "JPEGImages"),
        ("", "annotations", "jpegimages"),
        ("a/b/c", "ANNOTATIONS", "JPEGImages"),
        ("", "annotations", "images"),
    ],
)
def test_voc_folders_in_any_case_and_depth(tmp_path: Path, home: str, annotations: str, images: str) -> None:
    folder = voc_moved(tmp_path / "in", home, annotations, images)
    written(folder / "imagesets" / "MAIN" / "train.txt", "a\n")
    for split in (None, "train"):
        report = convert_voc(tmp_path / "in", tmp_path / "out", split=split, options=SMALL)
        assert told(report) == {"a.jpg": [CAT]} and not report.skipped
        assert report.notes == {"folders_found": 1} and annotations in report.problems[0].detail
    with pytest.raises(DataError, match="'val'"):
        convert_voc(tmp_path / "in", tmp_path / "out", split="val")


def test_of_several_voc_folders_none_is_guessed(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        voc(tmp_path / "VOCdevkit" / year, voc_object("cat", *PIXELS))
    with pytest.raises(DataError, match=r"VOC2007, .*VOC2012"):
        convert_voc(tmp_path, tmp_path / "out")


# --- Roboflow's exports: a folder a split, annotations beside the images ---


def roboflow_voc(root: Path) -> None:
    for split in ("train", "valid"):
        paint(root / split / f"{split}.jpg")
        voc_xml(root / split, split, voc_object("cat", *PIXELS))
        (root / split / "Annotations" / f"{split}.xml").rename(root / split / f"{split}.xml")
        (root / split / "Annotations").rmdir()


@pytest.mark.parametrize(
    ("split", "images"),
    [("train", ["train.jpg"]), ("val", ["valid.jpg"]), (None, ["train/train.jpg", "valid/valid.jpg"])],
)
def test_roboflow_voc(tmp_path: Path, split: str | None, images: list[str]) -> None:
    roboflow_voc(tmp_path / "in")
    report = convert_voc(tmp_path / "in", tmp_path / "out", split=split, options=SMALL)
    assert told(report) == {image: [CAT] for image in images} and not report.skipped


def test_roboflow_coco(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "a.jpg")
    content = {
        "info": {}, "licenses": [],
        "categories": [{"id": 0, "name": "cats", "supercategory": "none"}, {"id": 1, "name": "cat"}],
        "images": [COCO_IMAGE | {"id": 0}],
        "annotations": [{"id": 0, "image_id": 0, "category_id": 1, "segmentation": [], "iscrowd": 0, **XYWH}],
    }  # fmt: skip
    written(tmp_path / "train" / "_annotations.coco.json", json.dumps(content))
    report = convert_coco(tmp_path / "train", None, tmp_path / "out", options=SMALL)
    assert report.jsonl.name == "train.jsonl" and told(report) == {"a.jpg": [CAT]} and not report.skipped


def test_roboflow_csv(tmp_path: Path) -> None:
    paint(tmp_path / "train" / "a.jpg")
    text = "filename,width,height,class,xmin,ymin,xmax,ymax\r\na.jpg,40,24,cat,10,6,30,18\r\n"
    written(tmp_path / "train" / "_annotations.csv", BOM + text)
    report = convert_csv(tmp_path / "train", tmp_path / "out", options=SMALL)
    assert report.jsonl.name == "train.jsonl" and told(report) == {"a.jpg": [CAT]}
    assert not report.skipped and not report.notes


def test_roboflow_yolo(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        paint(tmp_path / split / "images" / "a.jpg")
        written(tmp_path / split / "labels" / "a.txt", LINE)
    tail = "nc: 1\nnames: ['cat']\n\nroboflow:\n  workspace: w\n  license: CC BY 4.0\n"
    written(tmp_path / "data.yaml", f"train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\n{tail}")
    for split in ("train", "val", "valid"):
        report = convert_yolo(tmp_path, tmp_path / "out", split=split, options=SMALL)
        assert told(report) == {"a.jpg": [CAT]} and not report.skipped


# --- pixels ---


def converted(tmp_path: Path, image: Image.Image, size: tuple[int, int], **save: Any) -> tuple[ImageRecord, Any]:
    root = tmp_path / "in"
    (root / "JPEGImages").mkdir(parents=True)
    image.save(root / "JPEGImages" / save.pop("name", "a.png"), **save)
    voc_xml(root, "a", voc_object("cat", 0, 0, *size), size=size)
    report = convert_voc(root, tmp_path / "out", options=SMALL)
    (record,) = read_jsonl(report.jsonl, check_images=True)
    return record, report


@pytest.mark.parametrize(
    ("mode", "colour", "name", "seen"),
    [
        ("L", 90, "a.png", (90, 90, 90)),
        ("LA", (90, 0), "a.png", (255, 255, 255)),
        ("RGBA", (10, 200, 30, 255), "a.png", (10, 200, 30)),
        ("P", 0, "a.png", (0, 0, 0)),
        ("1", 1, "a.png", (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), "a.jpg", (254, 0, 0)),
        ("CMYK", (0, 255, 255, 0), "a.tif", (255, 0, 0)),
        ("L", 90, "a.JPG", (90, 90, 90)),
        ("RGB", (90, 90, 90), "a.jfif", (90, 90, 90)),
    ],
)
def test_every_8_bit_image_becomes_rgb(tmp_path: Path, mode: str, colour: Any, name: str, seen: Any) -> None:
    form = "JPEG" if name.endswith("jfif") else None
    record, _ = converted(tmp_path, Image.new(mode, (40, 24), colour), (40, 24), name=name, format=form)
    with Image.open(record.image) as image:
        assert image.mode == "RGB"
        assert np.abs(np.asarray(image).astype(int) - np.array(seen)).max() <= 3


@pytest.mark.parametrize(
    ("orientation", "stored", "declared", "notes"),
    [
        (6, (40, 24), (24, 40), {}),  # annotated upright
        (6, (40, 24), (40, 24), {"exif_ignored": 1}),  # annotated as stored
        (3, (40, 24), (40, 24), {"exif_applied": 1}),  # a half turn keeps the size: nothing tells
        (6, (32, 32), (32, 32), {"exif_applied": 1}),  # and so does a square
        (1, (40, 24), (40, 24), {}),
    ],
)
def test_turned_photos(
    tmp_path: Path, orientation: int, stored: tuple[int, int], declared: tuple[int, int], notes: dict[str, int]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    record, report = converted(tmp_path, Image.new("RGB", stored), declared, name="a.jpg", exif=exif)
    assert (record.width, record.height) == declared and report.notes == notes
    assert record.objects[0].bins == (0, 0, 999, 999)


def test_16_bit_images_are_left_out_by_name(tmp_path: Path) -> None:
    root = voc(tmp_path / "in", voc_object("cat", *PIXELS))
    Image.fromarray(np.zeros((24, 40), np.uint16)).save(root / "JPEGImages" / "b.png")
    voc_xml(root, "b", voc_object("cat", *PIXELS), filename="b.png")
    report = convert_voc(root, tmp_path / "out", options=SMALL)
    assert report.skipped_images == {"unreadable_image": 1} and "not 8-bit" in report.problems[0].detail
