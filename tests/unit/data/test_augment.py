"""Augmented views: objects stay on their pixels, and a view is the same in every process and at any time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from coordexp.config.schema import AugmentConfig
from coordexp.data import read_jsonl
from coordexp.data.dataset import LEFT_OUT, RecordDataset, Sample, View, draw_view
from coordexp.data.jsonl import write_jsonl
from coordexp.data.polygons import clip_ring
from coordexp.errors import DataError
from coordexp.geometry import aabb
from coordexp.records import GTObject, ImageRecord, RolloutRequest

SIZE = (320, 240)
BOX = GTObject("box", "bbox_2d", (200, 300, 500, 700))
RING = GTObject("ring", "poly", (600, 200, 900, 300, 800, 800, 620, 600))
STRONG = AugmentConfig(horizontal_flip=0.5, vertical_flip=0.5, scale=(0.5, 2.0), crop=0.5)


def painted(obj: GTObject) -> Image.Image:
    """The object in white on black, where a reader of its bins would draw it."""
    image = Image.new("RGB", SIZE)
    points = [(x / 999 * SIZE[0], y / 999 * SIZE[1]) for x, y in zip(obj.bins[0::2], obj.bins[1::2], strict=True)]
    if obj.kind == "bbox_2d":
        ImageDraw.Draw(image).rectangle([points[0], (points[1][0] - 1, points[1][1] - 1)], fill="white")
    else:
        ImageDraw.Draw(image).polygon(points, fill="white")
    return image


@pytest.mark.parametrize("obj", [BOX, RING], ids=["box", "polygon"])
@pytest.mark.parametrize("index", range(12))
def test_an_object_stays_on_its_pixels(obj: GTObject, index: int) -> None:
    view = draw_view(STRONG, 3, 0, index)
    shown = np.asarray(view.image(painted(obj)).convert("L"))
    bright = np.argwhere(shown > 200)
    if len(bright) < 200:
        return  # almost nothing of it is in view
    (found,), left_out = view.objects([obj], 1e-6)
    assert left_out == 0
    y1, x1 = bright.min(axis=0)
    y2, x2 = bright.max(axis=0) + 1
    expected = (x1 / SIZE[0] * 999, y1 / SIZE[1] * 999, x2 / SIZE[0] * 999, y2 / SIZE[1] * 999)
    assert aabb(found) == pytest.approx(expected, abs=3 * 999 / 240)  # pixels
    drawn, lit = np.asarray(painted(found).convert("L")) > 128, shown > 200
    assert (drawn & lit).sum() / (drawn | lit).sum() > 0.9


def test_the_default_view_changes_nothing() -> None:
    view = draw_view(AugmentConfig(), 1, 2, 3)
    assert view == View()
    assert view.objects([BOX, RING], 0.3) == ([BOX, RING], 0)


@pytest.mark.parametrize(("least", "kept"), [(0.4, 1), (0.6, 0)])
def test_mostly_hidden_objects_are_left_out_and_counted(least: float, kept: int) -> None:
    half = View(window=(0.35, 0.0, 1.35, 1.0))  # its left edge runs through the middle of the box
    found, left_out = half.objects([BOX], least)
    assert (len(found), left_out) == (kept, 1 - kept)
    if found:
        assert found[0].bins[0] == 0 and found[0].bins[2] == pytest.approx(150, abs=2)


def test_a_ring_is_cut_at_the_edge() -> None:
    unit = (0.0, 0.0, 1.0, 1.0)
    assert set(clip_ring([(-1, -1), (2, -1), (2, 2), (-1, 2)], unit)) == {(0, 0), (1, 0), (1, 1), (0, 1)}
    assert set(clip_ring([(0.5, -0.5), (1.5, 0.5), (0.5, 1.5), (-0.5, 0.5)], unit)) == {(0, 0), (1, 0), (1, 1), (0, 1)}
    assert clip_ring([(2, 2), (3, 2), (3, 3)], unit) == []


def test_colours_change_no_object_and_no_size() -> None:
    view = draw_view(AugmentConfig(colour=0.5), 1, 0, 0)
    assert view.objects([BOX, RING], 0.3) == ([BOX, RING], 0)
    image = Image.effect_mandelbrot(SIZE, (-2, -1, 1, 1), 20).convert("RGB")
    assert view.image(image).size == SIZE and view.image(image).tobytes() != image.tobytes()


def test_a_view_depends_on_seed_epoch_and_index() -> None:
    assert draw_view(STRONG, 1, 2, 3) == draw_view(STRONG, 1, 2, 3)
    assert len({draw_view(STRONG, *place) for place in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0))}) == 4
    windows = {draw_view(STRONG.model_copy(update={"horizontal_flip": p}), 1, 2, 3).window for p in (0.0, 1.0)}
    assert len(windows) == 1, "enabling one part must not change others"


# --- as a dataset ---


@pytest.fixture
def records(tmp_path: Path) -> list[ImageRecord]:
    objects = tuple(replace(BOX, desc=f"box {k}", bins=(10 * k, 20, 300, 400)) for k in range(6))
    painted(BOX).save(tmp_path / "a.png")
    write_jsonl([ImageRecord("a", tmp_path / "a.png", *SIZE, objects)] * 3, tmp_path / "d.jsonl")
    return read_jsonl(tmp_path / "d.jsonl")


def encoded(record: ImageRecord, image: Image.Image | None = None) -> RolloutRequest:
    inputs = {} if image is None else {"pixels": image.tobytes()}
    return RolloutRequest(record.sample_id, record.image, (), (1, 2), inputs)


def told(sample: Sample) -> tuple[Any, ...]:
    return sample.record.objects, sample.request.model_inputs.get("pixels")


def test_each_epoch_has_its_own_views_equal_in_every_process(records: list[ImageRecord]) -> None:
    one, other = (RecordDataset(records, encoded, "sorted", 5, STRONG) for _ in range(2))
    first = [told(sample) for sample in map(one.__getitem__, range(3))]
    assert len({pixels for _, pixels in first}) == 3, "three copies of one image, three views"
    one.set_epoch(1)
    second = [told(sample) for sample in map(one.__getitem__, range(3))]
    other.set_epoch(1)
    assert second == [told(sample) for sample in map(other.__getitem__, range(3))]
    assert all(a[1] != b[1] for a, b in zip(first, second, strict=True))
    assert all(LEFT_OUT in one[k].record.metadata for k in range(3))


def test_a_sample_in_the_carry_buffer_is_encoded_again_unchanged(records: list[ImageRecord]) -> None:
    dataset = RecordDataset(records, encoded, "sorted", 5, STRONG)
    dataset.set_epoch(3)
    sample = dataset[1]
    resumed = RecordDataset(records, encoded, "sorted", 5, STRONG)
    assert resumed.request_of(sample.record.sample_id) == sample.request
    plain = RecordDataset(records, encoded)
    assert plain.request_of(records[2].sample_id) == plain[2].request
    for dataset in (resumed, plain):
        with pytest.raises(DataError, match=r"b\.jsonl:9.*custom\.train_jsonl"):
            dataset.request_of("b.jsonl:9")


def test_a_random_order_differs_by_epoch(records: list[ImageRecord]) -> None:
    dataset = RecordDataset(records, encoded, "random", 5)
    orders = []
    for epoch in (0, 1, 2, 1):
        dataset.set_epoch(epoch)
        orders.append(tuple(obj.desc for obj in dataset[0].record.objects))
    assert len(set(orders)) == 3 and orders[1] == orders[3]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    ordered = RecordDataset(records, encoded, "sorted", 5)
    assert ordered[0].record.objects == (ordered.set_epoch(4), ordered[0].record.objects)[1]
