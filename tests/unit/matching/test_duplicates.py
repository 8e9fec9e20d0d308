"""Objects named twice: the same description, in nearly the same place."""

from __future__ import annotations

import pytest

from coordexp.matching import duplicate_indices
from coordexp.records import GTObject

CAT, NEAR, FAR = (100, 100, 300, 300), (110, 110, 310, 310), (600, 600, 800, 800)


def box(desc: str, bins: tuple[int, ...]) -> GTObject:
    return GTObject(desc, "bbox_2d", bins)


@pytest.mark.parametrize(
    ("objects", "expected", "why"),
    [
        ([], 0, "nothing named"),
        ([box("cat", CAT)], 0, "named once"),
        ([box("cat", CAT), box("cat", FAR)], 0, "two of a kind"),
        ([box("cat", CAT), box("cat", NEAR)], 1, "IoU 0.82"),
        ([box("cat", CAT), box("dog", CAT)], 0, "another thing in the same place"),
        ([box("cat", CAT), box("cat", NEAR), box("cat", CAT)], 2, "the first of three is not a duplicate"),
        ([box("cat", CAT), box("cat", (100, 100, 199, 300))], 0, "half of it: IoU just under 0.5"),
        (
            [box("cat", CAT), GTObject("cat", "poly", (100, 100, 300, 100, 300, 300, 100, 300))],
            1,
            "a polygon of the same outline",
        ),
    ],
)
def test_duplicates(objects: list[GTObject], expected: int, why: str) -> None:
    assert len(duplicate_indices(objects)) == expected, why
