"""Area and canonical form of polygons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data.polygons import canonical_ring, shape_area, signed_ring_area

POINTS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), min_size=3, max_size=9)


def flat(points: list[tuple[int, int]]) -> list[int]:
    return [value for point in points for value in point]


@pytest.mark.parametrize(
    ("kind", "points", "area"),
    [
        ("bbox_2d", (2, 3, 12, 8), 50),
        ("bbox_2d", (2, 3, 2, 8), 0),
        ("poly", (0, 0, 4, 0, 0, 3), 6),
        ("poly", (0, 3, 4, 0, 0, 0), 6),  # the other way round
        ("poly", (0, 0, 4, 0, 8, 0), 0),
    ],
)
def test_area(kind: str, points: tuple[int, ...], area: float) -> None:
    assert shape_area(kind, points) == area


def test_rings_that_run_clockwise_on_the_screen_have_positive_areas() -> None:
    assert signed_ring_area((0, 0, 4, 0, 4, 3, 0, 3)) == 12 == -signed_ring_area((0, 3, 4, 3, 4, 0, 0, 0))
    assert canonical_ring([5, 5] * 4) == ()


@given(POINTS, st.integers(0, 8), st.booleans())
def test_the_canonical_ring_is_the_same_from_any_start_and_direction(
    points: list[tuple[int, int]], start: int, turned: bool
) -> None:
    written = canonical_ring(flat(points))
    assert canonical_ring(written) == written
    assert shape_area("poly", written) == shape_area("poly", flat(points))
    other = points[start % len(points) :] + points[: start % len(points)]
    other = other[::-1] if turned else other
    again = canonical_ring(flat([point for point in other for _ in range(2)]))  # each point twice
    tops = [point for point in zip(written[::2], written[1::2], strict=True) if point == written[:2]]
    if signed_ring_area(written) and len(tops) == 1:  # a ring that meets its first point again has two writings
        assert again == written
