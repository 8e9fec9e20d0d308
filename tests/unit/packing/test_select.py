"""The choice of segments for one row."""

import itertools
import random
import sys

import binpacking
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import MissingDependency, SegmentTooLong
from coordexp.packing import select_segments
from coordexp.packing.select import best_selection, binpacking_candidate, oldest_first


@pytest.mark.parametrize(
    ("lengths", "capacity", "expected"),
    [
        ([6, 3, 2, 2, 2], 10, [0, 2, 3]),
        ([6, 3, 2, 2], 10, [0, 2, 3]),
        ([5, 5, 5, 5], 10, [0, 1]),
        ([2, 6, 5, 4, 4], 10, [0, 3, 4]),
        ([3, 9, 4, 4], 11, [0, 2, 3]),
        ([1, 4, 3, 3, 2], 9, [0, 2, 3, 4]),
        ([10, 1, 2], 10, [0]),
        ([9, 2, 3], 10, [0]),
        ([4], 10, [0]),
        ([1, 2, 3], 10, [0, 1, 2]),
        ([2, 4, 4, 8], 10, [0, 3]),
        ([2, 1, 7, 3, 5], 10, [0, 1, 2]),
    ],
)
def test_selection(lengths, capacity, expected):
    assert select_segments(lengths, capacity) == expected


def by_brute_force(lengths, capacity):
    others = range(1, len(lengths))
    subsets = ([0, *rest] for size in range(len(lengths)) for rest in itertools.combinations(others, size))
    fitting = [chosen for chosen in subsets if sum(lengths[i] for i in chosen) <= capacity]
    return min(fitting, key=lambda chosen: (-sum(lengths[i] for i in chosen), len(chosen), chosen))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 60).flatmap(
        lambda cap: st.tuples(st.lists(st.integers(1, cap), min_size=1, max_size=9), st.just(cap))
    )
)
def test_it_is_the_best_of_all_subsets_and_no_heuristic_beats_it(case):
    lengths, capacity = case
    chosen = select_segments(lengths, capacity)
    assert chosen == by_brute_force(lengths, capacity) == best_selection(lengths, capacity)
    total = sum(lengths[i] for i in chosen)
    for heuristic in (oldest_first(lengths, capacity), binpacking_candidate(binpacking, lengths, capacity)):
        assert heuristic[0] == 0
        assert sum(lengths[i] for i in heuristic) <= total


@pytest.mark.parametrize("count", [254, 255, 256, 700])
def test_many_segments_fill_the_row(count):
    rng = random.Random(count)
    lengths = [rng.randint(100, 3000) for _ in range(count)]
    assert sum(lengths[i] for i in select_segments(lengths, 12_000)) == 12_000
    ones = [1] * count
    assert select_segments(ones, count - 1) == list(range(count - 1))


@pytest.mark.parametrize(
    ("lengths", "capacity", "expected"),
    [
        ([6, 3, 2, 2, 2], 10, [0, 2, 3]),  # binpacking's bin is fuller than oldest-first
        ([5, 5, 5, 5], 10, [0, 1]),  # equally full: smallest indices
        ([9, 2, 3], 10, [0]),
        ([3, 3, 1, 4], 9, [0, 3]),  # equally full: fewer, here of the bins
        ([4, 4, 6, 1, 3, 5], 14, [0, 1, 2]),  # and here of oldest-first
    ],
)
def test_beyond_the_exact_search_the_better_heuristic_is_used(monkeypatch, lengths, capacity, expected):
    monkeypatch.setattr(sys.modules[select_segments.__module__], "_EXACT_LIMIT", 0)
    assert select_segments(lengths, capacity) == expected


def test_heuristics_are_never_worse_than_oldest_first(monkeypatch):
    monkeypatch.setattr(sys.modules[select_segments.__module__], "_EXACT_LIMIT", 0)
    for seed in range(50):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 400) for _ in range(rng.randint(1, 30))]
        chosen = select_segments(lengths, 500)
        assert chosen[0] == 0 and chosen == sorted(set(chosen))
        assert sum(lengths[i] for i in oldest_first(lengths, 500)) <= sum(lengths[i] for i in chosen) <= 500


@pytest.mark.parametrize("lengths", [[1, 2], [6, 3, 2, 2]])
def test_missing_binpacking_stops_every_selection(monkeypatch, lengths):
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(MissingDependency, match="binpacking"):
        select_segments(lengths, 10)


@pytest.mark.parametrize(
    ("lengths", "error", "complaint"),
    [
        ([], ValueError, "segment"),
        ([3, 0], ValueError, "segment 1"),
        ([3, 11], SegmentTooLong, "segment 1.*global_max_length"),
    ],
)
def test_bad_lengths(lengths, error, complaint):
    with pytest.raises(error, match=complaint):
        select_segments(lengths, 10)
