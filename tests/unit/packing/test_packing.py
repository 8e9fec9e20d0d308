"""Packed rows: the choice of segments, the carry buffer, exact offsets and supervision at its tokens."""

import itertools
import random
import sys
from dataclasses import replace

import binpacking
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import AlignmentError, CarryBufferOverflow, MissingDependency, SegmentTooLong
from coordexp.objective import SupervisionTensors
from coordexp.packing import CarryBuffer, best_selection, binpacking_candidate, build_row, oldest_first, select_segments
from coordexp.records import Segment, TrainingTarget
from coordexp.records import TokenRole as R
from coordexp.targets import SupervisionWeights
from coordexp.targets.weights import weigh_tokens


def make_segment(sample_id: str, length: int, prompt_len: int = 1) -> Segment:
    """A segment of ``length`` tokens with plain structure as its target; token ids are positions."""
    target_len = length - prompt_len
    return Segment(sample_id, tuple(range(prompt_len)), make_target(sample_id, [R.GT_STRUCT] * target_len))


def make_target(
    sample_id: str,
    roles: list[R],
    coords: dict[int, float] | None = None,
    boxes: list[tuple[list[int], list[float]]] | None = None,
    first_token: int = 1000,
) -> TrainingTarget:
    """A target with one role per token, ``{target position: bin}`` coordinates, ``(positions, bins)`` boxes."""
    coords, boxes = coords or {}, boxes or []
    roles_T = np.array(roles, dtype=np.uint8)
    box_pos_M4 = np.array([positions for positions, _ in boxes], dtype=np.int64).reshape(-1, 4)
    return TrainingTarget(
        sample_id=sample_id,
        token_ids=tuple(range(first_token, first_token + len(roles))),
        roles_T=roles_T,
        coord_pos_K=np.array(sorted(coords), dtype=np.int64),
        coord_bin_K=np.array([coords[position] for position in sorted(coords)], dtype=np.float64),
        box_pos_M4=box_pos_M4,
        box_bin_M4=np.array([bins for _, bins in boxes], dtype=np.float64).reshape(-1, 4),
        weights=weigh_tokens(roles_T, box_pos_M4, "rollout", SupervisionWeights()),
        context="rollout",
        prefix_len=0,
        matched_pred_idx=(),
        matched_gt_idx=(),
        appended_gt_idx=(),
        appended_object_index=(),
    )


# --- the choice of segments for one row ---


@pytest.mark.scenario("Deterministic selection")
@pytest.mark.scenario("Shared packing helper yields deterministic selection")
@pytest.mark.parametrize(
    ("lengths", "capacity", "expected"),
    [
        ([700, 300, 300, 300, 400, 600, 300, 100, 200, 300], 1600, [0, 1, 5]),  # many equally full selections
        ([5, 4, 4, 3, 3, 2, 2, 2], 12, [0, 1, 3]),
        ([6, 3, 2, 2, 2], 10, [0, 2, 3]),
        ([5, 5, 5, 5], 10, [0, 1]),
        ([10, 1, 2], 10, [0]),
        ([4], 10, [0]),
        ([1, 2, 3], 10, [0, 1, 2]),
        ([2, 4, 4, 8], 10, [0, 3]),
    ],
)
def test_the_helper_and_the_buffer_select_the_same_segments(lengths, capacity, expected):
    assert select_segments(lengths, capacity) == expected
    assert names(filled(lengths, capacity, max_segments=len(lengths)).pop()) == [f"s{i}" for i in expected]


def by_brute_force(lengths, capacity):
    others = range(1, len(lengths))
    subsets = ([0, *rest] for size in range(len(lengths)) for rest in itertools.combinations(others, size))
    fitting = [chosen for chosen in subsets if sum(lengths[i] for i in chosen) <= capacity]
    return min(fitting, key=lambda chosen: (-sum(lengths[i] for i in chosen), len(chosen), chosen))


@settings(max_examples=150)
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


@pytest.mark.scenario("Multiple short segments pack efficiently under the same cap")
@pytest.mark.parametrize("count", [64, 255, 256, 700])
def test_many_segments_fill_the_row(count):
    rng = random.Random(count)
    lengths = [rng.randint(100, 3000) for _ in range(count)]
    chosen = select_segments(lengths, 12_000)
    assert chosen[0] == 0 and sum(lengths[i] for i in chosen) == 12_000
    assert sum(lengths[i] for i in oldest_first(lengths, 12_000)) < 12_000
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
    for seed in range(20):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 400) for _ in range(rng.randint(1, 30))]
        chosen = select_segments(lengths, 500)
        assert chosen[0] == 0 and chosen == sorted(set(chosen))
        assert sum(lengths[i] for i in oldest_first(lengths, 500)) <= sum(lengths[i] for i in chosen) <= 500


@pytest.mark.scenario("Missing binpacking dependency fails fast")
@pytest.mark.parametrize("lengths", [[1, 2], [6, 3, 2, 2]])
def test_missing_binpacking_stops_every_selection_and_names_the_alternatives(monkeypatch, lengths):
    buffer = filled(lengths)
    monkeypatch.setitem(sys.modules, "binpacking", None)
    with pytest.raises(MissingDependency, match=r"pip install binpacking.*training\.packing: false"):
        buffer.pop()
    assert len(buffer) == len(lengths)


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


# --- the carry buffer ---


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


@pytest.mark.scenario("Oversized segment fails fast")
def test_an_oversized_segment_is_refused_and_not_inserted():
    buffer = CarryBuffer(12_000, 8)
    with pytest.raises(SegmentTooLong) as error:
        buffer.insert(make_segment("fits", 5), make_segment("17", 12_410))
    assert str(error.value) == (
        "sample 17: 12,410 tokens > global_max_length 12,000; raise global_max_length; where the model's "
        "own answer makes it long, lower rollout_matching.max_new_tokens; or set training.packing: false"
    )
    assert len(buffer) == 0


@pytest.mark.scenario("Carry buffer overflow fails fast with actionable guidance")
def test_overflow_names_the_keys_and_leaves_the_buffer_unchanged():
    buffer = filled([1, 1, 1], max_segments=4)
    with pytest.raises(CarryBufferOverflow) as error:
        buffer.insert(make_segment("a", 1), make_segment("b", 1))
    assert "raise training.packing_buffer" in str(error.value)
    assert "lower training.per_device_train_batch_size" in str(error.value)
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


def test_the_oldest_segment_comes_first_however_many_arrive_later():
    """Rows of 10: two segments of 6 never fit together, so each row takes one, in the order of arrival."""
    buffer = filled([])
    taken = []
    for number in range(4):
        buffer.insert(make_segment(f"a{number}", 6), make_segment(f"b{number}", 6))
        taken += names(buffer.pop())
    assert taken == ["a0", "b0", "a1", "b1"]
    assert [segment.sample_id for segment in buffer.segments] == ["a2", "b2", "a3", "b3"]


@pytest.mark.scenario("Carry buffer preserves segments without splitting")
@settings(max_examples=100)
@given(st.lists(st.integers(2, 10), min_size=1, max_size=20))
def test_draining_yields_every_segment_whole_and_once_within_capacity(lengths):
    """One segment more arrives after the first row."""
    buffer = filled(lengths, max_segments=20)
    inserted = {segment.sample_id: segment for segment in buffer.segments}
    inserted["fresh"] = make_segment("fresh", 4)
    seen = []
    while len(buffer):
        row = buffer.pop()
        assert row[0].sample_id == next(name for name in inserted if name not in seen)  # of those in the buffer
        assert build_row(row).length <= 10
        assert all(segment is inserted[segment.sample_id] for segment in row)
        if not seen:
            buffer.insert(inserted["fresh"])
        seen += names(row)
    assert sorted(seen) == sorted(inserted)


# --- rows ---

FIRST = Segment(
    "first",
    (1, 2, 3),
    make_target(
        "first",
        [R.MASKED, R.MATCHED_COORD, R.MATCHED_COORD, R.GT_STRUCT, R.EOS],
        coords={1: 12.0, 2: 13.5},
        first_token=10,
    ),
)
SECOND = Segment(
    "second",
    (4,),
    make_target(
        "second",
        [R.GT_STRUCT, R.GT_COORD, R.GT_COORD, R.GT_COORD, R.GT_COORD, R.CLOSE],
        coords={1: 100, 2: 200, 3: 300, 4: 400},
        boxes=[([1, 2, 3, 4], [100, 200, 300, 400])],
        first_token=20,
    ),
)


def test_segments_are_contiguous_and_supervision_moves_with_its_tokens():
    row = build_row([FIRST, SECOND])
    assert row.offsets == (0, 8, 15)
    assert row.length == 15
    assert row.token_ids_L.tolist() == [1, 2, 3, 10, 11, 12, 13, 14, 4, 20, 21, 22, 23, 24, 25]
    got = SupervisionTensors.from_row(row)
    assert got.position_N.tolist() == [4, 5, 6, 7, 9, 10, 11, 12, 13, 14]
    assert got.label_N.tolist() == [11, 12, 13, 14, 20, 21, 22, 23, 24, 25]
    assert got.weights["struct_ce"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert got.weights["coord"].tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 1, 0]
    assert got.weights["box"].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert got.coord_in_N_K.tolist() == [0, 1, 5, 6, 7, 8]
    assert got.coord_bin_K.tolist() == [12.0, 13.5, 100, 200, 300, 400]
    assert got.box_in_K_M4.tolist() == [[2, 3, 4, 5]]
    assert got.box_bin_M4.tolist() == [[100, 200, 300, 400]]


def test_a_row_without_coordinates_has_empty_arrays_of_the_right_shape():
    got = SupervisionTensors.from_row(build_row([make_segment("plain", 4)]))
    assert got.coord_in_N_K.shape == got.coord_bin_K.shape == (0,)
    assert got.box_in_K_M4.shape == got.box_bin_M4.shape == (0, 4)


def test_a_row_needs_a_segment():
    with pytest.raises(ValueError, match="segment"):
        build_row([])


@settings(max_examples=50)
@given(st.permutations([FIRST, SECOND, make_segment("third", 5, prompt_len=2), FIRST]))
def test_each_segment_reads_the_same_alone_and_packed(segments):
    row = build_row(segments)
    packed = SupervisionTensors.from_row(row)
    coord_pos_K = packed.position_N[packed.coord_in_N_K]
    for segment, start, end in zip(segments, row.offsets[:-1], row.offsets[1:], strict=True):
        alone = SupervisionTensors.from_row(build_row([segment]))
        assert row.token_ids_L[start:end].tolist() == [*segment.prompt_token_ids, *segment.target.token_ids]
        mine_N = (packed.position_N >= start) & (packed.position_N < end)
        assert (packed.position_N[mine_N] - start).tolist() == alone.position_N.tolist()
        for term in packed.weights:
            assert packed.weight_N(term)[mine_N].tolist() == alone.weight_N(term).tolist()
        mine_K = (coord_pos_K >= start) & (coord_pos_K < end)
        assert packed.coord_bin_K[mine_K].tolist() == alone.coord_bin_K.tolist()
        box_pos_M4 = coord_pos_K[packed.box_in_K_M4]
        mine_M = ((box_pos_M4 >= start) & (box_pos_M4 < end)).all(dim=1)
        alone_pos_K = alone.position_N[alone.coord_in_N_K]
        assert (box_pos_M4[mine_M] - start).tolist() == alone_pos_K[alone.box_in_K_M4].tolist()


SHORT = {**FIRST.target.weights, "struct_ce": np.ones(4, dtype=np.float32)}


@pytest.mark.scenario("Supervision indices are validated against assistant span")
@pytest.mark.parametrize(
    ("segment", "change", "complaint"),
    [
        (FIRST, {"coord_pos_K": np.array([1, -1])}, "sample first.* -1 "),  # before the answer
        (FIRST, {"coord_pos_K": np.array([1, 5])}, "sample first.* 5 "),  # after it
        (FIRST, {"coord_pos_K": np.array([1, 3])}, "sample first.* 3 "),  # not a coordinate
        (FIRST, {"coord_pos_K": np.array([1, 0])}, "sample first.* 0 "),
        (SECOND, {"box_pos_M4": np.array([[1, 2, 3, 5]])}, "target position 5"),
        (FIRST, {"coord_pos_K": np.array([1]), "coord_bin_K": np.array([12.0])}, "sample first: 2"),  # has no bin
        (FIRST, {"roles_T": FIRST.target.roles_T[:-1]}, "4 roles for 5 target tokens"),
        (FIRST, {"weights": SHORT}, "4 struct_ce for 5 target tokens"),
    ],
)
def test_a_target_that_does_not_fit_its_tokens_is_refused(segment, change, complaint):
    broken = replace(segment, target=replace(segment.target, **change))
    with pytest.raises(AlignmentError, match=complaint):
        build_row([SECOND, broken])
