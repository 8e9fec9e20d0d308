"""The carry buffer: whole segments, oldest guaranteed, errors that leave it unchanged."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import CarryBufferOverflow, SegmentTooLong
from coordexp.packing import CarryBuffer
from support.packing_segments import make_segment


def filled(lengths, capacity=10, max_segments=8):
    buffer = CarryBuffer(capacity, max_segments)
    buffer.insert(*[make_segment(f"s{i}", length) for i, length in enumerate(lengths)])
    return buffer


def names(segments):
    return [segment.sample_id for segment in segments]


def test_pop_removes_the_selection_and_keeps_the_rest_in_order():
    buffer = filled([6, 3, 2, 2, 5])
    assert names(buffer.pop()) == ["s0", "s2", "s3"]
    assert names(buffer.segments) == ["s1", "s4"]
    assert sum(segment.length for segment in buffer.segments) == 8


def test_an_oversized_segment_is_refused_and_not_inserted():
    buffer = CarryBuffer(12_000, 8)
    with pytest.raises(SegmentTooLong) as error:
        buffer.insert(make_segment("fits", 5), make_segment("17", 12_410))
    assert str(error.value) == (
        "sample 17: 12,410 tokens > global_max_length 12,000; raise global_max_length, lower "
        "rollout_matching.max_new_tokens, or set training.packing: false"
    )
    assert len(buffer) == 0


def test_overflow_leaves_the_buffer_unchanged():
    buffer = filled([1, 1, 1], max_segments=4)
    with pytest.raises(CarryBufferOverflow, match=r"raise training\.packing_buffer"):
        buffer.insert(make_segment("a", 1), make_segment("b", 1))
    assert names(buffer.segments) == ["s0", "s1", "s2"]
    buffer.insert(make_segment("a", 1))
    assert len(buffer) == 4


def test_an_empty_buffer_has_nothing_to_pop():
    with pytest.raises(ValueError, match="no segment"):
        CarryBuffer(10, 2).pop()


def test_state_moves_to_another_buffer():
    buffer = filled([6, 3, 2, 2, 5])
    other = filled([1])
    other.load_state_dict(buffer.state_dict())
    assert names(other.segments) == names(buffer.segments)
    assert names(other.pop()) == names(buffer.pop())


def test_a_saved_state_must_fit_the_new_limits():
    state = filled([6, 3, 2]).state_dict()
    with pytest.raises(SegmentTooLong, match="6 tokens > global_max_length 5"):
        CarryBuffer(5, 8).load_state_dict(state)
    with pytest.raises(CarryBufferOverflow):
        CarryBuffer(10, 2).load_state_dict(state)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 10), min_size=1, max_size=20))
def test_draining_yields_every_segment_once_within_capacity(lengths):
    buffer = filled(lengths, max_segments=20)
    seen = []
    while len(buffer):
        oldest = buffer.segments[0]
        row = buffer.pop()
        assert row[0] is oldest
        assert sum(segment.length for segment in row) <= 10
        seen += names(row)
    assert sorted(seen) == sorted(f"s{i}" for i in range(len(lengths)))
