"""An optimizer step's gradient is a function of its segments, not of how they were packed, split or ordered."""

from __future__ import annotations

import pytest

from coordexp.modeling.load import LoadedModel
from coordexp.records import Segment
from support.step_gradients import furthest, load_double, mixed_segments, step


@pytest.fixture(scope="module", params=["packed", "sdpa"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_double(request.param)


@pytest.fixture(scope="module")
def segments(loaded: LoadedModel) -> list[Segment]:
    return mixed_segments(loaded)


@pytest.mark.parametrize(
    "split",
    [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2], [3, 4, 5]], [[5, 4, 3, 2, 1, 0]], [[0, 3, 5], [4], [2, 1]]],
    ids=["one each", "two rows", "reversed", "uneven"],
)
def test_any_packing_gives_the_same_step(loaded: LoadedModel, segments: list[Segment], split: list[list[int]]) -> None:
    loss, gradient = step(loaded, [segments])
    other_loss, other = step(loaded, [[segments[index] for index in row] for row in split])
    assert other_loss == pytest.approx(loss, rel=1e-12)
    assert furthest(other, gradient) < 1e-9


def test_a_mean_of_rows_would_be_another_step(loaded: LoadedModel, segments: list[Segment]) -> None:
    """The test above can fail: averaging per micro-step, as trainers do by default, gives another gradient."""
    _, exact = step(loaded, [segments])
    first, second = (step(loaded, [part])[1] for part in (segments[:1], segments[1:]))
    assert furthest({name: (first[name] + second[name]) / 2 for name in exact}, exact) > 1e-2
