"""The meaning of an annotation's numbers: units, corners, parts of objects, ids, and images without labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.data.convert import (
    ConversionReport,
    ImageOptions,
    convert_coco,
    convert_csv,
    convert_cvat,
    convert_dota,
    convert_labelme,
    convert_labelstudio,
    convert_openimages,
    convert_yolo,
)
from coordexp.errors import DataError
from support.annotation_folders import KEEP, boxes_of, paint
from support.box_formats import (
    Box,
    Boxes,
    Convert,
    Size,
    coco,
    csv,
    cvat,
    dota,
    labelme,
    labelstudio,
    via,
    voc,
    written,
)

SIZE = (640, 480)


def image(home: Path, *names: str) -> None:
    for name in names or ("a.jpg",):
        paint(home / "images" / name, SIZE)


def converted(convert: Convert, home: Path, given: Sequence[Box], **options: Any) -> ConversionReport:
    """Of one image with these boxes."""
    image(home)
    return convert(home, {"a.jpg": given}, SIZE, options=KEEP, **options)


PIXEL_FORMATS: list[Convert] = [coco, voc, labelme, via, cvat, dota, csv]
SHARES: list[Box] = [(0.1, 0.2, 0.6, 0.6), (0.25, 0.5, 0.75, 1.0), (0.0, 0.0, 0.5, 0.25)]
PIXELS: list[Box] = [(64, 96, 384, 288), (160, 240, 480, 480), (0, 0, 320, 120)]


def yolo_lines(home: Path, *lines: str, options: ImageOptions = KEEP, **more: Any) -> ConversionReport:
    image(home)
    written(home / "labels" / "a.txt", "\n".join(lines))
    file = written(home / "data.yaml", "train: images\nnames: [crack]\n")
    return convert_yolo(file, home / "out", options=options, **more)


def yolo(home: Path, boxes: Boxes, _size: Size, /, **options: Any) -> ConversionReport:
    lines = (f"0 {(a + c) / 2} {(b + d) / 2} {c - a} {d - b}" for a, b, c, d in boxes["a.jpg"])
    return yolo_lines(home, *lines, **options)


def open_images(home: Path, boxes: Boxes, _size: Size, /, **options: Any) -> ConversionReport:
    written(home / "class-descriptions.csv", "/m/1,crack\n")
    lines = "".join(f"a,/m/1,{a},{c},{b},{d}\n" for a, b, c, d in boxes["a.jpg"])
    table = written(home / "boxes.csv", f"ImageID,LabelName,XMin,XMax,YMin,YMax\n{lines}")
    return convert_openimages(table, home / "out", images_dir=home / "images", **options)


SHARE_FORMATS: list[Convert] = [yolo, open_images, partial(csv, normalised=True)]


@pytest.mark.parametrize("convert", PIXEL_FORMATS)
def test_shares_in_a_format_of_pixels_are_refused(convert: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"all 3 shapes have numbers of at most (1|0.75|0.5): shares of the image, not pixels"
    ):
        converted(convert, tmp_path, SHARES)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("convert", PIXEL_FORMATS)
def test_shares_among_pixels_are_left_out_and_counted(convert: Any, tmp_path: Path) -> None:
    report = converted(convert, tmp_path, [*PIXELS, SHARES[0]])
    assert [box for _, box in boxes_of(report)["a.jpg"]] == PIXELS
    assert report.skipped_objects == {"other_unit": 1}
    (problem,) = [p for p in report.problems if p.reason == "other_unit"]
    assert "shares" in problem.detail and "crack" in problem.detail


@pytest.mark.parametrize("convert", PIXEL_FORMATS)
def test_a_box_of_one_pixel_in_the_corner_is_read(convert: Any, tmp_path: Path) -> None:
    report = converted(convert, tmp_path, [(0, 0, 1, 1), PIXELS[0]])
    assert [box for _, box in boxes_of(report)["a.jpg"]] == [(0, 0, 1, 1), PIXELS[0]]


@pytest.mark.parametrize("convert", SHARE_FORMATS)
def test_pixels_in_a_format_of_shares_are_refused(convert: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 3 shapes have numbers above 2: pixels, not shares"):
        converted(convert, tmp_path, PIXELS)


@pytest.mark.parametrize("convert", SHARE_FORMATS)
def test_pixels_among_shares_are_left_out_and_counted(convert: Any, tmp_path: Path) -> None:
    report = converted(convert, tmp_path, [*SHARES, PIXELS[0]])
    assert [box for _, box in boxes_of(report)["a.jpg"]] == PIXELS
    assert report.skipped_objects == {"other_unit": 1}


def test_label_studio_has_percent(tmp_path: Path) -> None:
    percent: list[Box] = [(10, 20, 60, 60), (25, 50, 75, 100), (0, 0, 50, 25)]
    assert [box for _, box in boxes_of(converted(labelstudio, tmp_path / "a", percent))["a.jpg"]] == PIXELS
    with pytest.raises(DataError, match="shares of the image, not percent"):
        converted(labelstudio, tmp_path / "b", SHARES)
    with pytest.raises(DataError, match="above 200: pixels, not percent"):
        converted(labelstudio, tmp_path / "c", [(250, 300, 500, 470)])
    report = converted(labelstudio, tmp_path / "d", [*percent, SHARES[0], (250, 300, 500, 470)])
    assert report.skipped_objects == {"other_unit": 2} and report.objects == 3


# --- corners ---

UPPER_LEFT: list[Box] = [(10, 20, 60, 80), (40, 30, 90, 110), (100, 90, 130, 120), (70, 10, 150, 60), (5, 90, 20, 140)]


@pytest.mark.parametrize("form", ["coco", "yolo", "x,y,w,h", "cx,cy,w,h"])
def test_corners_that_stay_in_the_image_are_refused_as_sizes(form: str, tmp_path: Path) -> None:
    """They are objects in the upper left part."""

    def convert(name: str, boxes: Any, given: list[Box] = UPPER_LEFT) -> ConversionReport:
        if form == "coco":
            as_sizes = [(a, b, a + c, b + d) for a, b, c, d in given]  # which `coco` turns back
            return converted(coco, tmp_path / name, as_sizes, boxes=boxes)
        if form == "yolo":  # shares of 640 x 480
            lines = [f"0 {a / 640} {b / 480} {c / 640} {d / 480}" for a, b, c, d in given]
            return yolo_lines(tmp_path / name, *lines, boxes=boxes)
        return converted(csv, tmp_path / name, given, header=form, boxes=boxes)

    with pytest.raises(
        DataError, match=r"(all 5 boxes are small and in the upper left|1 of 5 boxes leave).*--boxes xyxy"
    ):
        convert("auto", "auto")
    assert [box for _, box in boxes_of(convert("xyxy", "xyxy"))["a.jpg"]] == UPPER_LEFT
    assert convert("xywh", "xywh").objects == 5
    if form in ("coco", "x,y,w,h"):  # of centres, one box leaves the image
        assert convert("few", "auto", UPPER_LEFT[:4]).objects == 4, "four boxes are no evidence"


@pytest.mark.parametrize(
    "sizes",
    [
        [(20, 10, 600, 460)] * 6,  # one large object an image
        [(300, 200, 50, 40), *[(10, 10, 60, 50)] * 5],  # one of them is elsewhere
        [(0, 0, 64, 64)] * 6,  # both readings are the same
    ],
)
def test_sound_sizes_are_read(sizes: list[Box], tmp_path: Path) -> None:
    report = converted(csv, tmp_path, sizes, header="x,y,w,h")
    assert [box for _, box in boxes_of(report)["a.jpg"]] == [(a, b, a + c, b + d) for a, b, c, d in sizes]


def test_a_box_that_leaves_the_image_is_no_evidence(tmp_path: Path) -> None:
    """1 of 20 would fit as corners; a tenth of them must leave the image."""
    sizes: list[Box] = [(300, 200, 50, 40), *[(10, 10, 60, 50)] * 18, (600, 400, 630, 460)]
    report = converted(csv, tmp_path, sizes, header="x,y,w,h")
    assert (report.objects, report.notes) == (20, {"clipped": 1, "duplicate_object": 17})


def test_boxes_are_compared_with_the_size_they_were_annotated_on(tmp_path: Path) -> None:
    """The file has half of that size: there, 19 of them would leave it, and fit as corners."""
    boxes: list[Box] = [(300, 200, 350, 240), *[(100, 80, 350, 280)] * 19]
    converted(coco, tmp_path, boxes)
    paint(tmp_path / "images" / "a.jpg", (320, 240))
    report = convert_coco(tmp_path / "c.json", tmp_path / "images", tmp_path / "half", options=KEEP, boxes="auto")
    assert (report.objects, report.notes["size_scaled"]) == (20, 1)


def test_an_inverted_box_is_left_out_as_a_polygon_too(tmp_path: Path) -> None:
    report = converted(csv, tmp_path, [*PIXELS, (300, 200, 50, 40)], geometry="poly")
    assert (report.objects, report.skipped_objects) == (3, {"inverted": 1})


@pytest.mark.parametrize("convert", [voc, csv, cvat])
def test_sizes_in_the_place_of_corners_are_refused(convert: Any, tmp_path: Path) -> None:
    sizes = [(300, 200, 50, 40), (10, 10, 60, 50), (400, 100, 100, 90), (20, 300, 90, 80), (500, 20, 60, 70)]
    with pytest.raises(DataError, match=r"4 of 5 boxes are inverted.*5 fit as \[x, y, width, height\]"):
        converted(convert, tmp_path, sizes)
    report = converted(convert, tmp_path / "one", [*PIXELS, sizes[0]])
    assert report.skipped_objects == {"inverted": 1}, "four boxes are no evidence"


@pytest.mark.parametrize("convert", [*PIXEL_FORMATS, *SHARE_FORMATS])
def test_boxes_without_area_are_left_out_and_counted(convert: Any, tmp_path: Path) -> None:
    boxes = [(64, 96, 384, 288), (200, 100, 200, 300), (200, 100, 200, 100)]
    if convert in SHARE_FORMATS:
        boxes = [(x1 / 640, y1 / 480, x2 / 640, y2 / 480) for x1, y1, x2, y2 in boxes]
    report = converted(convert, tmp_path, boxes)
    assert boxes_of(report) == {"a.jpg": [("crack", (64, 96, 384, 288))]}
    assert report.skipped_objects == {"zero_area": 2}


# --- keypoints ---


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["0 0.5 0.5 0.4 0.4 0.4 0.4 2 0.6 0.6 1"], 2),  # with visibility
        (["0 0.5 0.5 0.4 0.4 0.4 0.4 0.6 0.6 0.5 0.5"] * 5, 3),  # without
        (["0 0.5 0.5 0.4 0.4 0.4 0.4 1 0.6 0.6 0", "0 0.3 0.3 0.2 0.2 0.3 0.3 0 0.25 0.3 1"] * 3, 2),
        (["0 0.5 0.5 0.6 0.45 0.25 0.48 0.75 0.55"] * 5, 2),  # head and tail: sides that do not cross
        (["0 0.9 0.7 0.12 0.6 0.87 0.68 0.93 0.68 0.9 0.73"] * 5, 3),  # eyes and mouth: so, and a point far from them
    ],
)
def test_lines_of_keypoints_are_no_polygons(lines: list[str], count: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"hold a box and {count} keypoints"):
        yolo_lines(tmp_path, *lines)


@pytest.mark.parametrize(
    "ring",
    ["0.2 0.2 0.6 0.2 0.6 0.6 0.2 0.6", "0 0 1 0 1 1", "0.1 0.1 0.9 0.1 0.9 0.9 0.5 0.95 0.1 0.9",
     "0.5 0.5 0.53 0.52 0.51 0.55 0.48 0.53", "0.5001 0.5 0.551 0.551 0.5 0.6 0.45 0.55",
     "0.5 0.5 0.55 0.5 0.55 0.55 0.5 0.55",  # small boxes, turned and not
     "0.5 0.5 0.53 0.5 0.55 0.53 0.52 0.52 0.5 0.55 0.47 0.53"],
)  # fmt: skip
def test_polygons_are_no_keypoints(ring: str, tmp_path: Path) -> None:
    assert yolo_lines(tmp_path, *[f"0 {ring}"] * 6).objects == 6


def test_a_coco_file_without_annotations_is_refused(tmp_path: Path) -> None:
    """COCO's image_info_test2017.json."""
    with pytest.raises(DataError, match=r"none of 1 images has an annotation.*--keep-emptied"):
        converted(coco, tmp_path, [])


# --- COCO's ids and fields ---


def coco_with(
    home: Path, annotations: list[Any], ids: list[Any], category: Any = 1, **options: Any
) -> ConversionReport:
    names = [f"{chr(97 + k)}.jpg" for k in range(len(ids))]
    image(home, *names)
    content = {
        "images": [{"id": k, "file_name": n, "width": 640, "height": 480} for k, n in zip(ids, names, strict=True)],
        "annotations": [{"category_id": category, "bbox": [10, 20, 50, 60], **a} for a in annotations],
        "categories": [{"id": category, "name": "crack"}],
    }
    return convert_coco(written(home / "c.json", content), home / "images", home / "out", options=KEEP, **options)


CRACK = [("crack", (10, 20, 60, 80))]


@pytest.mark.parametrize(
    ("ids", "given", "category"),
    [([1, 2], [1, "2"], 1), ([1.0, 2.0], [1.0, 2], 1.0), (["1", "2"], [1, 2.0], "7"), (["x1", "07"], ["x1", "07"], 3)],
)
def test_ids_compare_as_text(ids: list[Any], given: list[Any], category: Any, tmp_path: Path) -> None:
    report = coco_with(tmp_path, [{"image_id": k} for k in given], ids, category)
    assert boxes_of(report) == {"a.jpg": CRACK, "b.jpg": CRACK} and not report.skipped


@pytest.mark.parametrize("bad", [True, 1.5, None, [1]])
def test_other_ids_are_none(bad: Any, tmp_path: Path) -> None:
    report = coco_with(tmp_path, [{"image_id": 1}, {"image_id": bad}], [1])
    assert report.skipped_objects == {"unknown_image": 1}


def test_a_polygon_without_a_list_around_it_is_read(tmp_path: Path) -> None:
    ring = [10, 20, 60, 20, 60, 80, 10, 80]
    report = coco_with(tmp_path, [{"image_id": 1, "segmentation": ring}], [1], geometry="poly")
    assert boxes_of(report) == {"a.jpg": CRACK}


def test_an_object_without_a_box_names_the_cure(tmp_path: Path) -> None:
    ring = [[10, 20, 60, 20, 60, 80]]
    report = coco_with(tmp_path, [{"image_id": 1}, {"image_id": 1, "bbox": [], "segmentation": ring}], [1])
    assert report.skipped_objects == {"malformed_geometry": 1} and "--geometry poly" in report.problems[-1].detail


# --- parts of one object, and regions to leave out ---


def square(label: str, x: float, group: Any, kind: str = "polygon") -> dict[str, Any]:
    points = [[x, 100], [x + 60, 100], [x + 60, 160], [x, 160]]
    points = [points[0], points[2]] if kind == "rectangle" else points
    return {"label": label, "points": points, "shape_type": kind, "group_id": group}


def labelme_shapes(home: Path, *shapes: dict[str, Any], **options: Any) -> ConversionReport:
    image(home)
    content = {"shapes": list(shapes), "imagePath": "a.jpg", "imageWidth": 640, "imageHeight": 480}
    written(home / "images" / "a.json", content)
    return convert_labelme(home / "images", home / "out", options=KEEP, **options)


def test_shapes_of_a_labelme_group_are_one_object(tmp_path: Path) -> None:
    shapes = (square("bus", 10, 1), square("bus", 200, 1), square("bus", 400, 2), square("__ignore__", 520, None))
    report = labelme_shapes(tmp_path, *shapes, geometry="bbox")
    assert boxes_of(report)["a.jpg"] == [("bus", (10, 100, 260, 160)), ("bus", (400, 100, 460, 160))]
    assert report.skipped_objects == {"ignored": 1} and report.notes == {"joined_parts": 1}
    assert (report.objects_seen, report.objects) == (3, 2)


def test_the_largest_part_of_a_group_is_its_polygon(tmp_path: Path) -> None:
    large = square("bus", 200, 1) | {"points": [[200, 100], [300, 100], [300, 300], [200, 300]]}
    report = labelme_shapes(tmp_path, square("bus", 10, 1), large)
    assert boxes_of(report)["a.jpg"] == [("bus", (200, 100, 300, 300))]
    assert report.notes == {"multipart_polygon": 1}


@pytest.mark.parametrize(
    ("shapes", "boxes"),
    [
        ([square("bus", 10, 1), square("car", 200, 1)], [("bus", (10, 100, 70, 160)), ("car", (200, 100, 260, 160))]),
        ([square("bus", 10, None), square("bus", 200, None)],
         [("bus", (10, 100, 70, 160)), ("bus", (200, 100, 260, 160))]),
        ([square("bus", 10, 0, "rectangle"), square("bus", 200, 0, "rectangle")], [("bus", (10, 100, 260, 160))]),
        ([square("bus", 10, "a"), square("bus", 200, "b")],
         [("bus", (10, 100, 70, 160)), ("bus", (200, 100, 260, 160))]),
    ],
)  # fmt: skip
def test_a_group_is_a_label_and_a_number(shapes: Any, boxes: Any, tmp_path: Path) -> None:
    report = labelme_shapes(tmp_path, *shapes)
    assert boxes_of(report)["a.jpg"] == boxes and not report.skipped


def test_an_object_with_a_part_that_cannot_be_read_is_left_out_whole(tmp_path: Path) -> None:
    broken = square("bus", 200, 1) | {"points": [[1, 1]]}
    report = labelme_shapes(tmp_path, square("bus", 10, 1), broken, square("bus", 400, 2))
    assert boxes_of(report)["a.jpg"] == [("bus", (400, 100, 460, 160))]
    assert (report.objects_seen, report.skipped_objects) == (2, {"malformed_geometry": 1})


def test_groups_of_cvat_are_one_object(tmp_path: Path) -> None:
    image(tmp_path)
    boxes = "".join(
        f'<box label="bus" xtl="{x}" ytl="100" xbr="{x + 60}" ybr="160" group_id="{group}"/>'
        for x, group in ((10, 1), (200, 1), (400, 0), (500, 0))
    )
    text = f'<annotations><image name="a.jpg" width="640" height="480">{boxes}</image></annotations>'
    report = convert_cvat(written(tmp_path / "images" / "a.xml", text), tmp_path / "out", options=KEEP)
    assert [box for _, box in boxes_of(report)["a.jpg"]] == [
        (10, 100, 260, 160), (400, 100, 460, 160), (500, 100, 560, 160),
    ]  # fmt: skip


def region(**value: Any) -> dict[str, Any]:
    value = {"x": 10, "y": 10, "width": 20, "height": 20, "rectanglelabels": ["cat"], **value}
    return {"type": "rectanglelabels", "value": value, "original_width": 640, "original_height": 480}


def label_studio(home: Path, *answers: dict[str, Any]) -> ConversionReport:
    """Of one image with these answers of annotators."""
    image(home)
    tasks = [{"data": {"image": "a.jpg"}, "annotations": answers}]
    return convert_labelstudio(written(home / "images" / "l.json", tasks), home / "out", options=KEEP)


@pytest.mark.parametrize(("marked", "left"), [(None, 64), (1, 320)])
def test_one_of_several_answers_of_annotators_is_taken_with_a_note(
    marked: int | None, left: int, tmp_path: Path
) -> None:
    answers = ({"result": [region(x=x)], "ground_truth": k == marked} for k, x in enumerate((10, 50)))
    report = label_studio(tmp_path, *answers)
    ((_, box),) = boxes_of(report)["a.jpg"]
    assert box[0] == left and report.notes == {"several_answers": 1}


@pytest.mark.parametrize(
    ("odd", "skipped"),
    [
        (region() | {"id": [1]}, {}),
        (region(rotation=10**400), {"malformed_geometry": 1}),
        (region(rectanglelabels=[{"name": "cat"}]), {"empty_desc": 1}),
    ],
)
def test_odd_values_of_label_studio_are_read_or_counted(
    odd: dict[str, Any], skipped: dict[str, int], tmp_path: Path
) -> None:
    report = label_studio(tmp_path, {"result": [region(), odd]})
    assert report.skipped_objects == skipped and report.objects == 2 - len(skipped)


# --- tables ---


@pytest.mark.parametrize(
    ("cell", "boxes", "names", "skipped"),
    [
        ("\"['cow', 'pig']\"", "[[10, 20, 100, 200], [30, 40, 50, 60]]", ["cow", "pig"], {}),
        ('"[""cow"", ""pig""]"', "[[10, 20, 100, 200], [30, 40, 50, 60]]", ["cow", "pig"], {}),
        ("cow", "[[10, 20, 100, 200], [30, 40, 50, 60]]", ["cow", "cow"], {}),
        ("\"['cow']\"", "[10, 20, 100, 200]", ["cow"], {}),
        ("\"['cow', 'pig', 'hen']\"", "[[10, 20, 100, 200], [30, 40, 50, 60]]", [], {"malformed_geometry": 2}),
        ("[cow]", "[10, 20, 100, 200]", ["[cow]"], {}),
    ],
)  # fmt: skip
def test_a_list_of_names_has_one_a_box(
    cell: str, boxes: str, names: list[str], skipped: dict[str, int], tmp_path: Path
) -> None:
    image(tmp_path, "a.jpg", "b.jpg")
    text = f'image,labels,bboxes\na.jpg,{cell},"{boxes}"\nb.jpg,dog,"[1, 2, 30, 40]"\n'
    report = convert_csv(written(tmp_path / "images" / "t.csv", text), tmp_path / "out", boxes="xywh", options=KEEP)
    assert [name for name, _ in boxes_of(report).get("a.jpg", [])] == names
    assert report.skipped_objects == skipped


@pytest.mark.parametrize("between", ["\n", "\r\n", "\x0b", "\u2028", "\x85"])
def test_a_line_break_in_a_name_is_refused_not_lost(between: str, tmp_path: Path) -> None:
    image(tmp_path)
    text = f'filename,class,xmin,ymin,xmax,ymax\na.jpg,"two{between}lines",10,20,110,220\na.jpg,cat,10,20,60,80\n'
    report = convert_csv(written(tmp_path / "images" / "t.csv", text), tmp_path / "out", options=KEEP)
    assert boxes_of(report)["a.jpg"] == [("cat", (10, 20, 60, 80))]
    assert report.skipped_objects == {"refused_desc": 1}


# --- photos that are stored on their side ---


def test_formats_without_sizes_note_photos_that_exif_turns(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6

    def turned(home: Path) -> Path:
        paint(home / "images" / "a.jpg", SIZE, exif=exif)
        return home

    written(turned(tmp_path / "y") / "labels" / "a.txt", "0 0.25 0.25 0.2 0.3\n")
    file = written(tmp_path / "y" / "data.yaml", "train: images\nnames: [cat]\n")
    assert convert_yolo(file, tmp_path / "y" / "out", options=KEEP).notes == {"exif_applied": 1}
    written(turned(tmp_path / "d") / "labelTxt" / "a.txt", "4 3 90 3 90 80 4 80 cat 0\n")
    assert convert_dota(tmp_path / "d", tmp_path / "d" / "out", options=KEEP).notes == {"exif_applied": 1}
    written(turned(tmp_path / "o") / "class-descriptions.csv", "/m/1,cat\n")
    table = written(tmp_path / "o" / "b.csv", "ImageID,LabelName,XMin,XMax,YMin,YMax\na,/m/1,0.1,0.2,0.1,0.2\n")
    report = convert_openimages(table, tmp_path / "o" / "out", images_dir=tmp_path / "o" / "images", options=KEEP)
    assert report.notes == {"exif_applied": 1}
    plain = converted(csv, tmp_path / "c", PIXELS)
    assert plain.notes == {}, "a format without sizes does not miss them"
