"""Conversion: every format gives the same records, images are resized once, and everything left out is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from coordexp.config.rollout import EvalDetectionConfig
from coordexp.data import read_jsonl
from coordexp.data.convert import (
    ConversionReport,
    ImageOptions,
    convert_coco,
    convert_csv,
    convert_labelme,
    convert_voc,
    convert_yolo,
    render_report,
)
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.evaluation.summary import summarise
from coordexp.geometry import pixel_ring, to_bin, to_pixel
from coordexp.records import GTObject
from support.annotation_folders import KEEP, SMALL, coco, objects_of, paint, voc, voc_object, voc_xml
from support.cli_runs import files_of_at_most
from support.one_scene import BOXES, RINGS, SIZE, as_coco, as_csv, as_labelme, as_voc, as_yolo

# --- quantisation ---


@given(extent=st.integers(1, 5000), data=st.data())
def test_a_bin_is_within_half_a_bin_of_its_pixel(extent: int, data: st.DataObject) -> None:
    x = data.draw(st.floats(0, extent))
    assert abs(to_pixel(to_bin(x, extent), extent) - x) <= extent / 999 / 2 + 1e-6
    assert (to_pixel(0, extent), to_pixel(999, extent)) == (0, extent)


@given(x=st.floats(-1e6, 1e6), y=st.floats(-1e6, 1e6), extent=st.integers(1, 5000))
def test_bins_stay_in_range_and_keep_the_order_of_pixels(x: float, y: float, extent: int) -> None:
    low, high = sorted((x, y))
    assert 0 <= to_bin(low, extent) <= to_bin(high, extent) <= 999


# --- one scene, every format ---


def convert(form: str, source: Path, out: Path, *, rings: bool) -> ConversionReport:
    options = replace(SMALL, name="data")
    match form:
        case "voc":
            return convert_voc(as_voc(source), out, options=options)
        case "coco" | "lvis":
            geometry = "poly" if rings else "bbox"
            return convert_coco(
                *as_coco(source, rings=rings), out, geometry=geometry, lvis=form == "lvis", options=options
            )
        case "labelme":
            return convert_labelme(as_labelme(source, rings=rings), out, options=options)
        case "csv":
            return convert_csv(as_csv(source, rings=rings), out, options=options)
    folder = as_yolo(source, rings=rings, data_yaml=form == "yolo")
    return convert_yolo(folder, out, split="train", options=options)


def corners_of(box: Sequence[float]) -> list[tuple[float, float]]:
    x1, y1, x2, y2 = box
    return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]


@pytest.mark.parametrize("rings", [False, True], ids=["boxes", "polygons"])
def test_every_format_gives_the_same_records_and_they_evaluate_as_perfect(tmp_path: Path, rings: bool) -> None:
    found, records = {}, []
    for form in ["coco", "yolo", "yolo without data.yaml", "labelme", "csv", "lvis", *([] if rings else ["voc"])]:
        report = convert(form, tmp_path / form / "in", tmp_path / form / "out", rings=rings)
        records = read_jsonl(report.jsonl, check_images=True)
        found[form] = [(r.image.name, r.width, r.height, r.objects, r.metadata) for r in records]
        assert (report.images_seen, report.images, report.skipped) == (2, 2, {}), form
        assert report.objects == report.objects_seen == len(RINGS if rings else BOXES), form
        assert found[form] == found["coco"], form
        assert {obj.kind for r in records for obj in r.objects} == {"poly" if rings else "bbox_2d"}
        # Within half a bin of what was annotated, also where that is the image's edge.
        for obj, (desc, points) in zip(records[0].objects, RINGS if rings else BOXES, strict=True):
            found_points = pixel_ring(obj, *SIZE)
            wanted = zip(points[0::2], points[1::2], strict=True) if rings else corners_of(points)
            for x, y in wanted:
                nearest = min(found_points, key=lambda point: abs(point[0] - x) + abs(point[1] - y))
                assert abs(nearest[0] - x) < SIZE[0] / 1997 and abs(nearest[1] - y) < SIZE[1] / 1997, (form, desc)
    answers = [
        ImageAnswer(r.sample_id, str(r.image), r.width, r.height, r.objects,
                    tuple(ScoredObject(o.desc, o.kind, o.bins, 0.5) for o in r.objects))
        for r in records
    ]  # fmt: skip
    figures = summarise(answers, EvalDetectionConfig(use_segm=True).scored(None)).figures
    assert {figures[name] for name in ("f1", "precision", "recall", "mean_matched_iou")} == {1.0}
    for name in ("AP", "AP50", "AP75", "segm_AP", "AR100"):
        assert figures[name] == pytest.approx(1.0), name


def test_records_name_their_source_and_their_resize_rule(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 4, 3, 20, 15), voc_object("dog", 10, 10, 40, 24))
    (record,) = read_jsonl(
        convert_voc(root, tmp_path / "out", options=replace(SMALL, name="set")).jsonl, check_images=True
    )
    assert record.image == tmp_path / "out" / "images" / "set" / "a.jpg"
    corners = (round(999 * 4 / 40), round(999 * 3 / 24), round(999 * 20 / 40), round(999 * 15 / 24))
    assert record.objects == (
        GTObject("cat", "bbox_2d", corners),
        GTObject("dog", "bbox_2d", (round(999 * 10 / 40), round(999 * 10 / 24), 999, 999)),
    )
    assert record.metadata == {
        "source": {"file": "a.jpg", "width": 40, "height": 24},
        "prepared": {"factor": 8, "min_pixels": 64, "max_pixels": 4096},
    }


# --- images ---


def test_images_are_resized_to_the_grid_and_coordinates_do_not_move(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 4, 3, 20, 15))
    kept = convert_voc(root, tmp_path / "kept", options=KEEP)
    grown = convert_voc(root, tmp_path / "grown", options=ImageOptions())
    (small,), (large,) = read_jsonl(kept.jsonl, check_images=True), read_jsonl(grown.jsonl, check_images=True)
    assert (small.width, small.height) == (40, 24) and small.image == root / "JPEGImages" / "a.jpg"
    assert (large.width, large.height) == (352, 224) and large.image.parent == tmp_path / "grown" / "images" / "data"
    assert small.objects == large.objects


def test_an_image_already_on_the_grid_is_copied_byte_for_byte(tmp_path: Path) -> None:
    report = convert_voc(voc(tmp_path / "voc"), tmp_path / "out", options=SMALL)
    (record,) = read_jsonl(report.jsonl)
    assert record.image.read_bytes() == (tmp_path / "voc" / "JPEGImages" / "a.jpg").read_bytes()


def test_other_formats_become_png_under_different_names(tmp_path: Path) -> None:
    images = [{"id": at, "file_name": name, "width": 40, "height": 24} for at, name in enumerate(["a.bmp", "a.png"])]
    path = coco(tmp_path, [{"image_id": at, "bbox": [1, 1, 9, 9]} for at in (0, 1)], images)
    paint(tmp_path / "images" / "a.bmp")
    Image.new("RGBA", (40, 24), (0, 0, 0, 0)).save(tmp_path / "images" / "a.png")
    report = convert_coco(path, tmp_path / "images", tmp_path / "out", options=SMALL)
    bmp, png = read_jsonl(report.jsonl, check_images=True)
    assert (bmp.image.name, png.image.name) == ("a.bmp.png", "a.png")
    assert np.asarray(Image.open(png.image)).min() == 255, "transparent pixels show white"


@pytest.mark.parametrize(
    ("size", "where", "reason"),
    [
        (None, "notes", "size_missing"),
        ((0, 0), "notes", "size_missing"),
        (("wide", "high"), "notes", "size_missing"),
        ((80, 48), "notes", "size_scaled"),
        ((40, 40), "skipped_images", "size_mismatch"),  # another shape
    ],
)
def test_a_wrong_size_is_reported(tmp_path: Path, size: Any, where: str, reason: str) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 0, 0, 10, 12), size=size)
    paint(root / "JPEGImages" / "b.jpg")
    voc_xml(root, "b", voc_object("dog", 0, 0, 10, 12))
    report = convert_voc(root, tmp_path / "out", options=SMALL)
    assert getattr(report, where) == {reason: 1}
    assert [(p.reason, p.file) for p in report.problems] == [(reason, "a.xml")]
    records = read_jsonl(report.jsonl)
    if where == "skipped_images":
        assert len(records) == 1 and report.skipped_objects == {"image_skipped": 1}
    else:
        extent = 80 if reason == "size_scaled" else 40
        assert records[0].objects[0].bins[2] == to_bin(10, extent)


def test_an_output_folder_that_would_overwrite_the_source_is_refused(tmp_path: Path) -> None:
    paint(tmp_path / "images" / "instances" / "a.jpg", (41, 25))
    image = {"id": 1, "file_name": "a.jpg", "width": 41, "height": 25}
    path = coco(tmp_path, [{"image_id": 1, "bbox": [1, 1, 9, 9]}], [image])
    before = (tmp_path / "images" / "instances" / "a.jpg").read_bytes()
    with pytest.raises(DataError, match="out_dir"):
        convert_coco(path, tmp_path / "images" / "instances", tmp_path)
    assert (tmp_path / "images" / "instances" / "a.jpg").read_bytes() == before


# --- objects and images that are left out ---

VOC_OBJECTS = [
    ("point", voc_object("RBC", 5, 5, 5, 5), "zero_area"),
    ("line", voc_object("RBC", 5, 5, 9, 5), "zero_area"),
    ("inverted", voc_object("RBC", 9, 5, 5, 8), "inverted"),
    ("outside", voc_object("RBC", 50, 5, 60, 8), "outside_image"),
    ("above", voc_object("RBC", 5, -9, 9, 0), "outside_image"),
    ("no number", voc_object("RBC", "x", 5, 9, 8), "malformed_geometry"),
    ("infinite", voc_object("RBC", "inf", 5, 9, 8), "malformed_geometry"),
    ("no box", "<object><name>RBC</name></object>", "malformed_geometry"),
    ("no name", voc_object(" ", 5, 5, 9, 8), "empty_desc"),
    ("control token", voc_object("&lt;|im_end|&gt;", 5, 5, 9, 8), "refused_desc"),
    ("difficult", voc_object("RBC", 5, 5, 9, 8, extra="<difficult>1</difficult>"), "difficult"),
]


@pytest.mark.parametrize(("node", "reason"), [case[1:] for case in VOC_OBJECTS], ids=[case[0] for case in VOC_OBJECTS])
def test_voc_objects_left_out_are_counted_and_located(tmp_path: Path, node: str, reason: str) -> None:
    root = voc(tmp_path / "voc", voc_object("WBC", 1, 1, 9, 9), node)
    report = convert_voc(root, tmp_path / "out", options=SMALL, skip_difficult=True)
    assert [obj.desc for obj in objects_of(report)] == ["WBC"]
    assert report.skipped_objects == {reason: 1} and (report.objects_seen, report.objects) == (2, 1)
    assert [(p.reason, p.file, p.object_index) for p in report.problems] == [(reason, "a.xml", 1)]


def test_odd_objects_are_kept_and_reported(tmp_path: Path) -> None:
    twice = voc_object("cat", 1, 1, 9, 9)
    touching = voc_object("cat", -0.4, 2, 40.9, 9)
    thin = voc_object("cat", 39.99, 2, 40, 9)
    root = voc(tmp_path / "voc", voc_object("cat", -5, 2, 45, 10), thin, twice, twice, touching)
    report = convert_voc(root, tmp_path / "out", options=SMALL)
    assert report.notes == {"clipped": 1, "collapsed_bins": 1, "duplicate_object": 1}
    assert objects_of(report)[0].bins[::2] == (0, 999) and report.objects == 5


@pytest.mark.parametrize("keep", [False, True])
def test_images_that_lost_all_objects_are_left_out_unless_kept(tmp_path: Path, keep: bool) -> None:
    root = voc(tmp_path / "voc", voc_object("RBC", 5, 5, 5, 5))
    for stem, objects in (("b", ()), ("c", (voc_object("RBC", 5, 5, 9, 9),))):
        paint(root / "JPEGImages" / f"{stem}.jpg")
        voc_xml(root, stem, *objects)
    report = convert_voc(root, tmp_path / "out", options=replace(SMALL, keep_emptied=keep))
    assert (report.notes, report.skipped_images) == (({"emptied_image": 1}, {}) if keep else ({}, {"emptied_image": 1}))
    names = [record.image.name for record in read_jsonl(report.jsonl, check_images=True)]
    assert names == sorted(path.name for path in (tmp_path / "out" / "images" / "data").iterdir())
    assert names == (["a.jpg"] if keep else []) + ["b.jpg", "c.jpg"]


def test_a_set_that_would_lose_all_objects_is_refused(tmp_path: Path) -> None:
    path = coco(tmp_path / "coco", [{"bbox": [1, 1, 9, 9]}, {"bbox": [2, 2, 9, 9]}])
    with pytest.raises(DataError, match=r"0 of 2 .*no_segmentation: 2.*--geometry bbox"):
        convert_coco(path, tmp_path / "coco" / "images", tmp_path / "out", geometry="poly", options=SMALL)
    left = [file.name for file in (tmp_path / "out").rglob("*")]
    assert left == ["instances.conversion_report.json"], "images without a dataset stay"


@pytest.mark.parametrize("writable", [100, 2000], ids=["no-image", "images-but-no-jsonl"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_nothing_new(tmp_path: Path, writable: int, existing: bool) -> None:
    root = voc(tmp_path / "voc", *(voc_object("cat", x, 1, 9, y) for x in (1, 2, 3) for y in range(4, 24)))
    out = tmp_path / "new" / "out"
    if existing:
        out.mkdir(parents=True)
        (out / "mine.txt").write_text("kept")
    with files_of_at_most(writable), pytest.raises(OSError, match="File too large"):
        convert_voc(root, out, options=SMALL)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.glob("new/**/*")]
    assert left == (["new/out", "new/out/mine.txt"] if existing else [])
    assert (tmp_path / "new").exists() is existing
    assert len(objects_of(convert_voc(root, out, options=SMALL))) == 60


@pytest.mark.parametrize("resize", [True, False])
def test_an_interrupted_conversion_leaves_no_dataset_with_images_of_another(tmp_path: Path, resize: bool) -> None:
    """Its images were replaced one by one by others of the same names, and its JSONL stayed."""
    options = replace(SMALL if resize else KEEP, overwrite=True)
    convert_voc(voc(tmp_path / "voc", voc_object("cat", 1, 1, 9, 9)), tmp_path / "out", options=options)

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_voc(tmp_path / "voc", tmp_path / "out", options=replace(options, progress=interrupted))
    assert (tmp_path / "out" / "data.jsonl").exists() is not resize


def test_an_object_of_several_boxes_is_an_object_of_each(tmp_path: Path) -> None:
    """ybat writes all boxes of a class into one <object>; boxes of its parts (head, hand) are not objects."""
    second, part = voc_object("", 20, 4, 30, 16), voc_object("head", 2, 3, 4, 5).replace("object>", "part>")
    extra = second.removeprefix("<object><name></name>").removesuffix("</object>") + part
    root = voc(tmp_path / "voc", voc_object("cat", 1, 2, 9, 12, extra=extra))
    report = convert_voc(root, tmp_path / "out", options=SMALL)
    boxes = [tuple(to_bin(value, side) for value, side in zip(box, (40, 24, 40, 24), strict=True))
             for box in ((1, 2, 9, 12), (20, 4, 30, 16))]  # fmt: skip
    assert report.objects_seen == 2 and [obj.bins for obj in objects_of(report)] == boxes


def test_voc_files_left_out_are_counted(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 1, 1, 9, 9))
    voc_xml(root, "b", voc_object("cat", 1, 1, 9, 9), voc_object("cat", 2, 2, 9, 9))  # no image
    paint(root / "JPEGImages" / "c.jpg")  # no annotation
    (root / "Annotations" / "d.xml").write_text("<annotation><object>")
    paint(root / "JPEGImages" / "d.jpg")
    voc_xml(root, "e")
    (root / "JPEGImages" / "e.jpg").write_bytes(b"no image")
    paint(root / "JPEGImages" / "f.jpg", (900, 2))
    voc_xml(root, "f", size=(900, 2))
    voc_xml(root, "g", filename="a.jpg")
    report = convert_voc(root, tmp_path / "out", options=SMALL)
    assert [record.image.name for record in read_jsonl(report.jsonl)] == ["a.jpg"]
    assert report.skipped_images == {
        "missing_image": 1,
        "missing_annotation": 1,
        "unreadable_annotation": 1,
        "unreadable_image": 1,
        "extreme_aspect_ratio": 1,
        "duplicate_image": 1,
    }
    assert report.skipped_objects == {"image_skipped": 2} and report.notes == {"filename_mismatch": 1}
    assert report.images_seen == 7 and report.objects_seen == 3
    assert {p.file for p in report.problems} == {f"{stem}.xml" for stem in "bcdefg"}


def test_a_truncated_image_is_found_without_copying_images(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / "JPEGImages" / "b.jpg")
    cut = (root / "JPEGImages" / "b.jpg").read_bytes()[:2000]
    (root / "JPEGImages" / "b.jpg").write_bytes(cut)
    voc_xml(root, "b", size=(64, 64))
    report = convert_voc(root, tmp_path / "out", options=KEEP)
    assert report.images == 1 and report.skipped_images == {"unreadable_image": 1}


def test_splits_keep_their_order_and_count_bad_lines(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc")
    for stem in ("b", "my photo"):
        paint(root / "JPEGImages" / f"{stem}.jpg")
        voc_xml(root, stem)
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("my photo  1\nb -1\na\nb\ngone\n../b\n\n")
    report = convert_voc(root, tmp_path / "out", split="train", options=SMALL)
    assert report.jsonl.name == "train.jsonl"
    assert [record.image.stem for record in read_jsonl(report.jsonl)] == ["my photo", "b", "a"]
    assert report.skipped_images == {"duplicate_image": 1, "missing_annotation": 1, "unsafe_file_name": 1}
    with pytest.raises(DataError, match=r"'val'.*train"):
        convert_voc(root, tmp_path / "out", split="val")


def test_one_based_boxes_are_shifted_on_request_only(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 1, 1, 40, 24))
    as_given = convert_voc(root, tmp_path / "out", options=SMALL)
    shifted = convert_voc(root, tmp_path / "out", one_based=True, options=replace(SMALL, name="shifted"))
    assert objects_of(as_given)[0].bins == (to_bin(1, 40), to_bin(1, 24), 999, 999)
    assert objects_of(shifted)[0].bins == (0, 0, 999, 999)


# --- the report ---


def test_the_report_is_next_to_the_jsonl_and_renders(tmp_path: Path) -> None:
    nodes = [voc_object("cat", 1, 1, 9, 9), *[voc_object("cat", 5, 5, 5, 5)] * 3]
    calls: list[tuple[int, int]] = []
    report = convert_voc(
        voc(tmp_path / "voc", *nodes), tmp_path / "out", options=replace(SMALL, progress=lambda *at: calls.append(at))
    )
    assert calls == [(1, 1)]
    stored = json.loads((tmp_path / "out" / "data.conversion_report.json").read_text())
    assert stored == json.loads(report.to_json())
    assert (stored["images"], stored["objects"], stored["objects_seen"]) == (1, 1, 4)
    assert stored["skipped_objects"] == {"zero_area": 3} and stored["objects_by_desc"] == {"cat": 1}
    assert stored["problems"][0]["file"] == "a.xml" and stored["problems"][0]["object_index"] == 1
    console = Console(width=160, record=True, quiet=False, file=(tmp_path / "table.txt").open("w"))
    console.print(render_report(report, examples=2))
    text = console.export_text()
    assert [f"a.xml object {k}" in text for k in (1, 2, 3)] == [True, True, False]
    assert text.count("zero_area") == 1 and "more in data.conversion_report.json" in text
    assert report.skipped.total() == 3


def test_converting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    root = voc(tmp_path / "voc", voc_object("cat", 1, 1, 9, 9))
    first = convert_voc(root, tmp_path / "out", options=ImageOptions(workers=1))
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert first.images == 1 and len(before) == 3
    with pytest.raises(DataError, match=r"data\.jsonl: .*--overwrite"):
        convert_voc(root, tmp_path / "out")
    convert_voc(root, tmp_path / "out", options=ImageOptions(workers=8, overwrite=True))
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
