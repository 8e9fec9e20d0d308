"""Tables of boxes as Kaggle and Open Images have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordexp.data import read_jsonl
from coordexp.data.convert import ConversionReport, convert_csv, convert_openimages
from coordexp.errors import DataError
from coordexp.geometry import pixel_box
from coordexp.records import GTObject
from support.annotation_folders import KEEP, SMALL, paint
from support.cli_runs import Cli

# On a 40 x 24 image: the pixels 10 to 30 and 6 to 18; and a box to the right and bottom border.
INNER = GTObject("cat", "bbox_2d", (250, 250, 749, 749))
BORDER = GTObject("cat", "bbox_2d", (500, 500, 999, 999))


def table(folder: Path, *lines: str) -> Path:
    for name in ("a", "b"):
        paint(folder / "photos" / f"{name}.jpg")
    (folder / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "t.csv"


def reported(folder: Path, *lines: str, **options: Any) -> ConversionReport:
    return convert_csv(table(folder, *lines), folder / "out", images_dir=folder / "photos", options=KEEP, **options)


def converted(folder: Path, *lines: str, **options: Any) -> list[list[GTObject]]:
    return [list(record.objects) for record in read_jsonl(reported(folder, *lines, **options).jsonl)]


# header, a line for each of the two boxes
SHAPES = [
    ("image_id,class,x,y,w,h", "a,cat,10,6,20,12", "a,cat,20,12,20,12"),
    ("img,label,x_min,y_min,width,height", "a.jpg,cat,10,6,20,12", "a.jpg,cat,20,12,20,12"),
    ("filename,class,x,y,width,height,image_width,image_height", "a.jpg,cat,10,6,20,12,40,24",
     "a.jpg,cat,20,12,20,12,40,24"),
    ("image_id,width,height,bbox,source,label", 'a,40,24,"[10.0, 6.0, 20.0, 12.0]",x,cat',
     'a,40,24,"[20, 12, 20, 12]",y,cat'),
    ("image_id,bbox,label", "a,10 6 20 12,cat", "a,(20 12 20 12),cat"),
    ("image,name,x0,y0,x1,y1", "a,cat,10,6,30,18", "a,cat,20,12,40,24"),
    ("image,name,cx,cy,w,h", "a,cat,20,12,20,12", "a,cat,30,18,20,12"),
    ("Image ID,Class Name,X Min,Y Min,X Max,Y Max", "a,cat,10,6,30,18", "a,cat,20,12,40,24"),
    ("path,category,left,top,right,bottom", "photos/a.jpg,cat,10,6,30,18", "photos/a.jpg,cat,20,12,40,24"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "inner", "border"), SHAPES, ids=[header for header, *_ in SHAPES])
def test_boxes_are_read_by_the_names_in_the_header(header: str, inner: str, border: str, tmp_path: Path) -> None:
    assert converted(tmp_path, header, inner, border) == [[INNER, BORDER]]


def test_a_line_with_more_cells_than_the_header_is_left_out(tmp_path: Path) -> None:
    """Without quotes, half of a name with a comma would be a class."""
    lines = ["image,x1,y1,x2,y2,name", "a,10,6,30,18,cat", "a,1,2,3,4,cat, black", "a,20,12,40,24,cat,,"]
    report = reported(tmp_path, *lines)
    assert [list(record.objects) for record in read_jsonl(report.jsonl)] == [[INNER, BORDER]]
    assert (report.objects_seen, report.skipped_objects) == (3, {"malformed_geometry": 1})
    (detail,) = (problem.detail for problem in report.problems if problem.reason in report.skipped_objects)
    assert "7 cells, and the header has 6" in detail


SIZE = (97, 61)
PIXELS = [(0, 0, 97, 61), (0, 0, 1, 1), (96, 60, 97, 61), (0.4, 12.25, 33.3, 61), (50, 0, 97, 7.5), (13, 17, 64, 49)]


def in_columns(kind: str, box: tuple[float, ...]) -> str:
    x1, y1, x2, y2 = box
    w, h, cx, cy = x2 - x1, y2 - y1, (x1 + x2) / 2, (y1 + y2) / 2
    texts = {
        "x1,y1,x2,y2": f"{x1},{y1},{x2},{y2}",
        "x,y,w,h": f"{x1},{y1},{w},{h}",
        "bbox": f'"[{x1}, {y1}, {w}, {h}]"',
        "cx,cy,w,h": f"{cx},{cy},{w},{h}",
        "shares": f"{x1 / 97},{y1 / 61},{x2 / 97},{y2 / 61}",
    }
    return texts[kind]


@pytest.mark.parametrize("kind", ["x1,y1,x2,y2", "x,y,w,h", "bbox", "cx,cy,w,h", "shares"])
def test_boxes_come_back_within_half_a_bin(kind: str, tmp_path: Path) -> None:
    """Also those to the borders, and of a pixel."""
    paint(tmp_path / "photos" / "odd.png", SIZE)
    header = "x1,y1,x2,y2" if kind == "shares" else kind
    lines = [f"image,name,{header}", *(f"odd,cat,{in_columns(kind, box)}" for box in PIXELS)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    report = convert_csv(
        tmp_path / "t.csv", tmp_path / "out", images_dir=tmp_path / "photos", normalised=kind == "shares", options=KEEP
    )
    (record,) = read_jsonl(report.jsonl)
    for obj, box in zip(record.objects, PIXELS, strict=True):
        for at, (found, given) in enumerate(zip(pixel_box(obj, *SIZE), box, strict=True)):
            assert abs(found - given) <= SIZE[at % 2] / 999 / 2 + 1e-6
    assert record.objects[0].bins == (0, 0, 999, 999)


def test_shares_are_read_on_request_and_refused_without(tmp_path: Path) -> None:
    lines = ("image,name,cx,cy,w,h", "a,cat,0.5,0.5,0.5,0.5", "a,cat,0.75,0.75,0.5,0.5")
    with pytest.raises(DataError, match=r"at most 0\.75.*--normalised"):
        converted(tmp_path, *lines)
    assert converted(tmp_path, *lines, normalised=True) == [[INNER, BORDER]]


def test_one_class_and_several_boxes_in_a_cell(tmp_path: Path) -> None:
    lines = ("image_id,boxes", 'a,"[[10, 6, 20, 12], [20, 12, 20, 12]]"', 'b,""')
    with pytest.raises(DataError, match=r"no column 'name'.*image_id, boxes.*--desc"):
        converted(tmp_path, *lines)
    report = reported(tmp_path, *lines, desc="cat")
    assert [list(record.objects) for record in read_jsonl(report.jsonl)] == [[INNER, BORDER], []]
    assert (report.images, report.objects) == (2, 2)


@pytest.mark.parametrize("name", ["[" * 30_000, "ü" * 128, "/".join(["d"] * 3000)])
def test_a_name_that_no_file_can_have_is_a_missing_image(name: str, tmp_path: Path) -> None:
    report = reported(tmp_path, "image_id,bbox,label", "a,10 6 20 12,cat", f"{name},10 6 20 12,cat")
    assert (report.images, report.objects) == (1, 1) and report.skipped_images == {"missing_image": 1}


def test_numbers_that_are_no_box_are_counted(tmp_path: Path) -> None:
    lines = ("image_id,bbox,label", "a,10 6 20 12,cat", "a,10 6 20,cat", "a,1 2 3 4 5 6 7 8,cat", "b,nan,cat")
    report = reported(tmp_path, *lines)
    assert (report.objects, report.objects_seen) == (1, 4)
    assert report.skipped == {"malformed_geometry": 3, "emptied_image": 1}


AMBIGUOUS = [
    (("image,class,label,x,y,w,h", "a,1,cat,10,6,20,12"), r"may be the name, and differ: 'class', 'label'.*name=class",
     "name=label"),
    (("image,filename,label,x,y,w,h", "7,a.jpg,cat,10,6,20,12"), r"the image.*'image', 'filename'", "image=filename"),
    (("image,label,x,y,w,h,bbox", "a,cat,1,1,1,1,10 6 20 12"),
     r"several columns may be the box: \(x, y, w, h\), \(bbox\)", "bbox=bbox"),
    (("photo,art,l,t,r,b", "a,cat,10,6,30,18"), r"no column 'image'.*photo, art, l, t, r, b",
     "image=photo,name=art,x1=l,y1=t,x2=r,y2=b"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "says", "columns"), AMBIGUOUS, ids=[columns for *_, columns in AMBIGUOUS])
def test_unclear_headers_are_refused_and_settled(
    lines: tuple[str, ...], says: str, columns: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"t\.csv:1: .*{says}"):
        converted(tmp_path, *lines)
    assert converted(tmp_path, *lines, columns=columns) == [[INNER]]


def test_columns_of_equal_content_are_one(tmp_path: Path) -> None:
    assert converted(tmp_path, "image,file_name,label,class,x,y,w,h", "a,a,cat,cat,10,6,20,12") == [[INNER]]


def test_columns_that_differ_in_a_single_line_are_refused(tmp_path: Path) -> None:
    lines = ("image,label,class,x,y,w,h", "a,cat,cat,10,6,20,12", "a,cat,dog,20,12,20,12")
    with pytest.raises(DataError, match="may be the name, and differ"):
        converted(tmp_path, *lines)
    assert converted(tmp_path, *lines, columns={"name": "label"}) == [[INNER, BORDER]]


@pytest.mark.parametrize(
    ("columns", "desc", "says"),
    [("colour=x", None, "unknown meaning; use image, name"), ("image=imag", None, "no column 'imag'"),
     ("name=label", "wheat", "--desc names all objects, and --columns name=… a column of names; give one")],
)  # fmt: skip
def test_a_wrong_choice_of_columns_is_refused(columns: str, desc: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        converted(tmp_path, "image,label,x,y,w,h", "a,cat,10,6,20,12", columns=columns, desc=desc)


# -- Open Images -------------------------------------------------------------------------------------------------------

BOXES = """ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside
a,xclick,/m/1,1,0.25,0.75,0.25,0.75,0,0,0,0,0
a,xclick,/m/1,1,0.5,1.0,0.5,1.0,1,0,0,0,0
a,xclick,/m/2,1,0.1,0.9,0.1,0.9,0,0,1,0,0
b,xclick,/m/9,1,0.1,0.9,0.1,0.9,0,0,0,0,0
b,xclick,/m/2,1,0,0.5,0,0.5,0,0,0,0,0
gone,xclick,/m/1,1,0,0.5,0,0.5,0,0,0,0,0
gone,xclick,/m/1,1,0,0.5,0,0.5,0,0,0,0,0
far,xclick,/m/1,1,0,0.5,0,0.5,0,0,0,0,0
"""
LABELS = """ImageID,Source,LabelName,Confidence
a,verification,/m/1,1
a,verification,/m/2,1
a,verification,/m/3,1
b,crowdsource-verification,/m/1,0
b,machine,/m/3,0.7
b,verification,/m/9,1
c,verification,/m/1,1
gone,verification,/m/1,1
"""


def open_images(folder: Path) -> Path:
    for name in "abc":
        paint(folder / "photos" / f"{name}.jpg")
    (folder / "val-bbox.csv").write_text(BOXES)
    (folder / "class-descriptions-boxable.csv").write_text('/m/1,cat\n/m/2,dog\n/m/3,"Ball, small"\n')
    (folder / "labels.csv").write_text(LABELS)
    return folder / "val-bbox.csv"


def test_open_images(tmp_path: Path) -> None:
    path = open_images(tmp_path)
    report = convert_openimages(path, tmp_path / "out", labels=tmp_path / "labels.csv", options=SMALL)
    first, second = read_jsonl(report.jsonl, check_images=True)
    assert first.objects == (INNER, BORDER) and second.objects == (GTObject("dog", "bbox_2d", (0, 0, 500, 500)),)
    assert first.metadata["image_labels"] == {"present": ["Ball, small", "cat", "dog"], "absent": []}
    assert second.metadata["image_labels"] == {"present": [], "absent": ["cat"]}
    assert report.skipped_objects == {"crowd": 1, "unknown_category": 1, "image_skipped": 3}
    assert report.skipped_images == {"missing_image": 2, "unlabelled": 1}
    assert (report.images_seen, report.objects_seen) == (5, 8)
    assert report.notes == {"unboxed_class": 1, "ignored_label": 1, "found_by_tail": 2}
    said = {problem.reason: problem.detail for problem in report.problems}
    assert "Ball, small" in said["unboxed_class"] and "1 guesses" in said["ignored_label"]


def test_labels_of_open_images_are_of_classes_not_of_ids(tmp_path: Path) -> None:
    """Of a name with several ids one may be boxed and another seen, or one seen and another not."""
    paint(tmp_path / "a.jpg")
    (tmp_path / "boxes.csv").write_text("ImageID,LabelName,XMin,XMax,YMin,YMax\na,/m/1,0.25,0.75,0.25,0.75\n")
    (tmp_path / "class-descriptions.csv").write_text("/m/1,crane\n/m/2,crane\n/m/3,bat\n/m/4,bat\n/m/5,cat\n/m/6,cat\n")
    verified = {"/m/1": 1, "/m/2": 1, "/m/3": 1, "/m/4": 0, "/m/5": 0}
    lines = [f"a,{label},{confidence}" for label, confidence in verified.items()]
    (tmp_path / "labels.csv").write_text("\n".join(["ImageID,LabelName,Confidence", *lines, ""]))
    for last, absent in (("", []), ("a,/m/6,0\n", ["cat"])):
        with (tmp_path / "labels.csv").open("a") as file:
            file.write(last)
        options = replace(KEEP, overwrite=True)
        report = convert_openimages(
            tmp_path / "boxes.csv", tmp_path / "out", labels=tmp_path / "labels.csv", options=options
        )
        (record,) = read_jsonl(report.jsonl)
        assert record.metadata["image_labels"] == {"present": ["bat", "crane"], "absent": absent}
        assert [p.detail for p in report.problems if p.reason == "unboxed_class"] == [
            "seen by people, without a box: bat"
        ]


def test_groups_of_open_images_are_kept_on_request(tmp_path: Path) -> None:
    report = convert_openimages(open_images(tmp_path), tmp_path / "out", crowds="keep", options=SMALL)
    first, _ = read_jsonl(report.jsonl)
    assert first.objects[2] == GTObject("dog", "bbox_2d", (100, 100, 899, 899))
    assert "image_labels" not in first.metadata


def test_open_images_without_names_is_refused(tmp_path: Path) -> None:
    path = open_images(tmp_path)
    names = tmp_path / "class-descriptions-boxable.csv"
    names.write_text("/m/1,cat\n/m/1,dog\n")
    with pytest.raises(DataError, match="a class has two descriptions"):
        convert_openimages(path, tmp_path / "out")
    names.unlink()
    with pytest.raises(DataError, match="--classes"):
        convert_openimages(path, tmp_path / "out")


def test_tables_from_the_command_line(tmp_path: Path, cli: Cli) -> None:
    path = table(tmp_path, "img_id,box", 'a,"[10, 6, 20, 12]"')
    done = cli("data", "convert", "csv", path, "--images", tmp_path / "photos", "--out", tmp_path / "out",
        "--columns", "image=img_id", "--desc", "cat", "--no-resize",
    )  # fmt: skip
    assert done.code == 0, done.err
    (line,) = (tmp_path / "out" / "t.jsonl").read_text().splitlines()
    assert json.loads(line)["objects"] == [{"desc": "cat", "bbox_2d": list(INNER.bins)}]


def test_a_class_that_looks_like_a_list_is_a_name_where_a_line_has_one_box(tmp_path: Path) -> None:
    (first, second) = converted(tmp_path, "image,name,x1,y1,x2,y2", 'a,"[""cat""]",10,6,30,18', "b,[1],10,6,30,18")
    assert [obj.desc for obj in (*first, *second)] == ['["cat"]', "[1]"]


def test_a_second_name_of_an_image_is_an_earlier_image(tmp_path: Path) -> None:
    report = reported(tmp_path, "image,name,x,y,w,h", "a.jpg,cat,10,6,20,12", "a,cat,20,12,20,12")
    (said,) = [one.detail for one in report.problems if one.reason == "duplicate_image"]
    assert said == "a.jpg is the image of an earlier annotation (1 objects left out with it)"
