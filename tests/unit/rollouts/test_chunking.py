"""Plans for sending requests to servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.errors import ConfigError
from coordexp.rollouts.chunking import chunk_size, split_requests


@pytest.mark.parametrize(
    ("n", "world_sizes", "sizes"),
    [
        (5, [1, 1], [3, 2]),
        (5, [1, 1, 1], [2, 2, 1]),
        (10, [1, 1, 1, 1], [3, 3, 3, 1]),
        (4, [1, 1, 1], [2, 2, 0]),
        (1, [1, 1, 1], [1, 0, 0]),
        (0, [1, 2, 3], [0, 0, 0]),
        (10, [3, 1], [8, 2]),
        (10, [1, 3], [3, 7]),
        (7, [2, 1, 1], [4, 2, 1]),
        (8, [4], [8]),
        (9, [4, 4], [5, 4]),
    ],
)
def test_shares(n, world_sizes, sizes):
    assert [len(chunk) for chunk in split_requests(n, world_sizes)] == sizes


@given(st.integers(0, 500), st.lists(st.integers(1, 16), min_size=1, max_size=9))
def test_shares_cover_all_requests_in_order(n, world_sizes):
    plan = split_requests(n, world_sizes)
    assert len(plan) == len(world_sizes)
    assert [index for chunk in plan for index in chunk] == list(range(n))
    total = sum(world_sizes)
    assert all(len(chunk) * total < n * size + total for chunk, size in zip(plan, world_sizes, strict=True))


@pytest.mark.parametrize(("n", "world_sizes"), [(-1, [1]), (3, []), (3, [1, 0])])
def test_impossible_plans_are_refused(n, world_sizes):
    with pytest.raises(ValueError):
        split_requests(n, world_sizes)


@pytest.mark.parametrize(
    ("decode_batch_size", "world_sizes", "trainers", "expected"),
    [(4, [6], 2, 12), (4, [2, 4], 2, 12), (1, [3], 1, 3), (1, [1, 1, 1], 2, 1), (3, [1], 2, 1), (1, [4], 4, 1)],
)
def test_chunk_size(decode_batch_size, world_sizes, trainers, expected):
    assert chunk_size(decode_batch_size, world_sizes, trainers) == expected


@pytest.mark.scenario("vLLM server mode fails fast when cap is infeasible")
@pytest.mark.parametrize(
    ("decode_batch_size", "world_sizes", "trainers", "needed"), [(1, [2], 4, 2), (1, [1], 2, 2), (2, [1], 3, 3)]
)
def test_more_trainer_ranks_than_decode_slots(decode_batch_size, world_sizes, trainers, needed):
    with pytest.raises(ConfigError) as error:
        chunk_size(decode_batch_size, world_sizes, trainers)
    for cure in (
        "increase the rollout servers' world size",
        "reduce the trainer's world size",
        f"increase rollout_matching.decode_batch_size to at least {needed}",
    ):
        assert cure in str(error.value)
    assert chunk_size(needed, world_sizes, trainers) >= 1


def test_a_decode_batch_size_of_0_is_refused():
    with pytest.raises(ConfigError, match="decode_batch_size"):
        chunk_size(0, [4], 1)
