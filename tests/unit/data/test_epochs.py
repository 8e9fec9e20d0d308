"""How often an epoch has each record: weights of files, repeats of rare classes, and which record a sample is."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.config.schema import AugmentConfig
from coordexp.data import dataset_cache
from coordexp.data.dataset import RecordDataset
from coordexp.data.dataset_cache import CachedRecords, open_records
from coordexp.data.epochs import EpochPlan, class_factors, describe_epoch, plan_epochs
from coordexp.data.files import VARIABLE
from coordexp.data.joined import DataPart, JoinedRecords, distinct_descs, index_of, pixel_areas
from coordexp.data.jsonl import write_jsonl
from coordexp.data.preparation import preparation_of
from coordexp.records import GTObject, ImageRecord, RolloutRequest


def record(number: int, *descs: str, side: int = 64) -> ImageRecord:
    objects = tuple(GTObject(desc, "bbox_2d", (10 * at, 10, 500, 900)) for at, desc in enumerate(descs))
    return ImageRecord(f"set.jsonl:{number}", Path(f"/i/{number}.png"), side, side, objects)


def part(path: str, count: int, weight: float = 1.0) -> DataPart:
    return DataPart(Path(path), [record(number, "cup") for number in range(1, count + 1)], weight)


def plan(*parts: DataPart, seed: int = 7) -> EpochPlan:
    planned = plan_epochs(JoinedRecords(parts), None, seed)
    assert planned is not None
    return planned


@given(
    st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([1e-9, 0.1, 0.5, 1.0, 1.3, 2.0, 3.7])), min_size=1, max_size=4
    ),
    st.integers(0, 1000),
)
def test_each_record_is_drawn_its_factor_rounded_down_or_up(files: list[tuple[int, float]], seed: int) -> None:
    factors_N = np.concatenate([np.full(count, weight) for count, weight in files])
    drawn = EpochPlan(factors_N, [count for count, _ in files], seed)
    for epoch in range(4):
        counts_N = drawn.counts(epoch)
        assert (counts_N >= np.floor(factors_N)).all() and (counts_N <= np.ceil(factors_N)).all()
        assert counts_N.sum() == drawn.size == len(drawn.places(epoch))
        start = 0
        for count, weight in files:
            assert counts_N[start : start + count].sum() == max(1, math.ceil(round(count * weight, 6)))
            start += count
        assert sum(drawn.sizes) == drawn.size


@pytest.mark.parametrize("weight", [0.1, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.9])
def test_no_record_of_a_file_is_drawn_again_before_all_were(weight: float) -> None:
    """Replay of a tenth of the old data per epoch: ten epochs have each of its records once."""
    drawn = plan(part("a.jsonl", 50), part("old.jsonl", 300, weight))
    for epochs in (1, 3, 10, 30):
        counts_N = np.sum([drawn.counts(epoch) for epoch in range(epochs)], axis=0)
        assert (counts_N[:50] == epochs).all()
        share = epochs * weight
        assert math.floor(share + 1e-9) <= counts_N[50:].min() and counts_N[50:].max() <= math.ceil(share - 1e-9)


def test_over_epochs_records_of_different_factors_get_their_shares() -> None:
    factors_N = np.array([0.15, 0.35, 0.5, 0.7, 0.95] * 8)
    drawn = EpochPlan(factors_N, [40], 7)
    counts_N = np.sum([drawn.counts(epoch) for epoch in range(200)], axis=0)
    assert drawn.size == 22  # of 21.2: less than a sample of 40 records too many
    assert np.abs(counts_N / 200 - factors_N).max() < 0.06


def test_whole_weights_repeat_exactly() -> None:
    drawn = plan(part("a.jsonl", 3, weight=2), part("b.jsonl", 2))
    assert [drawn.counts(epoch).tolist() for epoch in (0, 9)] == [[2, 2, 2, 1, 1]] * 2
    assert sorted(drawn.places(4)) == [0, 1, 2, 3, 4, 5, 6, 7]  # 5, 6 and 7 are records 0, 1 and 2 again


def test_a_plan_follows_from_seed_and_epoch() -> None:
    parts = (part("a.jsonl", 40, weight=0.5), part("b.jsonl", 9))
    assert plan(*parts).places(3) == plan(*parts).places(3)
    assert plan(*parts).places(3) != plan(*parts).places(4)
    assert plan(*parts).places(3) != plan(*parts, seed=8).places(3)


def test_without_weights_and_repeats_there_is_no_plan() -> None:
    assert plan_epochs([record(1, "cup")], None, 7) is None
    assert plan_epochs(JoinedRecords([part("a.jsonl", 2), part("b.jsonl", 2)]), None, 7) is None
    assert plan_epochs([record(1, "cup"), record(2, "cup")], 0.5, 7) is None  # no class is rare


def test_repeat_factors_are_those_of_lvis() -> None:
    """f is 1 for cup, 1/4 for dish and 1/100 for zebra; an image takes its rarest class."""
    records = [record(n, "cup", *(["dish"] if n % 4 == 0 else []), *(["zebra"] if n == 8 else [])) for n in range(100)]
    records += [record(100)]  # without objects
    factors = class_factors(records, 0.36)
    assert factors == {
        "cup": 1.0,
        "dish": pytest.approx(math.sqrt(0.36 / (25 / 101))),
        "zebra": pytest.approx(math.sqrt(0.36 / (1 / 101))),
    }
    drawn = plan_epochs(records, 0.36, 7)
    assert drawn is not None
    assert drawn.factors_N[[1, 4, 8, 100]].tolist() == [1.0, factors["dish"], factors["zebra"], 1.0]
    assert drawn.counts(0)[8] in (math.floor(factors["zebra"]), math.ceil(factors["zebra"])) == (6, 7)


def test_class_shares_count_images_by_the_weight_of_their_file() -> None:
    common = DataPart(Path("a.jsonl"), [record(n, "cup") for n in range(9)], 1.0)
    rare = DataPart(Path("b.jsonl"), [record(1, "zebra")], 3.0)
    assert class_factors(JoinedRecords([common, rare]), 1.0)["zebra"] == pytest.approx(math.sqrt(12 / 3))


def test_the_log_says_what_an_epoch_has() -> None:
    old = DataPart(Path("old/train.jsonl"), [record(n, "cup") for n in range(1, 41)], 0.25)
    new = DataPart(Path("new/train.jsonl"), [record(n, "zebra" if n == 1 else "cup") for n in range(1, 11)], 2)
    records = JoinedRecords([new, old])
    drawn = plan_epochs(records, None, 7)
    assert drawn is not None
    assert list(describe_epoch(records, drawn, None)) == [
        "an epoch has 30 samples of 50 records",
        "  new/train.jsonl: 10 records, weight 2: 20 samples",
        "  old/train.jsonl: 40 records, weight 0.25: 10 samples",
    ]
    repeated = plan_epochs(records, 0.27, 7)
    assert repeated is not None
    *_, old, last = describe_epoch(records, repeated, 0.27)
    assert old.endswith(f"{repeated.sizes[1]} samples") and sum(repeated.sizes) == repeated.size
    assert last == "  repeat_threshold 0.27: 1 records with 1 rare classes are repeated (zebra x 2.01)"


# -- several files as one dataset --------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "cached"])
def joined(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinedRecords:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    if request.param == "cached":
        monkeypatch.setattr(dataset_cache, "CACHE_MIN_BYTES", 0)
    files = {
        "old/train.jsonl": [record(1, "cup"), record(2, "dish", "cup", side=32)],
        "new/train.jsonl": [record(1, "zebra"), record(2), record(3, "cup", side=96)],
        "more.jsonl": [record(1, "leaf")],
    }
    parts = []
    for name, records in files.items():
        write_jsonl(records, tmp_path / name)
        parts.append(DataPart(tmp_path / name, open_records(tmp_path / name)))
    assert isinstance(parts[0].records, CachedRecords) is (request.param == "cached")
    return JoinedRecords(parts)


def test_records_of_files_of_one_name_are_told_apart(joined: JoinedRecords) -> None:
    ids = [one.sample_id for one in joined]
    assert ids == [
        *("old/train.jsonl:1", "old/train.jsonl:2"),
        *(f"new/train.jsonl:{n}" for n in (1, 2, 3)),
        "more.jsonl:1",
    ]
    assert [index_of(joined, sample_id) for sample_id in ids] == [0, 1, 2, 3, 4, 5]
    assert joined[-1].objects[0].desc == "leaf" and [one.sample_id for one in joined[1:3]] == ids[1:3]
    assert [index_of(joined, name) for name in ("train.jsonl:1", "old/train.jsonl:3", "more.jsonl:x", "a:1")] == [
        None
    ] * 4
    with pytest.raises(IndexError):
        joined[6]


def test_questions_about_all_files_are_answered_as_for_one(joined: JoinedRecords) -> None:
    assert distinct_descs(joined) == {"cup", "dish", "zebra", "leaf"}
    assert pixel_areas(joined) == (32 * 32, 96 * 96)
    assert preparation_of(joined) == preparation_of(list(joined))
    assert class_factors(joined, 0.9) == class_factors(list(joined), 0.9)


# -- repeats as samples ------------------------------------------------------------------------------------------------


def encoded(record: ImageRecord, *_: object) -> RolloutRequest:
    return RolloutRequest(record.sample_id, record.image, (), tuple(len(obj.desc) for obj in record.objects))


def test_a_repeat_has_an_order_of_its_own_and_the_same_objects() -> None:
    records = [record(n, *(f"thing {k}" for k in range(8))) for n in range(3)]
    dataset = RecordDataset(records, encoded, "random", 5)
    first, again = dataset[1].record, dataset[1 + 3].record
    assert first.sample_id == again.sample_id and first.objects != again.objects
    assert Counter(first.objects) == Counter(again.objects)


def test_a_repeat_has_a_view_of_its_own_that_is_found_by_its_id(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    base = record(1, "cup")
    records = [ImageRecord("a.jsonl:1", tmp_path / "a.png", 64, 64, base.objects)]

    def seen(record: ImageRecord, image: object) -> RolloutRequest:
        return RolloutRequest(record.sample_id, record.image, (), record.objects[0].bins)

    dataset = RecordDataset(records, seen, "sorted", 5, AugmentConfig(scale=(0.5, 1.0)))
    dataset.set_epoch(2)
    samples = [dataset[k] for k in range(3)]
    assert [one.record.sample_id for one in samples] == ["a.jsonl:1@epoch2", "a.jsonl:1@epoch2.1", "a.jsonl:1@epoch2.2"]
    assert len({one.request.prompt_token_ids for one in samples}) == 3
    assert [dataset.request_of(one.record.sample_id) for one in samples] == [one.request for one in samples]
