"""Predictions in other tools' formats: original ids, names and sizes; our own converters read them back."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from PIL import Image

from coordexp.data import read_jsonl
from coordexp.data.class_list import OTHER_NAMES
from coordexp.data.completed import COMPLETION
from coordexp.data.convert import (
    ImageOptions,
    convert_coco,
    convert_csv,
    convert_dota,
    convert_labelme,
    convert_voc,
    convert_yolo,
)
from coordexp.data.jsonl import write_jsonl
from coordexp.errors import DataError
from coordexp.evaluation.answers import (
    ImageAnswer,
    OriginalImage,
    ScoredObject,
    make_answer,
    read_answers,
    write_answers,
)
from coordexp.printable import printable
from coordexp.records import GTObject, ImageRecord, ParsedRollout, Rollout
from support.cli_runs import Cli, Outcome, files_of_at_most

SIZE = (300, 200)
THIN = GTObject("cat", "bbox_2d", (300, 300, 300, 900))
CAT = ScoredObject("cat", "bbox_2d", (100, 200, 500, 600), 0.75)
KITE = ScoredObject("kite", "poly", (0, 0, 999, 0, 999, 999), 0.5)


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    """Answers for a copy of 96x64 of the user's ``in/a.png`` of 300x200, and for the user's own ``b.png``."""
    for name, size in (("copy.png", (96, 64)), ("b.png", (50, 40))):
        Image.new("RGB", size, "gray").save(tmp_path / name)
    original = OriginalImage("in/a.png", *SIZE)
    gt = (GTObject("cat", "bbox_2d", (100, 200, 510, 600)),)
    answers = [
        ImageAnswer("d.jsonl:1", str(tmp_path / "copy.png"), 96, 64, gt, (CAT, KITE), original=original),
        ImageAnswer(
            "b.png", str(tmp_path / "b.png"), 50, 40, None, (ScoredObject("dog", "bbox_2d", (0, 0, 999, 999)),)
        ),
    ]
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    assert read_answers(tmp_path / "run") == answers
    return tmp_path / "run"


@pytest.fixture
def export(predictions: Path, tmp_path: Path, cli: Cli) -> Any:
    def run(form: str, *options: object, code: int = 0) -> Outcome:
        outcome = cli("export", form, predictions, "--out", tmp_path / "out", *options)
        assert outcome.code == code, outcome.err
        return outcome

    return run


@pytest.mark.parametrize("form", ["coco", "yolo"])
def test_annotations_are_no_predictions_where_nothing_is_predicted(
    form: str, predictions: Path, export: Any, tmp_path: Path
) -> None:
    nothing = [replace(answer, pred=()) for answer in read_answers(predictions)]
    write_answers(nothing, predictions / "predictions.jsonl")
    assert "\n0 objects in 2 images" in f"\n{export(form).out}"
    if form == "coco":
        assert read(tmp_path / "out" / "results.json") == []
        assert len(read(tmp_path / "out" / "dataset.json")["annotations"]) == 1


@pytest.mark.parametrize(
    ("form", "named"), [("yolo", "images/in/a.png"), ("coco", "images/in/a.png"), ("csv", "objects.csv")]
)
def test_what_a_full_disk_ended_is_exported_again(export: Any, tmp_path: Path, form: str, named: str) -> None:
    options = ("--images", "--overwrite") if form == "coco" else ("--overwrite",)
    with files_of_at_most(50):
        failed = export(form, *options, code=2)
    assert f"{tmp_path / 'out' / named}: File too large" in failed.err
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    (tmp_path / "out" / "mine.txt").write_text("kept")
    export(form, *options)
    if form != "csv":
        assert (tmp_path / "out" / "images" / "b.png").read_bytes() == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("side", ["0", "2147483648", "1" + "0" * 400, "1.5"])
@pytest.mark.parametrize("whose", ['"width": 96', '"width": 300'], ids=["the image's", "the original's"])
def test_an_image_without_a_possible_size_is_refused_by_line(
    predictions: Path, export: Any, side: str, whose: str
) -> None:
    file = predictions / "predictions.jsonl"
    changed = file.read_text().replace(whose.replace(" ", ""), f'"width":{side}')
    assert changed != file.read_text()
    file.write_text(changed)
    assert f"error: {file}:1: not a line of predictions: " in export("coco", code=2).err


def answered(folder: Path, *pred: ScoredObject) -> Path:
    """Predictions with these objects in an image of 50x40."""
    Image.new("RGB", (50, 40), "gray").save(folder / "b.png")
    write_answers([ImageAnswer("b.png", str(folder / "b.png"), 50, 40, None, pred)], folder / "predictions.jsonl")
    return folder / "predictions.jsonl"


def dataset(
    folder: Path, *objects: GTObject, size: tuple[int, int] = (64, 48), metadata: dict[str, Any] | None = None
) -> Path:
    Image.new("RGB", size, "gray").save(folder / "a.png")
    record = ImageRecord("d.jsonl:1", folder / "a.png", *size, objects, metadata or {})
    write_jsonl([record], folder / "d.jsonl")
    return folder / "d.jsonl"


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_coco_keeps_the_users_ids_names_and_sizes(export: Any, tmp_path: Path) -> None:
    mine = {"images": [{"id": 901, "file_name": "in/a.png"}, {"id": 77, "file_name": "z.png"}],
            "categories": [{"id": 17, "name": "cat"}, {"id": 18, "name": "dog"}], "annotations": []}  # fmt: skip
    (tmp_path / "instances.json").write_text(json.dumps(mine), encoding="utf-8")
    shown = export("coco", "--annotations", tmp_path / "instances.json")
    assert "1 annotated and predicted objects of 1 names outside of the class list share number 19" in shown.out
    assert "'kite' (1)" in shown.out
    assert "1 images are not among the given annotations" in shown.out
    cat, kite, dog = read(tmp_path / "out" / "results.json")
    assert (cat["image_id"], cat["category_id"], cat["score"]) == (901, 17, 0.75)
    assert cat["bbox"] == pytest.approx([30.03, 40.04, 120.12, 80.08], abs=0.01)
    assert (kite["category_id"], kite["segmentation"]) == (19, [[0, 0, 300, 0, 300, 200]])
    assert (dog["image_id"], dog["category_id"], dog["score"]) == (902, 18, 1.0)
    dataset = read(tmp_path / "out" / "dataset.json")
    assert dataset["images"][0] == {"id": 901, "file_name": "in/a.png", "width": 300, "height": 200}
    assert {c["name"]: c["id"] for c in dataset["categories"]} == {"cat": 17, "dog": 18, OTHER_NAMES: 19}
    assert [a["category_id"] for a in dataset["annotations"]] == [17]


def test_coco_keeps_the_users_ids_of_images_that_are_placed_under_other_names(tmp_path: Path, cli: Cli) -> None:
    files = ["cam1/7.png", "cam2/7.png", "prepared/8.png", "prepared/9.png"]
    for file in files:
        (tmp_path / "in" / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), "gray").save(tmp_path / "in" / file)
    source = {"source": {"file": "cam3/8.tif", "width": 64, "height": 48}}  # written as PNG by a converter
    metadata = [{}, {}, source, source]
    write_jsonl(
        (ImageRecord("d", tmp_path / "in" / file, 64, 48, (), one) for file, one in zip(files, metadata, strict=True)),
        tmp_path / "d.jsonl",
    )
    ids = {"cam1/7.png": 901, "cam2/7.png": 77, "cam3/8.tif": 5}
    mine = {"images": [{"id": number, "file_name": name} for name, number in ids.items()],
            "categories": [{"id": 17, "name": "cat"}]}  # fmt: skip
    (tmp_path / "instances.json").write_text(json.dumps(mine), encoding="utf-8")
    options = ("--annotations", tmp_path / "instances.json", "--images")
    shown = cli("export", "coco", tmp_path / "d.jsonl", "--out", tmp_path / "out", *options)
    assert shown.code == 0 and "1 images are not among the given annotations" in shown.out
    assert [(one["id"], one["file_name"]) for one in read(tmp_path / "out" / "dataset.json")["images"]] == [
        (901, "7.png"), (77, "7_1.png"), (5, "cam3/8.png"), (902, "cam3/8_3.png")
    ]  # fmt: skip


def test_coco_files_are_read_by_pycocotools_and_cvat(export: Any, tmp_path: Path) -> None:
    """pycocotools 2.0.9 cannot load results without ``info``, CVAT no dataset without ``licenses``."""
    from pycocotools.coco import COCO

    export("coco")
    data = read(tmp_path / "out" / "dataset.json")
    assert list(data) == ["info", "licenses", "images", "annotations", "categories"]
    assert (data["info"], data["licenses"]) == ({}, [])
    assert data["categories"][0] == {"id": 1, "name": "cat", "supercategory": ""}
    truth: Any = COCO(str(tmp_path / "out" / "dataset.json"))
    found = truth.loadRes([r for r in read(tmp_path / "out" / "results.json") if "segmentation" not in r])
    assert len(found.getAnnIds()) == 2 and sorted(c["name"] for c in truth.loadCats(truth.getCatIds())) == [
        "cat", "dog", "kite"
    ]  # fmt: skip


def near(found: tuple[int, ...], wanted: tuple[float, ...]) -> bool:
    return len(found) == len(wanted) and all(abs(a - b) <= 1 for a, b in zip(found, wanted, strict=True))


def test_thin_boxes_keep_an_area_and_those_without_are_counted(tmp_path: Path, cli: Cli) -> None:
    boxes = ((500, 100, 505, 900), (300, 300, 300, 900))  # 0.25 pixels wide, and 0
    source = answered(tmp_path, *(ScoredObject("cat", "bbox_2d", box) for box in boxes))
    shown = cli("export", "voc", source, "--out", tmp_path / "out", "--images")
    assert "note: 1 sides below half a pixel are written as one pixel" in shown.out
    assert "note: 1 objects have no area" in shown.out
    report = convert_voc(tmp_path / "out", tmp_path / "back", options=ImageOptions(resize=False))
    assert (report.objects, report.skipped_objects) == (1, {"zero_area": 1})


def test_coco_keeps_boxes_without_area(tmp_path: Path, cli: Cli) -> None:
    shown = cli("export", "coco", dataset(tmp_path, THIN), "--out", tmp_path / "out")
    assert "note: 1 objects have no area; their boxes are written half a bin wide" in shown.out
    report = convert_coco(
        tmp_path / "out" / "dataset.json", tmp_path, tmp_path / "back", options=ImageOptions(resize=False)
    )
    assert (report.objects, report.skipped_objects) == (1, {})


def test_yolo_keeps_the_users_numbers_and_writes_scores(export: Any, tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("dog\n\ncat\n", encoding="utf-8")
    shown = export("yolo", "--classes", tmp_path / "classes.txt", "--scores")
    lines = (tmp_path / "out" / "labels" / "in" / "a.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["2", "3"] and "share number 3" in shown.out
    assert float(lines[0].split()[-1]) == 0.75 and len(lines[0].split()) == 10  # four corners


def test_csv_has_a_line_per_object(export: Any, tmp_path: Path) -> None:
    export("csv", "--min-score", 0.6)
    with (tmp_path / "out" / "objects.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["name"], row["score"]) for row in rows] == [
        ("in/a.png", "cat", "0.750000"),
        (str(tmp_path / "b.png"), "dog", ""),
    ]
    assert (rows[0]["width"], rows[0]["x1"], rows[0]["y2"], rows[0]["polygon"]) == ("300", "30.03", "120.12", "")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(("csv", "--classes", "x"), "--classes has no use here; it belongs to yolo, yolo-obb and coco"),
     (("voc", "--scores"), "--scores has no use here"),
     (("coco", "--annotations", "none.json"), "none.json"), (("yolo", "--classes", "none.txt"), "none.txt")],
)  # fmt: skip
def test_an_impossible_export_is_a_one_line_error(export: Any, options: tuple[str, ...], complaint: str) -> None:
    assert complaint in export(*options, code=2).err


def test_a_converted_image_keeps_its_original_name_and_size(tmp_path: Path) -> None:
    source = {"file": "in/a.png", "width": 301, "height": 201}
    rollout, parsed = Rollout("s", (), (), "", False), ParsedRollout((), {}, (), "{", None, False)
    for metadata, wanted in (({"source": source}, OriginalImage("in/a.png", 301, 201)), ({"source": [1]}, None)):
        record = ImageRecord("s", tmp_path / "copy.png", 96, 64, (), metadata)
        assert make_answer(record, rollout, parsed).original == wanted


def test_answers_with_bins_of_earlier_versions_are_refused(predictions: Path) -> None:
    path = predictions / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "bin_rule": "pixel_edges"}) + "\n" for line in lines))
    assert len(read_answers(path)) == len(lines)
    path.write_text("".join(json.dumps({**line, "bin_rule": "pixel_centres"}) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"jsonl:1: .*bin_rule is 'pixel_centres'.*delete bin_rule"):
        read_answers(path)


@pytest.mark.parametrize("form", ["coco", "yolo", "voc", "labelme", "csv"])
def test_a_dataset_is_exported_and_converted_back(form: str, tmp_path: Path, cli: Cli) -> None:
    objects = (
        GTObject("cat", "bbox_2d", (0, 100, 999, 999)),
        GTObject("dog", "bbox_2d", (333, 17, 501, 600)),
        *((GTObject("dog", "poly", (10, 10, 800, 20, 400, 900)),) if form not in ("coco", "yolo") else ()),
    )
    Image.new("RGB", (640, 480), "gray").save(tmp_path / "a.png")
    source = {"source": {"file": "in/photo.png", "width": 1280, "height": 960}}
    record = ImageRecord("d.jsonl:1", tmp_path / "a.png", 640, 480, objects, source)
    nothing = replace(record, objects=(), metadata={"source": {**source["source"], "file": "in/zero.png"}})
    write_jsonl([record, nothing], tmp_path / "d.jsonl")
    out, options = tmp_path / "out", ImageOptions(resize=False, name="back")
    fractions = ["--fractions"] if form == "voc" else []
    shown = cli("export", form, tmp_path / "d.jsonl", "--out", out, "--images", *fractions)
    assert shown.code == 0 and f"{len(objects)} objects in 2 images" in shown.out
    assert ("1 polygons are written as their bounds" in shown.out) is (form == "voc")
    convert = {
        "coco": lambda: convert_coco(out / "dataset.json", out / "images", tmp_path, options=options),
        "yolo": lambda: convert_yolo(out, tmp_path, split="train", options=options),
        "voc": lambda: convert_voc(out, tmp_path, options=options),
        "labelme": lambda: convert_labelme(out, tmp_path, options=options),
        "csv": lambda: convert_csv(out / "objects.csv", tmp_path, options=options),
    }[form]
    back, empty = read_jsonl(convert().jsonl, check_images=True)
    if form == "voc":
        objects = (*objects[:2], GTObject("dog", "bbox_2d", (10, 10, 800, 900)))
    assert back.objects == objects and back.metadata["source"]["file"].endswith("photo.png")
    assert empty.objects == () and empty.metadata["source"]["file"].endswith("zero.png")


def test_yolo_writes_boxes_next_to_polygons_as_polygons(tmp_path: Path, cli: Cli) -> None:
    """YOLO's trainers reshape every line of a file with a polygon to points: ``cx cy w h`` would be two of them."""
    Image.new("RGB", (200, 100), "gray").save(tmp_path / "a.png")
    box = GTObject("cat", "bbox_2d", (0, 111, 333, 999))
    both = ImageRecord(
        "d.jsonl:1", tmp_path / "a.png", 200, 100, (box, GTObject("dog", "poly", (0, 0, 999, 0, 0, 999)))
    )
    write_jsonl([both], tmp_path / "d.jsonl")
    shown = cli("export", "yolo", tmp_path / "d.jsonl", "--out", tmp_path / "out")
    cat = "0 0.000000 0.111111 0.333333 0.111111 0.333333 1.000000 0.000000 1.000000\n"
    dog = "1 0.000000 0.000000 1.000000 0.000000 0.000000 1.000000\n"
    assert (tmp_path / "out" / "labels" / "a.txt").read_text() == cat + dog
    assert "note: 1 boxes are written as polygons of four corners, as YOLO reads no mixture of both" in shown.out
    write_jsonl([replace(both, objects=(box,))], tmp_path / "d.jsonl")
    shown = cli("export", "yolo", tmp_path / "d.jsonl", "--out", tmp_path / "boxes")
    assert (tmp_path / "boxes" / "labels" / "a.txt").read_text() == "0 0.166667 0.555556 0.333333 0.888889\n"
    assert "corners" not in shown.out


# Boxes to every border, a quadrilateral, a turned box, and a triangle, which needs a rectangle around it.
ROTATED = (
    GTObject("cat", "bbox_2d", (0, 0, 999, 999)),
    GTObject("cat", "bbox_2d", (333, 17, 999, 600)),
    GTObject("dog", "poly", (500, 0, 999, 500, 500, 999, 0, 500)),
    GTObject("dog", "poly", (17, 31, 400, 40, 390, 333, 20, 300)),
)
TRIANGLE = GTObject("dog", "poly", (100, 100, 700, 100, 400, 150))


@pytest.mark.parametrize("form", ["dota", "yolo-obb"])
@pytest.mark.parametrize("size", [(640, 480), (4000, 3000), (97, 61)])
def test_rotated_boxes_are_exported_and_converted_back(
    form: str, size: tuple[int, int], tmp_path: Path, cli: Cli
) -> None:
    source = {"source": {"file": "in/photo.png", "width": size[0], "height": size[1]}}
    data, out = dataset(tmp_path, *ROTATED, TRIANGLE, size=size, metadata=source), tmp_path / "out"
    shown = cli("export", form, data, "--out", out, "--images")
    assert shown.code == 0 and "1 polygons do not have four points" in shown.out
    options = ImageOptions(resize=False, name="back")
    if form == "dota":
        report = convert_dota(out, tmp_path, options=options)
    else:
        report = convert_yolo(out, tmp_path, split="train", options=options)
    assert not report.skipped and not report.notes
    (back,) = read_jsonl(report.jsonl, check_images=True)
    assert back.metadata["source"]["file"] == "in/photo.png"
    *same, rectangle = back.objects
    corners = [(x1, y1, x2, y1, x2, y2, x1, y2) for x1, y1, x2, y2 in (obj.bins for obj in ROTATED[:2])]
    assert [obj.bins for obj in same] == [*corners, *(obj.bins for obj in ROTATED[2:])]
    assert {obj.kind for obj in back.objects} == {"poly"} and [obj.desc for obj in same] == [o.desc for o in ROTATED]
    assert near(rectangle.bins, (100, 100, 700, 100, 700, 150, 100, 150))


def test_dota_names_have_no_spaces(tmp_path: Path, cli: Cli) -> None:
    data = dataset(tmp_path, GTObject("red cup", "bbox_2d", (0, 0, 500, 500)))
    shown = cli("export", "dota", data, "--out", tmp_path / "out")
    assert "note: 1 name cannot be written as they are: red cup as red_cup" in shown.out
    (line,) = (tmp_path / "out" / "labelTxt" / "a.txt").read_text().splitlines()
    assert line.endswith(" red_cup 0")


@pytest.mark.parametrize(
    ("form", "names", "text"), [("dota", ("red cup", "red_cup"), "red_cup"), ("voc", ("a\x7f", r"a\u007f"), r"a\u007f")]
)
def test_two_names_never_become_one(form: str, names: tuple[str, str], text: str, tmp_path: Path, cli: Cli) -> None:
    source = answered(tmp_path, *(ScoredObject(name, "bbox_2d", (0, 0, 500, 500)) for name in names))
    shown = cli("export", form, source, "--out", tmp_path / "out")
    assert shown.code == 2 and f"would both be written as {text!r}; rename one" in shown.err


def test_completed_objects_keep_their_provenance_in_coco(tmp_path: Path, cli: Cli) -> None:
    objects = (
        GTObject("cat", "bbox_2d", (0, 0, 999, 999)),
        GTObject("dog", "bbox_2d", (1, 2, 300, 400), 0.75),
        GTObject("cup", "bbox_2d", (5, 5, 300, 400), 1.0),
    )
    entry = {"model": "outputs/stage1", "fingerprint": "abc", "threshold": 0.5, "refused": {"too_small": 2},
             "added": [{"object": 1, "score": 0.7512}, {"object": 9, "score": 0.6}]}  # fmt: skip
    data = dataset(tmp_path, *objects, metadata={COMPLETION: [entry]})
    cli("export", "coco", data, "--out", tmp_path / "coco")
    cat, dog, cup = read(tmp_path / "coco" / "dataset.json")["annotations"]
    assert dog["completion"] == {"model": "outputs/stage1", "fingerprint": "abc", "threshold": 0.5, "score": 0.7512}
    assert "completion" not in cat and "completion" not in cup
    shown = cli("export", "yolo", data, "--out", tmp_path / "yolo")
    assert "note: yolo cannot say which model added 1 completed objects; coco can" in shown.out
    for form, option in (("coco", "--min-score"), ("coco", "--min-confidence"), ("csv", "--min-confidence")):
        refused = cli("export", form, data, "--out", tmp_path / "refused", option, 0.9)
        assert refused.code == 2 and f"{option} has no use here; it belongs to predictions" in refused.err


def test_a_dataset_is_exported_in_pixels_of_the_originals(tmp_path: Path, cli: Cli) -> None:
    objects = (GTObject("cat", "bbox_2d", (0, 0, 999, 999)), GTObject("dog", "bbox_2d", (1, 2, 300, 400), 0.75))
    source = {"source": {"file": "in/photo.png", "width": 1280, "height": 960}}
    data = dataset(tmp_path, *objects, size=(640, 480), metadata=source)
    for form in ("coco", "voc"):
        assert cli("export", form, data, "--out", tmp_path / form).code == 0
    cat, dog = read(tmp_path / "coco" / "dataset.json")["annotations"]
    assert cat["bbox"] == [0, 0, 1280, 960] and (dog["soft"], dog["iscrowd"]) == (0.75, 1)
    assert not (tmp_path / "coco" / "results.json").exists()
    xml = (tmp_path / "voc" / "Annotations" / "in" / "photo.xml").read_text()
    assert "<xmax>1280</xmax>" in xml and "<xmax>384</xmax>" in xml and "<score>0.750000</score>" in xml


def test_only_files_that_decode_as_images_are_copied(tmp_path: Path, cli: Cli) -> None:
    """Predictions may be a stranger's file, and the folder is made to be shared."""
    Image.new("RGB", (50, 40), "gray").save(tmp_path / "b.png")
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----", encoding="utf-8")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "key.png").write_bytes((tmp_path / "key").read_bytes())
    (tmp_path / "link.png").symlink_to(tmp_path / "key")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "b.png").read_bytes()[:60])
    names = ["b.png", "key", "key.png", "link.png", "pipe.png", "half.png", "gone.png", "/etc/passwd"]
    answers = [ImageAnswer(name, str(tmp_path / name), 50, 40, None, (CAT,)) for name in names]
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    shown = cli("export", "yolo", tmp_path / "run", "--out", tmp_path / "out", "--images")
    assert shown.code == 0, shown.err
    assert [path.name for path in (tmp_path / "out" / "images").rglob("*") if path.is_file()] == ["b.png"]
    assert "7 images were not placed" in shown.out
    assert all(name in shown.out for name in names[1:])


def test_an_image_that_is_not_copied_has_a_name_of_its_own(tmp_path: Path, cli: Cli) -> None:
    Image.new("RGB", (50, 40), "gray").save(tmp_path / "b.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "b.png").read_bytes()[:60])
    answers = [
        ImageAnswer(name, str(tmp_path / name), 50, 40, None, (CAT,), original=OriginalImage("in/a.png", 50, 40))
        for name in ("b.png", "torn.png")
    ]
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    shown = cli("export", "yolo", tmp_path / "run", "--out", tmp_path / "out")
    assert shown.code == 0 and "1 images were not placed" in shown.out
    assert sorted(path.name for path in (tmp_path / "out" / "labels" / "in").iterdir()) == ["a.txt", "a_1.txt"]
    assert [path.name for path in (tmp_path / "out" / "images" / "in").iterdir()] == ["a.png"]


def test_copies_are_copies_unless_links_are_asked_for(predictions: Path, tmp_path: Path, cli: Cli) -> None:
    for out, options, same in (("copies", (), False), ("links", ("--link",), True)):
        shown = cli("export", "yolo", predictions, "--out", tmp_path / out, *options)
        assert shown.code == 0, shown.err
        assert (tmp_path / out / "images" / "b.png").samefile(tmp_path / "b.png") is same
    assert cli("export", "voc", predictions, "--out", tmp_path / "x", "--link").code != 0


@pytest.mark.parametrize("form", ["coco", "yolo", "yolo-obb", "voc", "labelme", "csv", "dota"])
def test_any_file_name_can_be_exported(form: str, tmp_path: Path, cli: Cli) -> None:
    names = ("", "/", "a/..", "..", "a\x00b.png", "x" * 300 + ".png", "é" * 200, "a\x1b[2Jb.png")
    Image.new("RGB", (50, 40), "gray").save(tmp_path / "b.png")
    sound = ImageAnswer("", str(tmp_path / "b.png"), 50, 40, None, (CAT,))
    answers = [replace(sound, sample_id=f"s{n}", original=OriginalImage(one, 50, 40)) for n, one in enumerate(names)]
    write_answers(answers, tmp_path / "run" / "predictions.jsonl")
    out = tmp_path / "out"
    shown = cli("export", form, tmp_path / "run", "--out", out, "--images")
    assert shown.code == 0, shown.err
    assert all(path.resolve().is_relative_to(out.resolve()) for path in out.rglob("*"))
    assert len(list(out.rglob("*.png"))) == len(names)
    assert not {path.name for path in tmp_path.iterdir()} - {"b.png", "run", "out"}


NAMES = ["=1+1", "+a", "-b", "@c", "red\x1b[2J", "a\u2028b", "tab\tx", "\x7f", "</script>", "'quoted", "ends'", "'=x",
         "a, b"]  # fmt: skip
NAMED = [replace(CAT, desc=name) for name in NAMES]


def test_csv_gives_names_back_and_no_formula(tmp_path: Path, cli: Cli) -> None:
    shown = cli("export", "csv", answered(tmp_path, *NAMED), "--out", tmp_path / "out")
    assert shown.code == 0, shown.err
    assert "note: 9 names cannot be written as they are: '=x as ''=x, +a as '+a, -b as '-b" in shown.out
    rows = list(csv.DictReader((tmp_path / "out" / "objects.csv").open(encoding="utf-8", newline="")))
    assert not any(row["name"].startswith(tuple("=+-@")) for row in rows)
    report = convert_csv(tmp_path / "out" / "objects.csv", tmp_path / "back", images_dir=tmp_path)
    (record,) = read_jsonl(report.jsonl)
    assert sorted(obj.desc for obj in record.objects) == sorted(printable(name) for name in NAMES)


def test_voc_writes_xml_that_can_be_read(tmp_path: Path, cli: Cli) -> None:
    shown = cli("export", "voc", answered(tmp_path, *NAMED), "--out", tmp_path / "out")
    assert shown.code == 0 and "4 names cannot be written as they are: " in shown.out
    root = ElementTree.parse(tmp_path / "out" / "Annotations" / "b.xml").getroot()
    assert [one.findtext("name") for one in root.iter("object")] == [printable(name) for name in NAMES]


def test_yolos_data_yaml_has_every_name_and_folders_next_to_it(tmp_path: Path, cli: Cli) -> None:
    """Ultralytics reads ``path: .`` as the working directory, and a missing ``path`` as the folder of the file."""
    assert cli("export", "yolo", answered(tmp_path, *NAMED), "--out", tmp_path / "out").code == 0
    data = yaml.safe_load((tmp_path / "out" / "data.yaml").read_text(encoding="utf-8"))
    assert data["train"] == "images" and data["val"] == "images" and "path" not in data
    assert sorted(data["names"].values()) == sorted(NAMES)
