"""Plans for sending rollout requests: pure arithmetic, the same on every rank and in every run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from coordexp.errors import ConfigError


def split_requests(n: int, world_sizes: Sequence[int]) -> list[range]:
    """One contiguous range of ``range(n)`` per server, in proportion to its world size (rollout devices, >= 1).

    Server i takes the next ``ceil(n * s_i / sum(s))`` requests, or what is left of them; the last servers may get none.
    """
    if n < 0:
        raise ValueError(f"the number of requests cannot be negative, got {n}")
    total = _total(world_sizes)
    plan, start = [], 0
    for size in world_sizes:
        stop = min(n, start - (-n * size // total))  # -(-a // b) is ceil(a / b)
        plan.append(range(start, stop))
        start = stop
    return plan


def chunk_size(decode_batch_size: int, server_world_sizes: Sequence[int], learner_world_size: int) -> int:
    """Requests that one trainer rank may have in flight: ``floor(decode_batch_size * S / W)`` for S rollout devices of
    all servers and W training ranks, which all send at once. Raises ConfigError if that is 0: some rank could not send
    a single request."""
    if decode_batch_size < 1:
        raise ConfigError(f"rollout_matching.decode_batch_size must be at least 1, got {decode_batch_size}")
    if learner_world_size < 1:
        raise ValueError(f"learner_world_size must be at least 1, got {learner_world_size}")
    total = _total(server_world_sizes)
    slots = decode_batch_size * total
    if slots < learner_world_size:
        raise ConfigError(
            f"rollout_matching.decode_batch_size {decode_batch_size} on {total} rollout devices allows {slots} "
            f"requests at a time, fewer than the {learner_world_size} trainer ranks that send at once; increase the "
            "rollout servers' world size, reduce the trainer's world size, or increase "
            f"rollout_matching.decode_batch_size to at least {-(-learner_world_size // total)}"
        )
    return slots // learner_world_size


def server_slots(
    decode_batch_size: int, server_world_sizes: Sequence[int], learner_world_size: int, rank: int
) -> tuple[int, ...]:
    """How many requests this rank may have in flight at each server; together its :func:`chunk_size`."""
    # All ranks send requests at once, so the slots of all ranks are distributed, in rank order. Then no device gets
    # more than ``decode_batch_size`` sequences; if each rank planned alone, all would begin with the first server.
    chunk = chunk_size(decode_batch_size, server_world_sizes, learner_world_size)
    own = range(rank * chunk, (rank + 1) * chunk)
    return tuple(
        max(0, min(own.stop, part.stop) - max(own.start, part.start))
        for part in split_requests(chunk * learner_world_size, server_world_sizes)
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One call to one server: requests ``indices`` of round (micro-step) ``round_idx``."""

    server: int
    round_idx: int
    indices: range


@dataclass(frozen=True, slots=True)
class Post:
    """Content of one HTTP request to one server: one call, or several of a batch."""

    server: int
    calls: tuple[Call, ...]

    @property
    def size(self) -> int:
        """Number of rollout requests."""
        return sum(len(call.indices) for call in self.calls)


def plan_calls(round_sizes: Sequence[int], slots: Sequence[int]) -> list[list[Call]]:
    """The calls of a whole step on one rank, in batches of at most ``sum(slots)`` requests, in order.

    The step's requests, round after round of ``round_sizes``, are cut into batches; each is split over the servers
    contiguously, in proportion to this rank's slots there (:func:`server_slots`). A call ends where its round ends: its
    seed belongs to a micro-step.
    """
    servers = [server for server, count in enumerate(slots) if count]
    weights = [slots[server] for server in servers]
    starts = [sum(round_sizes[:idx]) for idx in range(len(round_sizes))]
    num_requests, most = sum(round_sizes), sum(weights)
    batches = []
    for begin in range(0, num_requests, most):
        calls = []
        for server, part in zip(servers, split_requests(min(most, num_requests - begin), weights), strict=True):
            first, last = begin + part.start, begin + part.stop
            for round_idx, (start, size) in enumerate(zip(starts, round_sizes, strict=True)):
                indices = range(max(first, start) - start, min(last, start + size) - start)
                if len(indices):
                    calls.append(Call(server, round_idx, indices))
        batches.append(calls)
    return batches


def plan_posts(batches: Sequence[Sequence[Call]], joined: Collection[int]) -> list[Post]:
    """HTTP requests for the calls of :func:`plan_calls`, in order: one per call, but servers in ``joined`` get all
    calls of a batch together. Such a request has one seed, its first call's, so join only if seeds do not matter."""
    posts: list[Post] = []
    for batch in batches:
        for server, calls in groupby(batch, key=lambda call: call.server):
            together = tuple(calls)  # a batch is distributed to servers in order
            posts += [Post(server, together)] if server in joined else [Post(server, (call,)) for call in together]
    return posts


def _total(world_sizes: Sequence[int]) -> int:
    if not world_sizes or min(world_sizes) < 1:
        raise ValueError(f"every rollout server needs a world size of at least 1, got {list(world_sizes)}")
    return sum(world_sizes)
