"""Odd folders: each converts exactly, or the report names what was left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from coordexp.data import read_jsonl
from coordexp.data.convert import (
    ConversionReport,
    ImageOptions,
    convert_coco,
    convert_csv,
    convert_labelme,
    convert_voc,
    convert_yolo,
)
from coordexp.errors import DataError
from support.annotation_folders import KEEP, SMALL, coco, paint, voc, voc_object, voc_xml
from support.box_formats import written

BOX = (250, 250, 749, 749)  # the middle half of a 40 x 24 image
PIXELS = [10, 6, 30, 18]
BOM = "\ufeff"
LINE = "0 0.5 0.5 0.5 0.5"


def told(report: ConversionReport) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    records = read_jsonl(report.jsonl, check_images=True)
    return {r.metadata["source"]["file"]: [(obj.desc, obj.bins) for obj in r.objects] for r in records}


# --- YOLO ---

CAT = ("cat", BOX)
TRAIN = "train: images/train\nnames: [cat]\n"
# Images, other files by path, objects by image, and what is counted.
YOLO: dict[str, tuple[list[str], dict[str, str], dict[str, Any], dict[str, int]]] = {
    "BOM and Windows line ends": (
        ["images/train/a.jpg"],
        {"labels/train/a.txt": f"{BOM}{LINE}\r\n", "data.yaml": f"{BOM}train: images\\train\r\nnames: [cat]\r\n"},
        {"a.jpg": [CAT]}, {},
    ),
    "classes.txt with BOM": (
        ["images/a.jpg"], {"labels/a.txt": LINE, "classes.txt": f"{BOM}cat\r\n"}, {"a.jpg": [CAT]}, {},
    ),
    "nested, upper case, not ASCII, names by number": (
        ["images/train/jour 1/été.JPG"],
        {"labels/train/jour 1/été.txt": LINE, "data.yaml": "train: images/train\nnames:\n  0: cat\n"},
        {"jour 1/été.JPG": [CAT]}, {},
    ),
    "labels next to images below a folder called images": (
        ["images/set/a.jpg"], {"images/set/a.txt": LINE, "images/data.yaml": "train: set\nnames: [cat]\n"},
        {"a.jpg": [CAT]}, {},
    ),
    "a list that leaves its folder": (
        ["one/images/a.jpg", "two/images/a.jpg"],
        {"one/labels/a.txt": LINE, "two/labels/a.txt": LINE,
         "lists/train.txt": "../one/images/a.jpg\r\n..\\two\\images\\a.jpg\r\n",
         "lists/data.yaml": "train: train.txt\nnames: [cat]\n"},
        {"one/images/a.jpg": [CAT], "two/images/a.jpg": [CAT]}, {},
    ),
    "a list of a part: other labels belong to another split": (
        ["images/a.jpg", "images/b.jpg"],
        {"labels/a.txt": LINE, "labels/b.txt": LINE, "train.txt": "./images/a.jpg\n",
         "data.yaml": "train: train.txt\nnames: [cat]\n"},
        {"images/a.jpg": [CAT]}, {},
    ),
    "empty and missing labels": (
        [f"images/train/{stem}.jpg" for stem in "abc"],
        {"labels/train/a.txt": LINE, "labels/train/b.txt": "\r\n", "data.yaml": TRAIN},
        {"a.jpg": [CAT], "b.jpg": [], "c.jpg": []}, {"no_label_file": 1},
    ),
    "a label without its image": (
        ["images/train/a.jpg"],
        {"labels/train/a.txt": LINE, "labels/train/deep/b.txt": f"{LINE}\n{LINE}\n", "data.yaml": TRAIN},
        {"a.jpg": [CAT]}, {"missing_image": 1, "image_skipped": 2},
    ),
    "images without labels": (
        [f"images/train/{stem}.jpg" for stem in "ab"],
        {"labels/train/a.txt": LINE, "data.yaml": f"{TRAIN}skip_if_label_file_missing: true\n"},
        {"a.jpg": [CAT]}, {"unlabelled": 1},
    ),
    "keys of other programs": (
        ["images/train/a.jpg"],
        {"labels/train/a.txt": LINE, "data.yaml": f"{TRAIN}format: yolo-seg\ncolour_map: [1]\n"},
        {"a.jpg": [CAT]}, {"ignored_key": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("folder", YOLO)
def test_yolo_folders(tmp_path: Path, folder: str) -> None:
    images, files, objects, counted = YOLO[folder]
    for image in images:
        paint(tmp_path / "in" / image)
    paths = [written(tmp_path / "in" / name, text) for name, text in files.items()]
    source = paths[-1] if paths[-1].suffix == ".yaml" else tmp_path / "in"
    report = convert_yolo(source, tmp_path / "out", options=SMALL)
    assert told(report) == objects
    assert report.skipped + report.notes == counted
    inside = (tmp_path / "out" / "images" / "data").rglob("*.[jJ]*")
    assert len(list(inside)) == len(objects), "an image is outside of the output's own folder"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("classes.txt", "caf\xe9".encode("latin-1"), r"classes.txt: not UTF-8 at byte 4"),
        ("data.yaml", b"train: images\nnames: [cat, no]\n", r"names\[1\] is False, not text; put it in quotes"),
        ("data.yaml", b"train: images\nkpt_shape: [2, 2]\nnames: [cat]\n", "kpt_shape: labels of keypoints"),
        ("data.yaml", b"train: images\nnames: [caf\xe9]\n", "data.yaml: not UTF-8"),
        ("data.yaml", b"train: images\nnames: [cat]\nnc: 2\n", "nc is 2, but names has 1"),
        ("data.yaml", b"trian: images\nnames: [cat]\n", "unknown key 'trian'; did you mean 'train'"),
        ("data.yaml", b"train: images\nnames: [cat]\nchannels: 10\n", "channels: images of 3 channels are read"),
        ("data.yaml", b"train: images\nnames: [cat]\nmasks_dir: m\n", "masks_dir: labels are masks"),
        ("data.yaml", b"train: nowhere\nnames: [cat]\n", "nowhere: no such file or folder"),
        (
            "data.yaml",
            b"train: images\nval: images\nnames: [cat]\n",
            "several splits; found: train, val; name one with --split",
        ),
        ("data.yaml", b"train: images\nnames: 3\n", "names must be a list"),
        ("data.yaml", b"train: [\n", "not readable as YAML"),
        ("data.yaml", b"just text", "expected a mapping"),
    ],
)
def test_yolo_folders_that_are_refused(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    paint(tmp_path / "images" / "a.jpg")
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
    ids=["Windows path", "another machine's path", "network path", "labels next to images", "BOM and not ASCII"],
)
def test_labelme_paths(tmp_path: Path, image: str, annotation: str, image_path: str, encoding: str, named: str) -> None:
    paint(tmp_path / "in" / image)
    labelme(tmp_path / "in" / annotation, image_path, encoding)
    report = convert_labelme(tmp_path / "in", tmp_path / "out", options=SMALL)
    assert told(report) == {named: [CAT]}
    is_elsewhere = image_path.startswith(("C:", "/", "\\\\"))
    assert not report.skipped and report.notes == ({"found_by_tail": 1} if is_elsewhere else {})


def test_labelme_images_outside_the_folder_keep_different_names(tmp_path: Path) -> None:
    for part in ("one", "two"):
        paint(tmp_path / part / "a.jpg")
        labelme(tmp_path / "labels" / f"{part}.json", f"../{part}/a.jpg")
    report = convert_labelme(tmp_path / "labels", tmp_path / "out", options=SMALL)
    assert told(report) == {"one/a.jpg": [CAT], "two/a.jpg": [CAT]}


def test_other_json_files_are_counted_and_our_own_report_is_ignored(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("lvis", [False, True])
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
def test_coco_files(tmp_path: Path, lvis: bool, file: str, fields: Any, counted: dict[str, int]) -> None:
    path = coco(tmp_path, [XYWH], [{**COCO_IMAGE, "file_name": file, **fields}])
    named = file.replace("\\", "/").removeprefix("./")
    paint(tmp_path / "images" / named)
    text = path.read_text(encoding="utf-8")
    written(path, text.replace("\n", "\r\n"), "utf-8-sig")
    report = convert_coco(path, tmp_path / "images", tmp_path / "out", lvis=lvis, options=SMALL)
    assert told(report) == {named: [CAT]}
    others = {} if named == "a.jpg" else {"unnamed_image": 1}  # a.jpg, which no line names
    assert report.skipped + report.notes == counted | others


# --- VOC ---


@pytest.mark.parametrize(
    ("image", "xml", "arguments"),
    [
        # labelImg's default: XML and images in one folder, with the annotator's own path in <filename>
        ("a.JPG", {"filename": "C:\\photos\\a.JPG", "folder": ""}, {"annotations_dir": ".", "images_dir": "."}),
        ("JPEGImages/jour 1/a.JPG", {"filename": "a.JPG", "folder": "Annotations/jour 1"}, {}),
        ("JPEGImages/2007.1.png", {"filename": "2007.1.png"}, {}),  # of two images of one stem
        ("JPEGImages/photo 1.jpg", {}, {"split": "train"}),
    ],
)
def test_voc_folders(tmp_path: Path, image: str, xml: dict[str, Any], arguments: dict[str, Any]) -> None:
    root = tmp_path / "in"
    paint(root / image)
    voc_xml(root, Path(image).stem, voc_object("cat", *PIXELS), **xml)
    named = image.removeprefix("JPEGImages/")
    if named.endswith(".png"):
        paint(root / image.replace(".png", ".jpg"), (24, 40))
    if "split" in arguments:
        paint(root / "JPEGImages" / "b.jpg")
        voc_xml(root, "b", voc_object("cat", *PIXELS))
        written(root / "ImageSets" / "Main" / "train.txt", f"{BOM}photo 1\r\nb.jpg\r\n")
    report = convert_voc(root, tmp_path / "out", options=SMALL, **arguments)
    assert told(report) == {name: [CAT] for name in [named, *(["b.jpg"] if "split" in arguments else [])]}
    assert not report.skipped and not report.notes


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
    folder = tmp_path / "in" / home
    paint(folder / images / "a.jpg")
    voc_xml(folder, "a", voc_object("cat", *PIXELS), folder=annotations)
    written(folder / "imagesets" / "MAIN" / "train.txt", "a\n")
    for split in (None, "train"):
        report = convert_voc(tmp_path / "in", tmp_path / "out", split=split, options=SMALL)
        assert told(report) == {"a.jpg": [CAT]} and not report.skipped
        assert report.notes == {"folders_found": 1} and annotations in report.problems[0].detail
    with pytest.raises(DataError, match="'val'"):
        convert_voc(tmp_path / "in", tmp_path / "out", split="val")


@pytest.mark.parametrize("annotations", ["annots", "labels/xml"])
def test_voc_folders_of_any_names(tmp_path: Path, annotations: str) -> None:
    paint(tmp_path / "in" / "photos" / "a.jpg")
    voc_xml(tmp_path / "in", "a", voc_object("cat", *PIXELS), folder=annotations)
    report = convert_voc(tmp_path / "in", tmp_path / "out", options=SMALL)
    assert told(report) == {"a.jpg": [CAT]} and report.notes == {"folders_found": 1}
    paint(tmp_path / "in" / "more" / "a.jpg")
    with pytest.raises(DataError):
        convert_voc(tmp_path / "in", tmp_path / "other", options=SMALL)


def test_several_voc_folders_are_refused(tmp_path: Path) -> None:
    for year in ("VOC2007", "VOC2012"):
        voc(tmp_path / "VOCdevkit" / year, voc_object("cat", *PIXELS))
    with pytest.raises(DataError, match=r"VOC2007, .*VOC2012"):
        convert_voc(tmp_path, tmp_path / "out")


# --- Roboflow's exports: one folder per split, annotations next to the images ---


@pytest.mark.parametrize(
    ("split", "images"),
    [("train", ["train.jpg"]), ("val", ["valid.jpg"]), (None, ["train/train.jpg", "valid/valid.jpg"])],
)
def test_roboflow_voc(tmp_path: Path, split: str | None, images: list[str]) -> None:
    for part in ("train", "valid"):
        paint(tmp_path / "in" / part / f"{part}.jpg")
        voc_xml(tmp_path / "in" / part, part, voc_object("cat", *PIXELS), folder="")
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


@pytest.mark.parametrize("options", [SMALL, KEEP])
@pytest.mark.parametrize(
    ("orientation", "stored", "declared", "notes"),
    [
        (6, (40, 24), (24, 40), {}),  # annotated upright
        (6, (40, 24), (40, 24), {"exif_ignored": 1}),  # annotated as stored
        (3, (40, 24), (40, 24), {"exif_applied": 1}),  # a half turn keeps the size, so it is ambiguous
        (6, (32, 32), (32, 32), {"exif_applied": 1}),  # and so does a square
        (1, (40, 24), (40, 24), {}),
    ],
)
def test_turned_photos(
    tmp_path: Path, orientation: int, stored: Any, declared: Any, notes: dict[str, int], options: ImageOptions
) -> None:
    root = voc(tmp_path / "in", voc_object("cat", 0, 0, *declared), size=declared)
    exif = Image.Exif()
    exif[0x0112] = orientation
    paint(root / "JPEGImages" / "a.jpg", stored, exif=exif)
    report = convert_voc(root, tmp_path / "out", options=options)
    (record,) = read_jsonl(report.jsonl, check_images=True)
    assert (record.width, record.height) == declared and report.notes == notes
    assert record.objects[0].bins == (0, 0, 999, 999)


@pytest.mark.parametrize("options", [SMALL, KEEP])
@pytest.mark.parametrize(
    ("others", "notes", "is_turned"),
    [
        ([(40, 24)], {"exif_ignored": 2}, False),  # another photo was annotated as stored
        ([(24, 40)], {"exif_applied": 1}, True),  # another was annotated upright
        ([(40, 24), (24, 40)], {"exif_applied": 1, "exif_ignored": 1}, True),  # they disagree
    ],
)
def test_a_half_turn_is_read_as_the_other_turned_photos(
    tmp_path: Path, others: list[tuple[int, int]], notes: dict[str, int], is_turned: bool, options: ImageOptions
) -> None:
    root = tmp_path / "in"
    exif = Image.Exif()
    for number, declared in enumerate(others):
        exif[0x0112] = 6
        voc_xml(root, f"side{number}", voc_object("cat", 0, 0, 9, 9), size=declared)
        paint(root / "JPEGImages" / f"side{number}.jpg", (40, 24), exif=exif)
    exif[0x0112] = 3
    voc_xml(root, "half", voc_object("cat", 0, 0, 40, 24))
    image = Image.new("RGB", (40, 24), "white")
    image.paste((0, 0, 0), (0, 0, 20, 24))
    image.save(root / "JPEGImages" / "half.jpg", exif=exif)
    report = convert_voc(root, tmp_path / "out", options=options)
    half = next(record for record in read_jsonl(report.jsonl) if record.metadata["source"]["file"] == "half.jpg")
    with Image.open(half.image) as written:
        upright = ImageOps.exif_transpose(written).convert("L")
    assert (upright.getpixel((1, 1)) > 128) == is_turned  # type: ignore[operator]  # black on the left as stored
    assert report.notes == notes
