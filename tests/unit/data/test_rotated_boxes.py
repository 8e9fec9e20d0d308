"""Rotated boxes and ellipses of other tools."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from coordexp.data import read_jsonl
from coordexp.data.convert import ConversionReport, convert_cvat, convert_labelme, convert_voc
from coordexp.geometry import pixel_ring
from support.annotation_folders import KEEP, boxes_of, paint, voc_xml
from support.box_formats import Box, written

SIZE = (640, 480)
TURNED = ((110, 80), (110, 120), (90, 120), (90, 80))  # 40 x 20 about (100, 100), a quarter turn


def ring_of(report: ConversionReport) -> set[tuple[int, int]]:
    (record,) = read_jsonl(report.jsonl)
    (obj,) = record.objects
    return {(round(x), round(y)) for x, y in pixel_ring(obj, *SIZE)}


def cvat_shape(home: Path, shape: str, **options: Any) -> ConversionReport:
    paint(home / "images" / "a.jpg", SIZE)
    text = f'<annotations><image name="a.jpg" width="640" height="480">{shape}</image></annotations>'
    return convert_cvat(written(home / "images" / "a.xml", text), home / "out", options=KEEP, **options)


def voc_shapes(home: Path, *shapes: str) -> ConversionReport:
    paint(home / "images" / "a.jpg", SIZE)
    voc_xml(home, "a", *(f"<object><name>ship</name>{shape}</object>" for shape in shapes), size=SIZE)
    return convert_voc(home, home / "out", images_dir="images", options=KEEP)


@pytest.mark.parametrize("turn", ["inf", "nan", "1e400", "thirty"])
def test_a_turn_that_is_no_number_is_counted(turn: str, tmp_path: Path) -> None:
    """Infinity was a traceback, and text no turn."""
    box = '<box label="ship" xtl="80" ytl="90" xbr="120" ybr="110"/>'
    report = cvat_shape(tmp_path, box + box.replace("/>", f' rotation="{turn}"/>'))
    assert (report.objects, report.skipped_objects) == (1, {"malformed_geometry": 1})
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    turned = f"<robndbox><cx>9</cx><cy>9</cy><w>4</w><h>4</h><angle>{turn}</angle></robndbox>"
    report = voc_shapes(tmp_path / "r", box, turned)
    assert (report.objects, report.skipped_objects) == (1, {"malformed_geometry": 1})


def test_turns_are_clockwise(tmp_path: Path) -> None:
    box = '<box label="ship" xtl="80" ytl="90" xbr="120" ybr="110" rotation="30"/>'  # 40 x 20 about (100, 100)
    (record,) = read_jsonl(cvat_shape(tmp_path, box).jsonl)
    ring = pixel_ring(record.objects[0], *SIZE)
    for corner in ((87.7, 81.3), (122.3, 101.3), (112.3, 118.7), (77.7, 98.7)):
        assert min(math.dist(corner, point) for point in ring) < 0.6


@pytest.mark.parametrize(
    ("turn", "around"), [(0, (60, 80, 140, 120)), (30, (64, 74, 136, 126)), (90, (80, 60, 120, 140))]
)
def test_the_box_of_a_turned_ellipse_is_the_ellipses_own(turn: int, around: Box, tmp_path: Path) -> None:
    """Smaller than the bounds of the turned box around it."""
    ellipse = f'<ellipse label="pond" cx="100" cy="100" rx="40" ry="20" rotation="{turn}"/>'
    assert boxes_of(cvat_shape(tmp_path / "box", ellipse))["a.jpg"] == [("pond", around)]
    ring = ring_of(cvat_shape(tmp_path / "ring", ellipse, geometry="poly"))
    assert len(ring) == 24
    bounds = (min(x for x, _ in ring), min(y for _, y in ring), max(x for x, _ in ring), max(y for _, y in ring))
    assert all(abs(a - b) <= 1 for a, b in zip(bounds, around, strict=True))


def test_rotated_boxes_of_rolabelimg_and_x_anylabeling_are_polygons(tmp_path: Path) -> None:
    box = f"<cx>100</cx><cy>100</cy><w>40</w><h>20</h><angle>{math.pi / 2}</angle>"
    assert ring_of(voc_shapes(tmp_path / "r", f"<type>robndbox</type><robndbox>{box}</robndbox>")) == set(TURNED)
    points = [list(point) for point in TURNED]
    shape = {"label": "ship", "shape_type": "rotation", "points": points, "direction": 1.57, "group_id": None}
    paint(tmp_path / "x" / "a.jpg", SIZE)
    written(tmp_path / "x" / "a.json", {"shapes": [shape], "imagePath": "a.jpg", "imageWidth": 640, "imageHeight": 480})
    assert ring_of(convert_labelme(tmp_path / "x", tmp_path / "out", options=KEEP)) == set(TURNED)
    polygon = f"<polygon>{''.join(f'<pt><x>{x}</x><y>{y}</y></pt>' for x, y in TURNED)}</polygon>"
    report = voc_shapes(tmp_path / "w", *(f"<deleted>{deleted}</deleted>{polygon}" for deleted in (0, 1)))
    assert ring_of(report) == set(TURNED) and report.skipped_objects == {"ignored": 1}
