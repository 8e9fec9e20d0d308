"""The contract's scenarios on post-rollout packing: selection and carry buffer."""

import random
import sys

import pytest

from coordexp.errors import CarryBufferOverflow, MissingDependency, SegmentTooLong
from coordexp.packing import CarryBuffer, build_row, oldest_first, select_segments
from support.packing_segments import make_segment


def buffer_of(lengths, capacity, max_segments=512):
    buffer = CarryBuffer(capacity, max_segments)
    buffer.insert(*[make_segment(f"s{i}", length) for i, length in enumerate(lengths)])
    return buffer


@pytest.mark.scenario("Multiple short segments pack efficiently under the same cap")
@pytest.mark.parametrize("seed", range(5))
def test_a_row_is_at_least_as_full_as_oldest_first(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(100, 3000) for _ in range(64)]
    row = buffer_of(lengths, 12_000).pop()
    total = sum(segment.length for segment in row)
    baseline = sum(lengths[i] for i in oldest_first(lengths, 12_000))
    assert row[0].sample_id == "s0"
    assert baseline <= total <= 12_000
    assert total == 12_000  # oldest-first leaves room in each of these


@pytest.mark.scenario("Deterministic selection")
def test_the_same_buffer_gives_the_same_segments_in_the_same_order():
    lengths = [700, 300, 300, 300, 400, 600, 300, 100, 200, 300]  # many equally full selections
    first, second = (buffer_of(lengths, 1600).pop() for _ in range(2))
    assert [s.sample_id for s in first] == [s.sample_id for s in second] == ["s0", "s1", "s5"]


@pytest.mark.scenario("Shared packing helper yields deterministic selection")
def test_the_helper_alone_is_deterministic_and_drives_the_buffer():
    lengths = [5, 4, 4, 3, 3, 2, 2, 2]
    runs = [select_segments(list(lengths), 12) for _ in range(3)]
    assert runs == [[0, 1, 3]] * 3
    assert [s.sample_id for s in buffer_of(lengths, 12).pop()] == ["s0", "s1", "s3"]


@pytest.mark.scenario("Oversized segment fails fast")
def test_an_oversized_segment_never_enters_the_buffer():
    buffer = buffer_of([4, 4], 10)
    with pytest.raises(SegmentTooLong) as error:
        buffer.insert(make_segment("train.jsonl:17", 11))
    message = str(error.value)
    assert "train.jsonl:17: 11 tokens > global_max_length 10" in message
    for mitigation in ("raise global_max_length", "lower rollout_matching.max_new_tokens", "training.packing: false"):
        assert mitigation in message
    assert len(buffer) == 2


@pytest.mark.scenario("Missing binpacking dependency fails fast")
def test_selection_without_binpacking_names_the_alternatives(monkeypatch):
    buffer = buffer_of([6, 3, 2, 2], 10)
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(MissingDependency) as error:
        buffer.pop()
    assert "pip install binpacking" in str(error.value)
    assert "training.packing: false" in str(error.value)
    assert len(buffer) == 4


@pytest.mark.scenario("Carry buffer preserves segments without splitting")
def test_leftovers_of_one_step_are_packed_whole_in_the_next():
    buffer = buffer_of([6, 3, 2, 2, 5], 10)
    inserted = {segment.sample_id: segment for segment in buffer.segments}
    rows = [build_row(buffer.pop())]
    assert [segment.sample_id for segment in buffer.segments] == ["s1", "s4"]
    fresh = make_segment("fresh", 4)
    inserted["fresh"] = fresh
    buffer.insert(fresh)
    while len(buffer):
        rows.append(build_row(buffer.pop()))
    packed = [segment for row in rows for segment in row.segments]
    assert sorted(segment.sample_id for segment in packed) == sorted(inserted)
    assert all(segment is inserted[segment.sample_id] for segment in packed)
    assert rows[1].segments[0].sample_id == "s1"
    assert all(row.length <= 10 for row in rows)


@pytest.mark.scenario("Carry buffer overflow fails fast with actionable guidance")
def test_overflow_names_the_keys_and_changes_nothing():
    buffer = buffer_of([5, 5, 5], 10, max_segments=3)
    with pytest.raises(CarryBufferOverflow) as error:
        buffer.insert(make_segment("one too many", 5))
    assert "raise training.packing_buffer" in str(error.value)
    assert "lower training.per_device_train_batch_size" in str(error.value)
    assert [segment.sample_id for segment in buffer.segments] == ["s0", "s1", "s2"]
