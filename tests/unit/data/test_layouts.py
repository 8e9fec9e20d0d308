"""Layouts of other tools: labelImg's and darknet's YOLO, lists of other machines, formats that are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.data.convert import convert_yolo, recognise
from coordexp.errors import DataError
from support.annotation_folders import KEEP, boxes_of, paint
from support.cli_runs import Cli

LINE = "1 0.5 0.5 0.25 0.5\n"
SIZE = (640, 480)
DOG = [("dog", (240, 120, 400, 360))]


def folder(home: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        if name.endswith((".jpg", ".png")):
            paint(home / name, SIZE)
        else:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
    return home


CLASSES = "cat\ndog\n"
CVAT_YOLO = {  # CVAT's "YOLO 1.1"
    "obj.data": "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n", "obj.names": CLASSES,
    "train.txt": "data/obj_train_data/a.jpg\ndata/obj_train_data/b.jpg\n",
    "obj_train_data/a.jpg": "", "obj_train_data/a.txt": LINE, "obj_train_data/b.jpg": "", "obj_train_data/b.txt": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "source", "arguments", "found", "notes"),
    [
        pytest.param({"a.jpg": "", "a.txt": LINE, "b.jpg": "", "b.txt": "", "classes.txt": CLASSES}, "", {},
                     {"a.jpg": DOG, "b.jpg": []}, {}, id="labelImg, one folder"),
        pytest.param({"JPEGImages/a.jpg": "", "Annotations/a.txt": LINE, "Annotations/classes.txt": CLASSES}, "",
                     {"images_dir": "JPEGImages", "labels_dir": "Annotations"}, {"a.jpg": DOG}, {},
                     id="labelImg, two folders"),
        pytest.param({"photos/train/a.jpg": "", "txt/train/a.txt": LINE, "classes.txt": CLASSES}, "",
                     {"images_dir": "photos", "labels_dir": "txt", "split": "train"}, {"a.jpg": DOG}, {},
                     id="folders of splits"),
        pytest.param({"pics/a/1.jpg": "", "pics/b/1.jpg": "", "txt/a/1.txt": "", "txt/b/1.txt": LINE,
                      "classes.txt": CLASSES}, "", {"images_dir": "pics", "labels_dir": "txt"},
                     {"a/1.jpg": [], "b/1.jpg": DOG}, {}, id="folders with the same subfolders"),
        pytest.param({"pics/1.jpg": "", "pics/a/1.jpg": "", "pics/a/2.jpg": "", "txt/1.txt": LINE, "txt/2.txt": LINE,
                      "classes.txt": CLASSES}, "", {"images_dir": "pics", "labels_dir": "txt"},
                     {"1.jpg": DOG, "a/1.jpg": [], "a/2.jpg": DOG}, {"no_label_file": 1},
                     id="all labels in one folder"),
        pytest.param({"images/a.jpg": "", "images/b.jpg": "", "images/c.jpg": "", "labels/a.txt": LINE,
                      "labels/b.TXT": LINE, "labels/c.Txt": LINE, "classes.txt": CLASSES}, "", {},
                     {"a.jpg": DOG, "b.jpg": DOG, "c.jpg": DOG}, {}, id="suffixes in any case"),
        pytest.param(CVAT_YOLO, "", {}, {"obj_train_data/a.jpg": DOG, "obj_train_data/b.jpg": []}, {}, id="CVAT"),
        pytest.param(CVAT_YOLO, "obj.data", {"split": "train"},
                     {"obj_train_data/a.jpg": DOG, "obj_train_data/b.jpg": []}, {}, id="obj.data named"),
        pytest.param({"cfg.data": "valid=data/test.txt\nnames=data/my.names\n", "data/my.names": CLASSES,
                      "data/test.txt": "data/obj/a.jpg\n", "data/obj/a.jpg": "", "data/obj/a.txt": LINE}, "cfg.data",
                     {"split": "val"}, {"obj/a.jpg": DOG}, {}, id="darknet's own folder"),
        pytest.param({"data.yaml": "path: set\ntrain: train.txt\nnames: [cat, dog]\n",
                      "set/train.txt": "images/a.jpg\n", "set/images/a.jpg": "",
                      "set/labels/a.txt": LINE}, "data.yaml", {}, {"images/a.jpg": DOG}, {},
                     id="a list next to its images"),
        pytest.param({"data.yaml": "path: set\ntrain: ../lists/train.txt\nnames: [cat, dog]\n",
                      "lists/train.txt": "images/a.jpg\n", "set/images/a.jpg": "", "set/labels/a.txt": LINE},
                     "data.yaml", {}, {"a.jpg": DOG}, {}, id="a list below path"),
        pytest.param({"data.yaml": "train: train.txt\nnames: [cat, dog]\n", "train.txt": "C:\\yolo\\images\\a.jpg\n",
                      "images/a.jpg": "", "labels/a.txt": LINE}, "data.yaml", {}, {"images/a.jpg": DOG},
                     {"found_by_tail": 1}, id="a list of Windows"),
        pytest.param({"data.yaml": "train: train.txt\nnames: [cat, dog]\n", "train.txt": "/content/images/a.jpg\n",
                      "images/a.jpg": "", "labels/a.txt": LINE}, "data.yaml", {}, {"images/a.jpg": DOG},
                     {"found_by_tail": 1}, id="a list of another machine"),
    ],
)  # fmt: skip
def test_yolo_layouts(
    files: dict[str, str], source: str, arguments: Any, found: Any, notes: dict[str, int], tmp_path: Path
) -> None:
    home = folder(tmp_path / "in", files)
    report = convert_yolo(home / source, tmp_path / "out", options=KEEP, **arguments)
    assert boxes_of(report) == found
    assert (report.notes, report.skipped) == (notes, {})


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        ({"a.jpg": "", "a.txt": LINE}, {}, "classes.txt"),
        ({"a.jpg": "", "classes.txt": CLASSES}, {"labels_dir": "gone"}, "--labels"),
        ({"obj.data": "names = obj.names\n", "obj.names": CLASSES}, {}, "train = "),
        ({"obj.data": "train = data/train.txt\nnames = obj.names\n", "obj.names": CLASSES}, {}, r"train\.txt: no such"),
        ({"a.jpg": "", "classes.txt": CLASSES, "b/a.txt": LINE}, {},
         "none of 1 images.*files of the same names are in"),
        ({"pics/a/1.jpg": "", "pics/b/1.jpg": "", "txt/1.txt": LINE, "classes.txt": CLASSES},
         {"images_dir": "pics", "labels_dir": "txt"}, r"1\.txt: is the label of 2 images \(.*a/1\.jpg, .*b/1\.jpg\)"),
        ({"a.jpg": "", "a.png": "", "a.txt": LINE, "classes.txt": CLASSES}, {}, "is the label of 2 images"),
        ({"photos/a.jpg": "", "txt/a.txt": LINE, "train.txt": "photos/a.jpg\n",
          "data.yaml": "train: train.txt\nnames: [cat, dog]\n"}, {}, "none of 1 images.*/txt"),
    ],
)  # fmt: skip
def test_incomplete_layouts_are_refused(files: dict[str, str], arguments: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        convert_yolo(folder(tmp_path, files), tmp_path / "out", options=KEEP, **arguments)


@pytest.mark.parametrize(
    ("images", "labels"),
    [("image", "labels"), ("Images", "Labels"), ("VOC/JPEGImages", "VOC/labels"), ("images/train", "annotations/train"),
     ("images", "labels/train")],
)  # fmt: skip
def test_a_folder_in_which_no_image_has_a_label_is_refused(images: str, labels: str, tmp_path: Path) -> None:
    files = {f"{images}/{stem}.jpg": "" for stem in "ab"} | {f"{labels}/{stem}.txt": LINE for stem in "ab"}
    file = folder(tmp_path, files | {"data.yaml": f"train: {images}\nnames: [cat, dog]\n"}) / "data.yaml"
    with pytest.raises(DataError, match=rf"none of 2 images has a label.*files of the same names are in .*{labels}"):
        convert_yolo(file, tmp_path / "out", options=KEEP)
    if labels != "labels/train":  # where the labels belong to other images
        report = convert_yolo(file, tmp_path / "out", unlabelled="empty", options=KEEP)
        assert (report.images, report.objects) == (2, 0)


def test_each_folder_of_a_split_needs_labels(tmp_path: Path) -> None:
    files = {"one/images/a.jpg": "", "two/images/a.jpg": "", "one/labels/a.txt": LINE}
    file = folder(tmp_path, files | {"data.yaml": "train: [one/images, two/images]\nnames: [cat, dog]\n"}) / "data.yaml"
    with pytest.raises(DataError, match=r"two/images: none of 1 images"):
        convert_yolo(file, tmp_path / "out", options=KEEP)
    folder(tmp_path, {"two/labels/a.txt": ""})  # an empty label says that there is nothing
    report = convert_yolo(file, tmp_path / "out", options=replace(KEEP, name="x"))
    assert boxes_of(report) == {"one/images/a.jpg": DOG, "two/images/a.jpg": []}


def test_labels_are_not_looked_for_in_other_data_of_the_user(tmp_path: Path) -> None:
    folder(tmp_path, {"other/a.txt": LINE})
    for part in ("mine", "mine/train"):
        home = folder(tmp_path / "mine", {f"{part.partition('/')[2] or '.'}/a.jpg": "", "classes.txt": CLASSES})
        with pytest.raises(DataError, match="none of 1 images has a label") as caught:
            convert_yolo(home, tmp_path / "out", options=KEEP)
        assert "files of the same names" not in str(caught.value)
        (tmp_path / part / "a.jpg").unlink()


FORMATS = [
    ("a.txt", "Car 0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 1.00 1.75 13.22 -1.62\n", "KITTI"),
    ("a.txt", "Apple 12.5 33.4 200.1 300.2\n", "OIDv4"),
    ("gt.txt", "0--Parade/a.jpg\n2\n449 330 122 149 0 0 0 0 0 0\n", "WIDER FACE"),
    ("a.json", json.dumps([{"image": "a.jpg", "annotations": [{"label": "x", "coordinates": {"x": 1}}]}]), "CreateML"),
    ("a.json", json.dumps({"asset": {"name": "a.jpg"}, "regions": []}), "VoTT"),
    ("a.json", json.dumps({"size": {}, "objects": [{"classTitle": "x", "points": {}}]}), "Supervisely"),
    ("a.csv", "#filename,file_size,file_attributes,region_count,region_id,region_shape_attributes\n", "VIA's CSV"),
    ("a.csv", "photos/a.jpg,10,20,30,40,cat\n", "without a header"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "named"), FORMATS, ids=[named for *_, named in FORMATS])
def test_formats_that_no_converter_reads_are_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = recognise(tmp_path / name)
    assert found is not None and found[0] == "" and named in found[1]


VIA = '{"a.jpg9": {"filename": "a.jpg", "size": 9, "regions": [], "file_attributes": {}}}'
LABEL_STUDIO = '[{"data": {"image": "a.jpg"}, "annotations": [{"result": []}]}]'
CVAT = '<annotations><version>1.1</version><image id="0" name="a.jpg" width="40" height="24"/></annotations>'
OPEN_IMAGES = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax\na,xclick,/m/1,1,0.25,0.75,0.25,0.75\n"
DOTA = "imagesource:GoogleEarth\ngsd:0.146343590398\n20.0 0.0 40.0 12.0 20.0 24.0 0.0 12.0 large-vehicle 0\n"


@pytest.mark.parametrize(
    ("asked", "name", "text", "says"),
    [
        ("coco", "a.json", VIA, "read it with: coordexp data convert via"),
        ("labelme", "a.json", LABEL_STUDIO, "read it with: coordexp data convert labelstudio"),
        ("voc", "a.xml", CVAT, "read it with: coordexp data convert cvat"),
        ("yolo", "a.xml", CVAT, "read it with: coordexp data convert cvat"),
        ("coco", "a.csv", OPEN_IMAGES, "Open Images; read it with: coordexp data convert openimages"),
        ("voc", "a.csv", OPEN_IMAGES, "Open Images; read it with: coordexp data convert openimages"),
        ("csv", "a.csv", OPEN_IMAGES, "Open Images; read it with: coordexp data convert openimages"),
        ("labelme", "labels/a.txt", DOTA, "read it with: coordexp data convert dota"),
        ("labelme", "labels/a.txt", "9.5 1 9 1 9 9 1 9 ship 0\n", "read it with: coordexp data convert dota"),
        ("labelme", "labels/a.txt", "0 0.5 0.5 0.2 0.2\n", "read it with: coordexp data convert yolo"),
        ("labelme", "labels/a.txt", "3 0 0 1 0 1 1 0 1\n", "read it with: coordexp data convert yolo"),
        ("labelme", "readme.txt", "1 2 3 go\n", None),
        ("yolo", "a.txt", FORMATS[0][1], "KITTI, which no converter reads; convert it to COCO first"),
    ],
)
def test_the_error_of_a_converter_names_the_format(
    asked: str, name: str, text: str, says: str | None, tmp_path: Path, cli: Cli
) -> None:
    home = folder(tmp_path / "in", {name: text})
    failed = cli("data", "convert", asked, home / name if asked in ("coco", "csv") else home, "--out", tmp_path / "out")
    assert failed.code == 2 and ("read it with" not in failed.err if says is None else says in failed.err)


def test_a_blank_line_of_darknets_names_counts(tmp_path: Path) -> None:
    """As in classes.txt: the number of a name is its line."""
    source = folder(tmp_path / "in", {**CVAT_YOLO, "obj.names": "cat\n\ndog\n", "obj_train_data/a.txt": "2" + LINE[1:]})
    report = convert_yolo(source / "obj.data", tmp_path / "out", split="train")
    assert boxes_of(report)["obj_train_data/a.jpg"] == DOG
