"""Annotations left out at random, splits and samples: reproducible, and nothing is lost uncounted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordexp.data.images import open_rgb
from coordexp.data.jsonl import read_jsonl
from coordexp.data.subset import (
    DropRates,
    drop_annotations,
    object_size,
    pack,
    read_renames,
    rename_classes,
    sample_records,
    split_records,
    without_soft,
)
from coordexp.data.tiles import Tiling, write_tiles
from coordexp.errors import DataError
from coordexp.records import GTObject, ImageRecord

CUP, TREE = GTObject("cup", "bbox_2d", (0, 0, 20, 20)), GTObject("tree", "poly", (0, 0, 900, 0, 0, 900))


def records(images: int, *objects: GTObject) -> list[ImageRecord]:
    return [ImageRecord(f"s.jsonl:{n}", Path(f"{n}.png"), 500, 500, objects) for n in range(1, images + 1)]


def kept_of(records: list[ImageRecord], name: str) -> int:
    return sum(obj.desc == name for record in records for obj in record.objects)


def test_about_the_given_share_is_kept_and_counted() -> None:
    left, counts = drop_annotations(records(400, CUP, TREE, CUP), DropRates(0.6, allow_empty=True), seed=3)
    assert 0.55 < kept_of(left, "cup") / 800 < 0.65 and 0.53 < kept_of(left, "tree") / 400 < 0.67
    found = counts.to_json()
    assert found["classes"] == {"cup": [kept_of(left, "cup"), 800], "tree": [kept_of(left, "tree"), 400]}
    assert found["kept"] + found["dropped"] == 1200 and found["emptied"] == sum(not r.objects for r in left) > 0
    assert found["sizes"]["medium"] == [0, 0] and found["sizes"]["small"][1] == 800


def test_the_draw_depends_only_on_seed_and_sample_id() -> None:
    everything = records(50, CUP, TREE, CUP, TREE)
    rates = DropRates(0.5)
    left, _ = drop_annotations(everything, rates, seed=1)
    backwards, _ = drop_annotations(everything[:20:-1], rates, seed=1)
    assert backwards == left[:20:-1]
    assert drop_annotations(everything, rates, seed=2)[0] != left


@pytest.mark.parametrize("allow_empty", [True, False])
def test_a_lower_rate_keeps_a_subset(allow_empty: bool) -> None:
    objects = [replace(CUP, bins=(0, 0, n, n)) for n in range(6)]
    drawn = [
        drop_annotations(records(60, *objects), DropRates(keep, allow_empty=allow_empty), 0)[0]
        for keep in (0.1, 0.3, 0.7)
    ]
    for few, more in pairwise(drawn):
        for small, large in zip(few, more, strict=True):
            assert set(small.objects) <= set(large.objects)


def test_class_rates_keep_a_subset_where_images_may_lose_all() -> None:
    everything = records(200, CUP, TREE)
    low, high = (
        drop_annotations(everything, DropRates(keep, {"tree": 0.1}, allow_empty=True), seed=0)[0] for keep in (0.3, 0.5)
    )
    assert all(set(few.objects) <= set(more.objects) for few, more in zip(low, high, strict=True)) and low != high


def test_every_image_keeps_an_object() -> None:
    left, counts = drop_annotations(records(40, CUP, TREE), DropRates(0.0), 0)
    assert {len(record.objects) for record in left} == {1} and counts.spared == 40 and counts.emptied == 0
    empty, counts = drop_annotations(records(2), DropRates(0.0), 0)
    assert [record.objects for record in empty] == [(), ()] and counts.emptied == 0


def test_class_rates_precede_size_rates_and_those_precede_keep() -> None:
    box = GTObject("box", "bbox_2d", (0, 0, 150, 150))  # 75 x 75 pixels
    sizes = [object_size(obj, records(1)[0]) for obj in (CUP, box, TREE)]
    assert sizes == ["small", "medium", "large"]
    rates = DropRates(0.0, {"cup": 1.0}, {"small": 0.0, "large": 1.0}, allow_empty=True)
    left, _ = drop_annotations(records(9, CUP, box, TREE), rates, 0)
    assert {record.objects for record in left} == {(CUP, TREE)}


def test_invalid_rates_and_classes_are_refused() -> None:
    with pytest.raises(DataError, match=r"'cpu'.*cup, tree"):
        drop_annotations(records(1, CUP, TREE), DropRates(0.5, {"cpu": 0.1}), 0)
    with pytest.raises(DataError, match=r"s\.jsonl:1: .*soft"):
        drop_annotations(records(1, CUP, replace(TREE, soft=0.5)), DropRates(0.5), 0)
    with pytest.raises(DataError, match="--keep"):
        DropRates(1.0, {"cup": 1.0})
    with pytest.raises(DataError, match=r"keep=1\.5"):
        DropRates(1.5)
    with pytest.raises(DataError, match=r"keep=1\.5"):
        DropRates(1.5, {"keep": 0.5})
    DropRates(0.5, {"keep": 1.0})  # classes may be called so


def test_without_soft_removes_soft_objects() -> None:
    assert without_soft(records(2, CUP, replace(TREE, soft=0.5))) == (records(2, CUP), 2)


def test_without_soft_forgets_how_they_were_completed() -> None:
    """A later completion adds objects of the same numbers, by another model perhaps."""
    [annotated] = records(1, CUP)
    entry = {"model": "first", "added": [{"object": 1, "score": 0.9}], "refused": {}}
    soft = replace(annotated, objects=(CUP, replace(TREE, soft=0.5)))
    [left], _ = without_soft([replace(soft, metadata={"camera": 7, "completion": [entry]})])
    assert left == replace(annotated, metadata={"camera": 7})
    [left], _ = without_soft([replace(soft, metadata={"completion": [entry, "a remark"]})])
    assert left.metadata == {"completion": ["a remark"]}


# --- splits and samples ---


def plain(count: int, images: int) -> list[ImageRecord]:
    return [ImageRecord(f"d:{k}", Path(f"/{k % images}.png"), 1, 1, ()) for k in range(count)]


def test_a_split_keeps_images_together_and_loses_nothing() -> None:
    everything = plain(30, 12)
    parts = split_records(everything, [0.5, 0.25, 0.25], seed=1)
    assert [len({r.image for r in part}) for part in parts] == [6, 3, 3]
    assert sorted(r.sample_id for part in parts for r in part) == sorted(r.sample_id for r in everything)
    assert not {r.image for r in parts[0]} & {r.image for r in [*parts[1], *parts[2]]}
    assert parts == split_records(everything, [0.5, 0.25, 0.25], seed=1)
    assert parts != split_records(everything, [0.5, 0.25, 0.25], seed=2)


def test_no_part_is_empty_and_bad_shares_are_refused() -> None:
    assert [len(part) for part in split_records(plain(3, 3), [0.98, 0.01, 0.01], 0)] == [1, 1, 1]
    for shares in ([1.0], [0.5, 0.6], [1.2, -0.2]):
        with pytest.raises(DataError, match="shares"):
            split_records(plain(9, 9), shares, 0)


def test_a_sample_is_drawn_without_replacement_in_order() -> None:
    everything = plain(20, 20)
    drawn = sample_records(everything, 8, seed=2)
    assert len(set(r.sample_id for r in drawn)) == 8
    assert [everything.index(r) for r in drawn] == sorted(everything.index(r) for r in drawn)
    with pytest.raises(DataError, match="21 of 20"):
        sample_records(everything, 21, 0)


@pytest.fixture
def photos(tmp_path: Path) -> list[ImageRecord]:
    """Four, each of a colour."""
    for k in range(4):
        Image.new("RGB", (16, 16), (10 * k, 0, 0)).save(tmp_path / f"{k}.png")
    return [ImageRecord(f"{k}", tmp_path / f"{k}.png", 16, 16, ()) for k in range(4)]


def tiles_of(photos: list[ImageRecord], jsonl: Path, width: int, packed: bool) -> list[ImageRecord]:
    write_tiles(photos, jsonl, Tiling(width, 16))
    if packed:
        pack(read_jsonl(jsonl), jsonl.parent / "packed" / jsonl.name, 4096)
        jsonl = jsonl.parent / "packed" / jsonl.name
    return read_jsonl(jsonl)


def expect_each_colour_on_one_side(records: list[ImageRecord]) -> None:
    for seed in range(4):
        parts = split_records(records, [0.5, 0.5], seed)
        first, second = ({open_rgb(record.image).getpixel((0, 0)) for record in part} for part in parts)
        assert len(first) == len(second) == 2 and not first & second


@pytest.mark.parametrize("packed", [False, True])
def test_a_photograph_its_copy_and_its_tiles_stay_on_one_side(
    photos: list[ImageRecord], tmp_path: Path, packed: bool
) -> None:
    copies = [replace(one, image=shutil.copy(one.image, tmp_path / f"copy{one.image.name}")) for one in photos]
    tiles = tiles_of(photos, tmp_path / "a" / "tiles.jsonl", 10, packed)
    tiles += tiles_of(copies, tmp_path / "b" / "tiles.jsonl", 10, packed)
    assert len(tiles) == 16
    for some in (tiles, [*photos, *copies], [*photos, *copies, *tiles]):
        expect_each_colour_on_one_side(some)


@pytest.mark.parametrize("packed", [False, True])
def test_tiles_of_tiles_stay_on_the_side_of_their_photograph(
    photos: list[ImageRecord], tmp_path: Path, packed: bool
) -> None:
    tiles = tiles_of(photos, tmp_path / "a" / "tiles.jsonl", 10, packed)
    small = tiles_of(tiles, tmp_path / "b" / "c" / "small.jsonl", 6, packed)
    assert len(small) == 16
    expect_each_colour_on_one_side([*photos, *small])


def named(*descs: str) -> list[ImageRecord]:
    objects = tuple(GTObject(desc, "bbox_2d", (0, 0, 10 + k, 10)) for k, desc in enumerate(descs))
    metadata = {"image_labels": {"present": ["Cat"], "absent": ["dog"]}}
    return [ImageRecord("d:1", Path("a.png"), 9, 9, objects, metadata)]


@pytest.mark.parametrize(
    ("renames", "descs", "present"),
    [
        ({"Cat": "cat"}, ["cat", "cat", "dog"], ["cat"]),  # joined
        ({"dog": "hound", "cat": "puss"}, ["Cat", "puss", "hound"], ["Cat"]),
        ({"Cat": "dog", "dog": "Cat"}, ["dog", "cat", "Cat"], ["dog"]),  # exchanged
    ],
)
def test_classes_are_renamed_all_at_once(renames: dict[str, str], descs: list[str], present: list[str]) -> None:
    ((record,), counts) = rename_classes(named("Cat", "cat", "dog"), renames)
    assert [obj.desc for obj in record.objects] == descs and counts == dict.fromkeys(renames, 1)
    assert [obj.bins[2] for obj in record.objects] == [10, 11, 12]
    assert record.metadata["image_labels"]["present"] == present


@pytest.mark.parametrize(
    ("labels", "joined"),
    [
        ({"present": ["cat", "lynx"], "absent": ["dog"]}, {"present": ["feline"], "absent": ["dog"]}),
        ({"present": ["cat"], "absent": ["lynx"]}, {"present": ["feline"], "absent": []}),
        ({"absent": ["cat", "lynx", "puma"]}, {"absent": ["feline"]}),
        ({"absent": ["cat", "lynx"]}, {"absent": []}),  # nobody looked for a puma, which is a feline too
        ({"absent": [{"name": "cat"}]}, {"absent": [{"name": "cat"}]}),  # the user's own
    ],
)
def test_joined_classes_are_absent_only_if_people_looked_for_all(
    labels: dict[str, Any], joined: dict[str, Any]
) -> None:
    record = replace(named("cat", "lynx", "puma", "dog")[0], metadata={"image_labels": labels})
    renames = {"cat": "feline", "lynx": "feline", "puma": "feline"}
    (renamed,), _ = rename_classes([record], renames)
    assert renamed.metadata == {"image_labels": joined}


def test_a_class_that_only_labels_of_images_have_is_renamed() -> None:
    (record,), counts = rename_classes(named("cat"), {"dog": "hound"})
    assert record.metadata["image_labels"] == {"present": ["Cat"], "absent": ["hound"]} and counts == {"dog": 0}


@pytest.mark.parametrize(
    ("renames", "says"),
    [({"catt": "x"}, "did you mean 'cat'"), ({"zebra": "x"}, "no object is called 'zebra'$"), ({"cat": " "}, "empty"),
     ({"cat": "a\nb"}, "control"), ({"cat": " x"}, "spaces")],
)  # fmt: skip
def test_names_that_cannot_be_used_are_refused(renames: dict[str, str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        rename_classes(named("cat", "dog"), renames)


def test_new_names_are_read_as_datasets_contain_them() -> None:
    assert read_renames(["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    assert read_renames(["cafe\u0301=the\u0301 "]) == {"caf\xe9": "th\xe9"}, "decomposed accents"
    for texts, says in ((["c"], "OLD=NEW"), (["c=d", "c=e"], "twice")):
        with pytest.raises(DataError, match=says):
            read_renames(texts)
