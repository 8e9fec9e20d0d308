"""The weight group over Gloo, with both ends real: in one process, by two threads."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.group import Communicator, GroupAddress, RendezvousServer, join, wait_until_free, within
from support.ports import free_ports, listening

CPU = torch.device("cpu")


def both_ends(port: int, timeout_s: float = 20.0) -> tuple[Communicator, Communicator]:
    """A worker's end (rank 0) and the trainer's (rank 1)."""
    with ThreadPoolExecutor(2) as pool:
        addresses = [GroupAddress("127.0.0.1", port, rank, 2, timeout_s) for rank in range(2)]
        worker, trainer = pool.map(lambda address: join(address, CPU), addresses)
    return worker, trainer


def test_bytes_arrive_and_a_port_can_be_reused() -> None:
    (port,) = free_ports(1)
    for value in (3, 250):
        worker, trainer = both_ends(port)
        sent = torch.full((5_000_000,), value, dtype=torch.uint8)
        received = torch.zeros_like(sent)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(worker.broadcast, [received], 1)
            trainer.broadcast([sent], 1, give_up=lambda: None)
            receiving.result()
        assert torch.equal(sent, received)
        trainer.close()
        worker.close()
        wait_until_free(GroupAddress("127.0.0.1", port, 1, 2, 5.0), 5.0)


ELSEWHERE = "198.51.100.7"  # reserved for documentation, so unreachable


@pytest.mark.parametrize(
    ("host", "listen_host"),
    [(ELSEWHERE, "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("name-of-a-service.invalid", "127.0.0.1")],
)
def test_workers_connect_to_the_address_that_their_machine_listens_on(host: str, listen_host: str) -> None:
    """Two workers of a server and a trainer that uses another address."""
    (port,) = free_ports(1)
    addresses = [GroupAddress(host, port, rank, 3, 20.0, "token", listen_host) for rank in range(2)]
    addresses.append(GroupAddress("127.0.0.1", port, 2, 3, 20.0, "token"))
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda address: join(address, CPU), addresses))
        received = [torch.zeros(1000, dtype=torch.uint8) for _ in range(2)]
        parts = [*received, torch.full((1000,), 7, dtype=torch.uint8)]
        list(pool.map(lambda one: one[0].broadcast([one[1]], 2), zip(ends, parts, strict=True)))
    for end in reversed(ends):
        end.close()
    assert all(bool((part == 7).all()) for part in received)


def test_a_group_opens_one_port_per_member_on_one_address() -> None:
    """As docs/rollout-servers.md says for firewall rules."""
    (port,) = free_ports(1)
    before = listening()
    ends = both_ends(port)
    opened = listening() - before
    for end in ends:
        end.close()
    assert ("127.0.0.1", port) in opened
    assert len(opened) == 3 and {address for address, _ in opened} == {"127.0.0.1"}


def test_a_member_that_leaves_is_detected_at_once() -> None:
    worker, trainer = both_ends(free_ports(1)[0])
    started = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(worker.broadcast, [torch.zeros(8, dtype=torch.uint8)], 1)
        trainer.close()
        assert "other side is gone" in str(receiving.exception(10))
    assert time.monotonic() - started < 10
    worker.close()
    worker.close()
    with pytest.raises(RolloutError, match="the group is closed"):
        worker.broadcast([torch.zeros(8, dtype=torch.uint8)], 1)


def test_the_worker_that_listens_knows_whether_all_are_connected() -> None:
    worker, trainer = both_ends(free_ports(1)[0])
    assert worker.is_whole() and not trainer.is_whole()
    trainer.close()
    assert not worker.is_whole(), "at once, whether its thread has run or not"
    worker.close()
    assert not worker.is_whole()


def test_waiting_for_a_silent_member_times_out() -> None:
    worker, trainer = both_ends(free_ports(1)[0], timeout_s=1.5)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"did not arrive within 1\.5 s"):
        worker.broadcast([torch.zeros(8, dtype=torch.uint8)], 1)
    assert time.monotonic() - started < 10
    trainer.close()
    worker.close()


@pytest.mark.parametrize("rank", [0, 1], ids=["no trainer connects", "no worker connects"])
def test_rendezvous_without_members_times_out(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(RolloutError, match="not every member connected within 1 s"):
        join(GroupAddress("127.0.0.1", free_ports(1)[0], rank, 2, 1.0), CPU)
    assert time.monotonic() - started < 15


def test_a_member_that_leaves_while_others_connect_is_no_bare_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is gone once Gloo asks its store for addresses."""
    handle = RendezvousServer._handle

    def until_gloo(self: RendezvousServer, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("key", "").startswith("weights"):
            raise OSError
        return handle(self, request)

    monkeypatch.setattr(RendezvousServer, "_handle", until_gloo)
    (port,) = free_ports(1)
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join, GroupAddress("127.0.0.1", port, rank, 2, 20.0), CPU) for rank in range(2)]
        for end in joining:
            with pytest.raises(RolloutError, match="a member left before all were connected"):
                end.result()


def test_within_returns_results_and_raises_errors_and_timeouts() -> None:
    assert within(5, "it did not end", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(5, "it did not end", lambda: 1 // 0)
    with pytest.raises(RolloutError, match=r"it did not end within 0\.1 s"):
        within(0.1, "it did not end", lambda: time.sleep(2))
