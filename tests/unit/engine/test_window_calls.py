"""A window's calls to several servers: shares, limits, and replies in any order."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.engine.trainer.server_backend import in_flight
from coordexp.errors import RolloutError
from coordexp.rollouts.chunking import Call, Post, chunk_size, plan_calls, plan_posts, server_slots, split_requests

SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("decode_batch_size", "world_sizes", "ranks", "slots"),
    [
        (3, [2, 1], 1, [(6, 3)]),  # alone: decode_batch_size for each device
        (1, [1, 1], 2, [(1, 0), (0, 1)]),  # one request a rank: not both to server 0
        (2, [3, 1], 2, [(4, 0), (2, 2)]),
        (1, [2, 1], 3, [(1, 0), (1, 0), (0, 1)]),
        (3, [2, 1], 2, [(4, 0), (2, 2)]),  # floor(9 / 2) = 4: a slot of server 1 stays free
        (2, [1, 1, 1], 4, [(1, 0, 0), (1, 0, 0), (0, 1, 0), (0, 1, 0)]),
    ],
)
def test_slots(decode_batch_size: int, world_sizes: list[int], ranks: int, slots: list[tuple[int, ...]]) -> None:
    assert [server_slots(decode_batch_size, world_sizes, ranks, rank) for rank in range(ranks)] == slots


@given(st.lists(st.integers(0, 20), max_size=6), SIZES, st.integers(1, 4))
def test_every_request_is_sent_once_in_order_within_the_slots(
    round_sizes: list[int], world_sizes: list[int], decode_batch_size: int
) -> None:
    slots = server_slots(decode_batch_size, world_sizes, 1, 0)
    batches = plan_calls(round_sizes, slots)
    asked = [(call.round_idx, index) for batch in batches for call in batch for index in call.indices]
    assert asked == [(round_idx, index) for round_idx, size in enumerate(round_sizes) for index in range(size)]
    for batch in batches:
        load = Counter({call.server: 0 for call in batch})
        for call in batch:
            load[call.server] += len(call.indices)
        assert all(load[server] <= slots[server] for server in load)
    assert plan_calls(round_sizes, slots) == batches


@given(st.integers(0, 40), SIZES)
def test_a_single_rank_splits_a_round_by_the_contracts_rule(n: int, world_sizes: list[int]) -> None:
    slots = server_slots(50, world_sizes, 1, 0)
    dealt = {call.server: call.indices for batch in plan_calls([n], slots) for call in batch}
    expected = dict(enumerate(split_requests(n, world_sizes)))
    assert dealt == {server: part for server, part in expected.items() if len(part)}


@settings(max_examples=300)
@given(st.integers(1, 8), st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 16), st.integers(1, 8),
       st.integers(1, 8))  # fmt: skip
def test_the_plan_is_optimal_within_the_limits(
    ranks: int, devices: list[int], decode_batch_size: int, steps: int, samples: int
) -> None:
    """A batch is as much as a rank may have in flight and is decoded at once, so no plan is faster."""
    if decode_batch_size * sum(devices) < ranks:
        return
    chunk = chunk_size(decode_batch_size, devices, ranks)
    plans = [plan_calls([samples] * steps, server_slots(decode_batch_size, devices, ranks, r)) for r in range(ranks)]
    assert {len(plan) for plan in plans} == {-(-steps * samples // chunk)}
    for together in zip(*plans, strict=True):
        load = Counter({call.server: 0 for batch in together for call in batch})
        for call in itertools.chain.from_iterable(together):
            load[call.server] += len(call.indices)
        assert all(load[server] <= decode_batch_size * size for server, size in enumerate(devices))


def test_small_micro_steps_share_a_batch_but_not_a_call() -> None:
    (batch,) = plan_calls([1, 1, 2], (2, 2))
    assert batch == [Call(0, 0, range(0, 1)), Call(0, 1, range(0, 1)), Call(1, 2, range(0, 2))]


def test_calls_to_joined_servers_share_a_post_per_batch() -> None:
    batches = plan_calls([1, 1, 2, 3], (2, 2))
    assert [[call.server for call in batch] for batch in batches] == [[0, 0, 1], [0, 1]]
    one_by_one = [Post(call.server, (call,)) for batch in batches for call in batch]
    assert plan_posts(batches, ()) == one_by_one
    assert plan_posts(batches, {0}) == [Post(0, tuple(batches[0][:2])), *one_by_one[2:]]
    assert [post.size for post in plan_posts(batches, {0, 1})] == [2, 2, 2, 1]


POSTS = [
    Post(server, (Call(server, round_idx, indices),))
    for server, round_idx, indices in ((0, 0, range(2)), (1, 0, range(2, 3)), (0, 1, range(2)), (0, 2, range(1)))
]


def nobody(servers: set[int]) -> None:
    pytest.fail(f"asked about {servers}")


def test_replies_are_yielded_as_they_finish_within_the_limits() -> None:
    order, running, most = [], Counter(), Counter()
    lock = threading.Lock()
    release = threading.Event()

    def ask(post: Post) -> str:
        with lock:
            running[post.server] += post.size
            most[post.server] = max(most[post.server], running[post.server])
        if post == POSTS[0]:
            assert release.wait(20)
        with lock:
            running[post.server] -= post.size
        return f"{post.server}:{post.calls[0].round_idx}"

    for post, reply in in_flight(POSTS, (2, 1), ask, nobody, watch_s=60):
        assert reply == f"{post.server}:{post.calls[0].round_idx}"
        order.append(post)
        release.set()  # server 1's reply is here; only now may the first call end
    assert order[0] == POSTS[1] and set(order) == set(POSTS)
    assert most == {0: 2, 1: 1}


def test_the_first_failure_is_raised_without_waiting() -> None:
    forever = threading.Event()

    def ask(post: Post) -> None:
        if post.server == 1:
            raise RolloutError("server 1 is gone")
        forever.wait(60)

    started = time.monotonic()
    with pytest.raises(RolloutError, match="server 1 is gone"):
        list(in_flight(POSTS, (2, 1), ask, nobody, watch_s=60))
    assert time.monotonic() - started < 20
    forever.set()
