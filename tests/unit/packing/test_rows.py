"""Packed rows: exact offsets, and supervision at its tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import AlignmentError
from coordexp.objective import SupervisionTensors
from coordexp.packing import build_row
from coordexp.records import Segment
from coordexp.records import TokenRole as R
from support.packing_segments import make_segment, make_target

FIRST = Segment(
    "first",
    (1, 2, 3),
    make_target(
        "first",
        [R.PREFIX_MASKED, R.PREFIX_COORD, R.PREFIX_COORD, R.TAIL_STRUCT, R.EOS],
        coords={1: 12.0, 2: 13.5},
        first_token=10,
    ),
)
SECOND = Segment(
    "second",
    (4,),
    make_target(
        "second",
        [R.TAIL_STRUCT, R.TAIL_COORD, R.TAIL_COORD, R.TAIL_COORD, R.TAIL_COORD, R.CLOSE],
        coords={1: 100, 2: 200, 3: 300, 4: 400},
        boxes=[([1, 2, 3, 4], [100, 200, 300, 400])],
        first_token=20,
    ),
)


def test_segments_are_contiguous():
    row = build_row([FIRST, SECOND])
    assert row.offsets == (0, 8, 15)
    assert row.length == 15
    assert row.token_ids_L.tolist() == [1, 2, 3, 10, 11, 12, 13, 14, 4, 20, 21, 22, 23, 24, 25]


def test_supervision_moves_with_its_tokens():
    got = SupervisionTensors.from_row(build_row([FIRST, SECOND]))
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


@settings(max_examples=50, deadline=None)
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


@pytest.mark.parametrize(
    "position", [-1, 5, 3, 0], ids=["before the answer", "after it", "not a coordinate", "not a coordinate, at 0"]
)
def test_misplaced_coordinate_is_refused(position):
    target = replace(FIRST.target, coord_pos_K=np.array([1, position]))
    with pytest.raises(AlignmentError, match=f"sample first.* {position} "):
        build_row([SECOND, replace(FIRST, target=target)])


def test_a_box_in_the_wrong_place_is_an_error():
    target = replace(SECOND.target, box_pos_M4=np.array([[1, 2, 3, 5]]))
    with pytest.raises(AlignmentError, match="target position 5"):
        build_row([replace(SECOND, target=target)])


def test_a_weighted_coordinate_needs_a_target_bin():
    target = replace(FIRST.target, coord_pos_K=np.array([1]), coord_bin_K=np.array([12.0]))
    with pytest.raises(AlignmentError, match="sample first: 2"):
        build_row([replace(FIRST, target=target)])


def test_roles_must_cover_the_target():
    target = replace(FIRST.target, roles_T=FIRST.target.roles_T[:-1])
    with pytest.raises(AlignmentError, match="4 roles for 5 target tokens"):
        build_row([replace(FIRST, target=target)])


def test_weights_must_cover_the_target():
    target = replace(FIRST.target, weights={**FIRST.target.weights, "struct_ce": np.ones(4, dtype=np.float32)})
    with pytest.raises(AlignmentError, match="4 struct_ce for 5 target tokens"):
        build_row([replace(FIRST, target=target)])
