"""DOTA's text files: rotated boxes in pixels; and the smallest rectangle around other polygons."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import read_jsonl
from coordexp.data.convert import convert_dota
from coordexp.data.polygons import shape_area, smallest_rectangle
from coordexp.errors import DataError
from coordexp.records import GTObject
from support.annotation_folders import SMALL, paint

# On a 40 x 24 image: a diamond that touches all borders, and a box.
DIAMOND = GTObject("large-vehicle", "poly", (500, 0, 999, 500, 500, 999, 0, 500))
BOX = GTObject("ship", "poly", (250, 250, 749, 250, 749, 749, 250, 749))
LABEL = """imagesource:GoogleEarth
gsd:0.146343590398
20.0 0.0 40.0 12.0 20.0 24.0 0.0 12.0 large-vehicle 0
10 18 10 6 30 6 30 18 ship 1
10 18 10 6 30 6 ship 0
1 1 2 2 3 nan 4 4 ship 0
"""


def dota(folder: Path, labels: str = "labelTxt-v1.0") -> Path:
    for name in ("P0001", "P0002", "P0003"):
        paint(folder / "images" / f"{name}.png")
    (folder / labels).mkdir(parents=True)
    (folder / labels / "P0001.txt").write_text(LABEL)
    (folder / labels / "P0002.txt").write_text("")
    (folder / labels / "P0009.txt").write_text("1 1 9 1 9 9 1 9 ship 0\n")
    return folder


def test_dota(tmp_path: Path) -> None:
    report = convert_dota(dota(tmp_path / "train"), tmp_path / "out", options=SMALL)
    first, second = read_jsonl(report.jsonl, check_images=True)
    assert report.jsonl.name == "train.jsonl"
    assert first.objects == (DIAMOND, BOX) and second.objects == ()
    assert report.skipped_objects == {"malformed_geometry": 2, "image_skipped": 1}
    assert report.skipped_images == {"missing_image": 1, "missing_annotation": 1}
    assert (report.images_seen, report.objects_seen) == (4, 5)


def test_difficult_objects_and_bounds(tmp_path: Path) -> None:
    report = convert_dota(
        dota(tmp_path / "train"), tmp_path / "out", skip_difficult=True, geometry="bbox", options=SMALL
    )
    (first, _) = read_jsonl(report.jsonl)
    assert first.objects == (GTObject("large-vehicle", "bbox_2d", (0, 0, 999, 999)),)
    assert report.skipped_objects["difficult"] == 1


def test_several_folders_of_labels_are_named(tmp_path: Path) -> None:
    dota(tmp_path / "train", "labelTxt")
    dota(tmp_path / "val", "labelTxt")
    with pytest.raises(DataError, match=r"train/labelTxt.*val/labelTxt.*--labels-dir"):
        convert_dota(tmp_path, tmp_path / "out", options=SMALL)
    report = convert_dota(tmp_path, tmp_path / "out", labels_dir=tmp_path / "val" / "labelTxt", options=SMALL)
    assert (report.images, report.images_seen) == (2, 4)
    with pytest.raises(DataError, match="no folder labelTxt"):
        convert_dota(tmp_path / "val" / "images", tmp_path / "out")


def test_names_of_another_encoding_are_refused(tmp_path: Path) -> None:
    folder = dota(tmp_path / "train")
    (folder / "labelTxt-v1.0" / "P0002.txt").write_bytes("1 1 9 1 9 9 1 9 bâteau 0\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"P0002.txt: not UTF-8"):
        convert_dota(folder, tmp_path / "out", options=SMALL)


SHARES = st.floats(0, 1)
SIDES = st.floats(5, 100)


@given(st.floats(0, math.pi), SIDES, SIDES, st.lists(st.tuples(SHARES, SHARES), max_size=6))
def test_the_smallest_rectangle_of_a_turned_one_is_itself(
    angle: float, width: float, height: float, inside: list[tuple[float, float]]
) -> None:
    cos, sin = math.cos(angle), math.sin(angle)

    def turned(u: float, v: float) -> tuple[float, float]:
        return width * u * cos - height * v * sin, width * u * sin + height * v * cos

    corners = [turned(0, 0), turned(1, 0), turned(1, 1), turned(0, 1)]
    found = smallest_rectangle([*corners, *(turned(u, v) for u, v in inside)])
    for corner in corners:
        assert min(math.dist(corner, other) for other in found) < 1e-6
    assert shape_area("poly", [v for point in found for v in point]) == pytest.approx(width * height)


@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(1.0, 2.0), (4.0, 6.0)], [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]])
def test_a_rectangle_around_a_line_has_no_area(points: list[tuple[float, float]]) -> None:
    found = smallest_rectangle(points)
    assert len(found) == 4 and shape_area("poly", [v for point in found for v in point]) == pytest.approx(0)
    for point in (points[0], points[-1]):
        assert min(math.dist(point, other) for other in found) < 1e-9
