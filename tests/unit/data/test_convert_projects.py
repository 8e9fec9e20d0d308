"""CVAT, Label Studio and VIA: one file for a project, with shapes of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordexp.data import read_jsonl
from coordexp.data.convert import ConversionReport, convert_cvat, convert_labelstudio, convert_via
from coordexp.errors import DataError
from coordexp.records import GTObject
from support.annotation_folders import SMALL, paint

# On a 40 x 24 image: a box to the right and bottom edge, a polygon, a box turned by 90 degrees, a circle.
EXPECTED = (
    GTObject("cat", "bbox_2d", (250, 250, 999, 999)),
    GTObject("cat", "poly", (250, 250, 749, 250, 749, 749)),
    GTObject("dog", "poly", (350, 83, 649, 83, 649, 916, 350, 916)),
    GTObject("dog", "bbox_2d", (350, 250, 649, 749)),
)
CVAT = """<annotations><version>1.1</version>
<image id="0" name="set/a (1).jpg" width="40" height="24" subset="train">
  <box label="cat" xtl="10" ytl="6" xbr="40" ybr="24"/>
  <polygon label="cat" points="10,6;30,6;30,18"/>
  <box label="dog" xtl="10" ytl="6" xbr="30" ybr="18" rotation="90"/>
  <ellipse label="dog" cx="20" cy="12" rx="6" ry="6"/>
  <points label="cat" points="1,1"/><tag label="indoor"/>
</image>
<image id="1" name="b.jpg" width="40" height="24" subset="train"/>
<image id="2" name="c.jpg" width="40" height="24" subset="test"/>
</annotations>"""


def cvat(folder: Path) -> ConversionReport:
    (folder / "annotations.xml").write_text(CVAT)
    return convert_cvat(folder, folder / "out", split="train", options=SMALL)


def labelstudio(folder: Path) -> ConversionReport:
    def region(kind: str, label: str, **value: Any) -> dict[str, Any]:
        value |= {f"{kind}labels": [label]}
        return {"type": f"{kind}labels", "value": value, "original_width": 40, "original_height": 24}

    shapes = [
        region("rectangle", "cat", x=25, y=25, width=75, height=75),
        region("polygon", "cat", points=[[25, 25], [75, 25], [75, 75]]),
        # 20 x 12 pixels, turned about its top left corner at (26, 2).
        region("rectangle", "dog", x=65, y=100 * 2 / 24, width=50, height=50, rotation=90),
        region("ellipse", "dog", x=50, y=50, radiusX=15, radiusY=25),
        region("keypoint", "cat", x=5, y=5, width=1),
        {"type": "choices", "value": {"choices": ["indoor"]}},
    ]
    tasks = [
        {"data": {"image": "/data/upload/1/0123abcd-a%20(1).jpg"}, "annotations": [{"result": shapes}]},
        {
            "data": {"image": "/data/local-files/?d=photos/b.jpg", "note": "//["},
            "annotations": [{"result": []}],
        },
        {"data": {"image": "c.jpg"}, "annotations": [{"result": shapes, "was_cancelled": True}]},
    ]
    (folder / "project.json").write_text(json.dumps(tasks))
    return convert_labelstudio(folder / "project.json", folder / "out", options=SMALL)


def via(folder: Path) -> ConversionReport:
    def region(label: str, name: str, **shape: Any) -> dict[str, Any]:
        attributes = {"label": label, "occluded": "no"}
        return {"shape_attributes": {"name": name, **shape}, "region_attributes": attributes}

    regions = [
        region("cat", "rect", x=10, y=6, width=30, height=18),
        region("cat", "polygon", all_points_x=[10, 30, 30], all_points_y=[6, 6, 18]),
        region("dog", "polygon", all_points_x=[14, 26, 26, 14], all_points_y=[2, 2, 22, 22]),
        region("dog", "circle", cx=20, cy=12, r=6),
        region("cat", "point", cx=1, cy=1),
    ]
    images = {
        "a (1).jpg9": {"filename": "a (1).jpg", "size": 9, "regions": regions, "file_attributes": {}},
        "b.jpg9": {"filename": "b.jpg", "size": 9, "regions": {}, "file_attributes": {}},
    }
    (folder / "via.json").write_text(json.dumps({"_via_settings": {}, "_via_img_metadata": images}))
    return convert_via(folder / "via.json", folder / "out", options=SMALL)


@pytest.mark.parametrize("convert", [cvat, labelstudio, via])
def test_projects(tmp_path: Path, convert: Callable[[Path], ConversionReport]) -> None:
    for name in ("set/a (1).jpg", "photos/b.jpg", "photos/c.jpg"):
        paint(tmp_path / name)
    report = convert(tmp_path)
    first, second = read_jsonl(report.jsonl, check_images=True)
    assert first.metadata["source"]["file"] == "set/a (1).jpg" and second.objects == ()
    assert [(obj.desc, obj.kind) for obj in first.objects] == [(obj.desc, obj.kind) for obj in EXPECTED]
    for found, wanted in zip(first.objects, EXPECTED, strict=True):
        assert max(abs(a - b) for a, b in zip(found.bins, wanted.bins, strict=True)) <= 1, (found, wanted)
    assert report.skipped_objects == {"unsupported_shape": 1}
    assert report.skipped_images == ({"unlabelled": 1} if convert is labelstudio else {})


def test_a_class_attribute_that_is_not_clear_is_asked_for(tmp_path: Path) -> None:
    region = {"shape_attributes": {"name": "rect", "x": 1, "y": 1, "width": 9, "height": 9},
              "region_attributes": {"art": "cat", "colour": "red"}}  # fmt: skip
    paint(tmp_path / "a.jpg")
    (tmp_path / "via.json").write_text(json.dumps({"a": {"filename": "a.jpg", "regions": [region]}}))
    with pytest.raises(DataError, match=r"art, colour.*--attribute"):
        convert_via(tmp_path / "via.json", tmp_path / "out", options=SMALL)
    report = convert_via(tmp_path / "via.json", tmp_path / "out", attribute="art", options=SMALL)
    assert report.objects_by_desc == {"cat": 1}


@pytest.mark.parametrize("form", ["via", "labelstudio"])
def test_a_shape_of_several_classes_is_an_object_of_each(form: str, tmp_path: Path) -> None:
    paint(tmp_path / "a.jpg")
    if form == "via":
        region = {"shape_attributes": {"name": "rect", "x": 10, "y": 6, "width": 20, "height": 12},
                  "region_attributes": {"label": {"cat": True, "cow": False, "dog": True}}}  # fmt: skip
        (tmp_path / "v.json").write_text(json.dumps({"a": {"filename": "a.jpg", "regions": [region]}}))
        report = convert_via(tmp_path / "v.json", tmp_path / "out", options=SMALL)
    else:
        value = {"x": 25, "y": 25, "width": 50, "height": 50, "rectanglelabels": ["cat", "dog"]}
        region = {"type": "rectanglelabels", "value": value}
        tasks = [{"data": {"image": "a.jpg"}, "annotations": [{"result": [region]}]}]
        (tmp_path / "l.json").write_text(json.dumps(tasks))
        report = convert_labelstudio(tmp_path / "l.json", tmp_path / "out", options=SMALL)
    (record,) = read_jsonl(report.jsonl)
    assert [(obj.desc, obj.bins) for obj in record.objects] == [
        ("cat", (250, 250, 749, 749)), ("dog", (250, 250, 749, 749)),
    ]  # fmt: skip
    assert (report.objects_seen, report.notes["several_classes"]) == (2, 1)


def test_a_null_class_counts_as_missing(tmp_path: Path) -> None:
    paint(tmp_path / "a.jpg")
    shape = {"name": "rect", "x": 10, "y": 6, "width": 20, "height": 12}
    regions = [{"shape_attributes": shape, "region_attributes": {"label": name}} for name in (None, "cat", 7)]
    (tmp_path / "v.json").write_text(json.dumps({"a": {"filename": "a.jpg", "regions": regions}}))
    report = convert_via(tmp_path / "v.json", tmp_path / "out", options=SMALL)
    assert report.objects_by_desc == {"cat": 1, "7": 1} and report.skipped_objects == {"empty_desc": 1}
