"""``coordexp data tile``: which tiles there are, and what each contains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from coordexp.data import read_jsonl, write_jsonl
from coordexp.data.completed import COMPLETION
from coordexp.data.images import open_rgb
from coordexp.data.polygons import clipped_shape
from coordexp.data.tiles import CutTiles, TileCounts, Tiling, tile_records, whole_of, write_tiles
from coordexp.errors import ConfigError, DataError
from coordexp.geometry import pixel_box, pixel_ring
from coordexp.records import GTObject, ImageRecord
from support.cli_runs import Cli

NOTE = {"camera": "7"}


def photograph(folder: Path, *objects: GTObject, size: tuple[int, int] = (999, 999), name: str = "photo.png") -> Path:
    """A dataset of one photograph of random pixels. On 999 pixels a bin is a pixel."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    write_jsonl([ImageRecord("p", folder / name, *size, objects, NOTE)], folder / "photos.jsonl")
    return folder / "photos.jsonl"


def box(x1: int, y1: int, x2: int, y2: int, name: str = "cell") -> GTObject:
    return GTObject(name, "bbox_2d", (x1, y1, x2, y2))


@pytest.mark.parametrize(
    ("size", "tiling", "starts"),
    [
        ((1000, 512), Tiling(512, 512, 0.2), [0, 244, 488]),
        ((922, 512), Tiling(512, 512, 0.2), [0, 410]),
        ((1024, 512), Tiling(512, 512, 0.0), [0, 512]),
        ((1025, 512), Tiling(512, 512, 0.0), [0, 256, 513]),
        ((300, 512), Tiling(512, 512, 0.2), [0]),
    ],
)
def test_tiles_are_equally_large_and_evenly_spread(size: tuple[int, int], tiling: Tiling, starts: list[int]) -> None:
    windows = tiling.windows(*size)
    assert [window[0] for window in windows] == starts
    assert {window[2] - window[0] for window in windows} == {min(512, size[0])}
    assert windows[-1][2:] == size


@pytest.mark.parametrize("size", ["512", 512, "512x512", (512, 512)])
def test_a_size_is_a_side_or_two(size: str | int | tuple[int, int]) -> None:
    assert Tiling.of(size) == Tiling(512, 512)


@pytest.mark.parametrize("size", ["", "512x", "1x2x3", "big", 0, True, (1, 2, 3)])
def test_other_sizes_are_refused(size: str | int | tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="tiles"):
        Tiling.of(size)


def test_tiles_show_the_photographs_pixels_and_its_objects(tmp_path: Path) -> None:
    source = photograph(tmp_path / "photos", box(100, 110, 140, 150), box(480, 20, 560, 60, "leaf"))
    counts = write_tiles(read_jsonl(source), tmp_path / "tiles.jsonl", Tiling(512, 512, 0.0))
    assert counts == TileCounts(1, tiles=4, annotated=2, whole=1, cut=2, negatives=2)
    photo = np.asarray(open_rgb(tmp_path / "photos/photo.png"))
    tiles = read_jsonl(tmp_path / "tiles.jsonl", check_images=True)
    for tile in tiles:
        x1, y1, x2, y2 = tile.metadata["tile"]["box"]
        assert tile.image.name == f"photo_{x1}_{y1}_{x2}_{y2}.png"
        assert (np.asarray(open_rgb(tile.image)) == photo[y1:y2, x1:x2]).all()
    first, second = tiles[:2]
    assert [obj.desc for obj in first.objects] == ["cell", "leaf"] and [obj.desc for obj in second.objects] == ["leaf"]
    assert pixel_box(first.objects[0], 512, 512) == pytest.approx((100, 110, 140, 150), abs=512 / 999)
    assert pixel_box(first.objects[1], 512, 512) == pytest.approx((480, 20, 512, 60), abs=512 / 999)
    x1 = second.metadata["tile"]["box"][0]
    assert pixel_box(second.objects[0], 512, 512) == pytest.approx((max(480 - x1, 0), 20, 560 - x1, 60), abs=512 / 999)


def test_a_tile_has_its_photograph_and_place_in_its_metadata(tmp_path: Path) -> None:
    source = photograph(tmp_path / "photos", box(480, 20, 560, 60), size=(999, 400))
    write_tiles(read_jsonl(source), tmp_path / "out/tiles.jsonl", Tiling(512, 512, 0.0))
    (first, *_) = read_jsonl(tmp_path / "out/tiles.jsonl")
    assert first.metadata == {
        "tile": {
            "image": "../photos/photo.png",
            "width": 999,
            "height": 400,
            "line": "photos.jsonl:1",
            "metadata": {"camera": "7"},
            "box": [0, 0, 512, 400],
            "cut": 1,
        },
    }


def test_small_parts_are_left_out_and_objects_of_no_tile_are_counted(tmp_path: Path) -> None:
    # 20 of its 80 columns are in the first tile, 61 in the second.
    source = photograph(tmp_path, box(480, 20, 560, 60), size=(999, 400))
    some = write_tiles(read_jsonl(source), tmp_path / "some.jsonl", Tiling(500, 500, 0.0), min_area_ratio=0.5)
    assert (some.cut, some.left_out, some.lost) == (1, 1, 0)
    none = write_tiles(read_jsonl(source), tmp_path / "none.jsonl", Tiling(500, 500, 0.0), min_area_ratio=0.9)
    assert (none.cut, none.left_out, none.lost) == (0, 2, 1)


def test_negatives_are_kept_by_a_share_that_depends_on_the_seed_alone(tmp_path: Path) -> None:
    source = photograph(tmp_path, box(5, 5, 20, 20))
    every = write_tiles(read_jsonl(source), tmp_path / "all.jsonl", Tiling(100, 100, 0.0))
    assert (every.tiles, every.negatives) == (100, 99)
    half = write_tiles(read_jsonl(source), tmp_path / "half.jsonl", Tiling(100, 100, 0.0), negatives=0.5)
    assert half.negatives + half.negatives_left_out == 99 and 35 <= half.negatives <= 65
    again = write_tiles(read_jsonl(source), tmp_path / "again.jsonl", Tiling(100, 100, 0.0), negatives=0.5)
    assert again == half
    none = write_tiles(read_jsonl(source), tmp_path / "none.jsonl", Tiling(100, 100, 0.0), negatives=0.0)
    assert (none.tiles, none.negatives_left_out) == (1, 99)


def test_soft_objects_stay_soft(tmp_path: Path) -> None:
    source = photograph(tmp_path, GTObject("cell", "bbox_2d", (10, 10, 50, 50), 0.5))
    write_tiles(read_jsonl(source), tmp_path / "tiles.jsonl", Tiling(999, 999))
    (tile,) = read_jsonl(tmp_path / "tiles.jsonl")
    assert tile.objects == (GTObject("cell", "bbox_2d", (10, 10, 50, 50), 0.5),)


def test_tiles_say_which_model_added_an_object(tmp_path: Path) -> None:
    """Their objects have other numbers than the photograph's. ``refused`` counts the photograph's predictions."""
    objects = (box(0, 0, 50, 50), replace(box(800, 800, 900, 900), soft=0.7), replace(box(10, 600, 90, 700), soft=0.5))
    added = [{"object": 1, "score": 0.71}, {"object": 2, "score": 0.52}, {"object": 9, "score": 0.4}]
    entry = {"model": "start", "refused": {"too_small": 2}, "added": added}
    data = photograph(tmp_path, *objects)
    (record,) = read_jsonl(data)
    completed = replace(record, metadata={COMPLETION: [entry, "a note of the user's own"]})
    write_tiles([completed], tmp_path / "tiles.jsonl", Tiling(500, 500, 0.0))
    tiles = read_jsonl(tmp_path / "tiles.jsonl")
    assert [len(tile.objects) for tile in tiles] == [1, 0, 1, 1]
    assert [tile.metadata.get(COMPLETION) for tile in tiles] == [
        None, None, [{"model": "start", "added": [{"object": 0, "score": 0.52}]}],
        [{"model": "start", "added": [{"object": 0, "score": 0.71}]}],
    ]  # fmt: skip


def test_a_photograph_of_another_size_is_refused_and_writes_no_dataset(tmp_path: Path) -> None:
    source = photograph(tmp_path, size=(100, 100))
    Image.new("RGB", (50, 50)).save(tmp_path / "photo.png")
    with pytest.raises(DataError, match="width=100"):
        write_tiles(read_jsonl(source), tmp_path / "tiles.jsonl", Tiling(64, 64))
    assert not (tmp_path / "tiles.jsonl").exists()


def test_tiles_are_cut_one_after_the_other_and_few_files_exist(tmp_path: Path) -> None:
    (record,) = read_jsonl(photograph(tmp_path / "photos", box(5, 5, 20, 20)))
    (tmp_path / "cut").mkdir()
    tiles = tile_records([record], Tiling(333, 333, 0.0))
    photo, files = np.asarray(open_rgb(record.image)), []
    for at, tile in enumerate(CutTiles(tiles, tmp_path / "cut", 4)):
        x, y = at % 3 * 333, at // 3 * 333
        assert (np.asarray(open_rgb(tile.image)) == photo[y : y + 333, x : x + 333]).all()
        assert (tile.width, tile.height, tile.objects, whole_of(tile)) == (333, 333, (), record.sample_id)
        files.append(len(list((tmp_path / "cut").iterdir())))
    assert files == [1, 2, 3, 4, 4, 4, 4, 4, 4] and whole_of(record) == record.sample_id


# --- shapes at a border ---

U = (0.0, 0.0, 30.0, 0.0, 30.0, 30.0, 20.0, 30.0, 20.0, 10.0, 10.0, 10.0, 10.0, 30.0, 0.0, 30.0)


@pytest.mark.parametrize(
    ("kind", "points", "window", "share"),
    [
        ("bbox_2d", (0, 0, 10, 10), (0, 0, 10, 10), 1.0),
        ("bbox_2d", (0, 0, 10, 10), (5, 5, 20, 20), 0.25),
        ("bbox_2d", (0, 0, 10, 10), (10, 0, 20, 20), 0.0),
        ("bbox_2d", (4, 0, 4, 10), (0, 5, 20, 20), 0.5),  # a line: by its length
        ("poly", (0, 0, 10, 0, 10, 10, 0, 10), (5, 5, 20, 20), 0.25),
        ("poly", (0, 0, 10, 0, 0, 10), (0, 0, 5, 10), 0.75),
        ("poly", (0, 0, 10, 0, 0, 10), (20, 20, 30, 30), 0.0),
        ("poly", (20, 20, 100, 20, 20, 100), (0, 0, 200, 200), 1.0),
        ("poly", U, (0, 20, 30, 30), 200 / 700),  # both legs of the U, without its bar
        ("poly", (10, 0, 30, 20, 10, 40, -10, 20), (-5, 5, 25, 35), 700 / 800),  # all four corners cut
    ],
)
def test_the_part_of_a_shape_in_a_window(
    kind: str, points: tuple[float, ...], window: tuple[float, float, float, float], share: float
) -> None:
    part, found = clipped_shape(kind, points, window)
    assert found == pytest.approx(share) and bool(part) == (share > 0)
    assert all(window[at % 2] <= value <= window[2 + at % 2] for at, value in enumerate(part))


def test_a_polygon_in_several_parts_stays_one_object(tmp_path: Path) -> None:
    u = GTObject("u", "poly", tuple(int(10 * value) for value in U))
    source = photograph(tmp_path, u, size=(999, 999))
    write_tiles(read_jsonl(source), tmp_path / "tiles.jsonl", Tiling(999, 200, 0.0), negatives=0)
    lower = read_jsonl(tmp_path / "tiles.jsonl")[1]
    (legs,) = lower.objects
    assert legs.kind == "poly" and pixel_box(legs, 999, 200) == (0, 0, 300, pytest.approx(100, abs=0.2))
    canvas = Image.new("1", (999, 200))
    from PIL import ImageDraw

    ImageDraw.Draw(canvas).polygon([p for p in pixel_ring(legs, 999, 200)], fill=1)
    inside = np.asarray(canvas)
    assert inside[50, 50] and inside[50, 250] and not inside[50, 150] and not inside[150, 50]


# --- the command ---


def test_the_command_prints_counts_and_notes(tmp_path: Path, cli: Cli) -> None:
    source = photograph(tmp_path, box(480, 20, 560, 60), size=(999, 400))
    out = tmp_path / "tiles.jsonl"
    done = cli("data", "tile", source, "--size", 512, "--overlap", 0, "--min-area-ratio", 0.95, "--out", out)
    assert done.code == 0 and f"wrote {out}: 2 tiles of 1 photographs" in done.out
    assert "1 of 1 annotated objects are in no tile" in done.out
    again = cli("data", "tile", source, "--size", 512, "--out", out)
    assert again.code == 2 and "--overwrite" in again.err
    replaced = cli("data", "tile", source, "--size", 512, "--out", out, "--overwrite", "--json")
    assert json.loads(replaced.out) == {
        "photographs": 1, "tiles": 3, "annotated": 1, "whole": 1, "cut": 2, "left_out": 0, "lost": 0, "negatives": 0,
        "negatives_left_out": 0, "resized": 0,
    }  # fmt: skip


def test_a_dataset_is_not_replaced_by_its_own_tiles(tmp_path: Path, cli: Cli) -> None:
    source = photograph(tmp_path)
    before = source.read_text()
    refused = cli("data", "tile", source, "--size", 512, "--out", source, "--overwrite")
    assert refused.code == 2 and source.read_text() == before
