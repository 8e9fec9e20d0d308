"""Packed rows: exact offsets, and supervision that lands where its tokens landed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.errors import AlignmentError
from coordexp.packing import build_row, segment_ids, supervise_row
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


def test_segments_stand_end_to_end():
    row = build_row([FIRST, SECOND])
    assert row.offsets == (0, 8, 15)
    assert row.length == 15
    assert row.token_ids_L.tolist() == [1, 2, 3, 10, 11, 12, 13, 14, 4, 20, 21, 22, 23, 24, 25]
    assert segment_ids(row).tolist() == [0] * 8 + [1] * 7


def test_supervision_moves_with_its_tokens():
    got = supervise_row(build_row([FIRST, SECOND]))
    assert got.roles_L.dtype == np.int8
    assert got.roles_L.tolist() == [-1, -1, -1, 0, 1, 1, 2, 6, -1, 2, 4, 4, 4, 4, 5]
    assert got.coord_pos_K.tolist() == [4, 5, 10, 11, 12, 13]
    assert got.coord_bin_K.tolist() == [12.0, 13.5, 100, 200, 300, 400]
    assert got.coord_segment_K.tolist() == [0, 0, 1, 1, 1, 1]
    assert got.box_pos_M4.tolist() == [[10, 11, 12, 13]]
    assert got.box_bin_M4.tolist() == [[100, 200, 300, 400]]
    assert got.box_segment_M.tolist() == [1]


def test_a_row_without_coordinates_has_empty_arrays_of_the_right_shape():
    got = supervise_row(build_row([make_segment("plain", 4)]))
    assert got.coord_pos_K.shape == (0,)
    assert got.box_pos_M4.shape == got.box_bin_M4.shape == (0, 4)


def test_no_segment_no_row():
    with pytest.raises(ValueError, match="at least one segment"):
        build_row([])


@settings(max_examples=50, deadline=None)
@given(st.permutations([FIRST, SECOND, make_segment("third", 5, prompt_len=2), FIRST]))
def test_each_segment_reads_the_same_alone_and_packed(segments):
    row = build_row(segments)
    packed = supervise_row(row)
    for index, segment in enumerate(segments):
        alone = supervise_row(build_row([segment]))
        start, end = row.offsets[index], row.offsets[index + 1]
        assert packed.roles_L[start:end].tolist() == alone.roles_L.tolist()
        assert row.token_ids_L[start:end].tolist() == [*segment.prompt_token_ids, *segment.target.token_ids]
        mine = packed.coord_segment_K == index
        assert (packed.coord_pos_K[mine] - start).tolist() == alone.coord_pos_K.tolist()
        assert packed.coord_bin_K[mine].tolist() == alone.coord_bin_K.tolist()
        assert (packed.box_pos_M4[packed.box_segment_M == index] - start).tolist() == alone.box_pos_M4.tolist()


@pytest.mark.parametrize(
    ("position", "complaint"),
    [
        (-1, r"target position -1 lies outside the 5 assistant tokens"),
        (5, r"target position 5 lies outside the 5 assistant tokens"),
        (3, r"target position 3 stands on a token with role TAIL_STRUCT"),
        (0, r"target position 0 stands on a token with role PREFIX_MASKED"),
    ],
)
def test_a_coordinate_in_the_wrong_place_is_an_error(position, complaint):
    target = replace(FIRST.target, coord_pos_K=np.array([1, position]))
    with pytest.raises(AlignmentError, match="sample first: supervised coordinate at " + complaint):
        supervise_row(build_row([SECOND, replace(FIRST, target=target)]))


def test_a_box_in_the_wrong_place_is_an_error():
    target = replace(SECOND.target, box_pos_M4=np.array([[1, 2, 3, 5]]))
    with pytest.raises(AlignmentError, match="role CLOSE"):
        supervise_row(build_row([replace(SECOND, target=target)]))


def test_roles_must_cover_the_target():
    target = replace(FIRST.target, roles_T=FIRST.target.roles_T[:-1])
    with pytest.raises(AlignmentError, match="4 roles for 5 target tokens"):
        supervise_row(build_row([replace(FIRST, target=target)]))
