"""Strangers at a weight group's port: their messages are ignored, and the members connect."""

from __future__ import annotations

import json
import resource
import socket
import struct
import threading
from typing import Any

import pytest
import torch

from coordexp.errors import RolloutError
from coordexp.weight_sync.group import GroupAddress, RendezvousServer, RendezvousStore, join
from support.ports import free_ports

TOKEN = "0123456789abcdef"


def frame(what: Any) -> bytes:
    body = json.dumps(what).encode()
    return struct.pack(">I", len(body)) + body


# Bytes from a stranger; None: it closes its connection.
GUESTS: dict[str, bytes | None] = {
    # SET of torch's own store: the call's number, a key, and a value of 8 GiB
    "announces 8 GiB to torch's store": b"\x00" + struct.pack("<Q", 3) + b"key" + struct.pack("<Q", 8 << 30),
    "announces 4 GiB": b"\xff\xff\xff\xff",
    "speaks HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "sends nothing": b"",
    "hangs up": None,
    "sets a key without the token": frame({"proof": ""}) + frame({"op": "set", "key": "here/1", "value": "31"}),
    "guesses a token": frame({"proof": "0" * 64}),
    "sends no object": frame([1, 2, 3]),
    "nests": struct.pack(">I", 4000) + b"[" * 2000 + b"]" * 2000,
}


@pytest.mark.parametrize("guest", GUESTS)
def test_a_stranger_is_refused_and_members_connect(guest: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (port,) = free_ports(1)
    ends: dict[int, Any] = {}

    def member(rank: int) -> None:
        ends[rank] = join(GroupAddress("127.0.0.1", port, rank, 2, 20.0, TOKEN), torch.device("cpu"))

    worker = threading.Thread(target=member, args=(0,))
    worker.start()
    strangers = [_connected(port) for _ in range(3)]
    for one in strangers:
        if (sent := GUESTS[guest]) is None:
            one.close()
        else:
            one.sendall(sent)
    assert not ends, "a stranger was accepted as the trainer"
    member(1)
    worker.join(20)
    received = torch.zeros(8, dtype=torch.uint8)
    receiving = threading.Thread(target=lambda: ends[0].broadcast([received], 1))
    receiving.start()
    ends[1].broadcast([torch.full((8,), 7, dtype=torch.uint8)], 1)
    receiving.join(20)
    assert received.tolist() == [7] * 8
    for one in (*ends.values(), *strangers):
        one.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_a_trainer_with_another_token_is_refused() -> None:
    (port,) = free_ports(1)
    held: list[RolloutError] = []

    def worker() -> None:
        with pytest.raises(RolloutError) as refused:
            join(GroupAddress("127.0.0.1", port, 0, 2, 3.0, TOKEN), torch.device("cpu"))
        held.append(refused.value)

    thread = threading.Thread(target=worker)
    thread.start()
    with pytest.raises(RolloutError, match="wrong token"):
        join(GroupAddress("127.0.0.1", port, 1, 2, 10.0, "another"), torch.device("cpu"))
    thread.join(20)
    assert "not every member connected" in str(held[0])


@pytest.mark.parametrize(
    "sent",
    [{"key": "k", "value": b"x" * (2 << 20)}, {"key": "k" * (2 << 20), "value": b""}],
    ids=["a value of 2 MiB", "a key of 2 MiB"],
)
def test_a_member_cannot_store_large_values(sent: dict[str, Any]) -> None:
    table = RendezvousServer(socket.create_server(("127.0.0.1", 0)), TOKEN)
    port = table._listener.getsockname()[1]
    store = RendezvousStore("127.0.0.1", port, TOKEN, 5.0)
    with pytest.raises((OSError, RuntimeError)):
        store.set(**sent)
    another = RendezvousStore("127.0.0.1", port, TOKEN, 5.0)
    another.set("k", b"1")
    assert another.get("k") == b"1"
    table.close()


def test_the_token_is_in_no_message() -> None:
    address = GroupAddress("127.0.0.1", 1, 1, 2, 0.1, TOKEN)
    assert TOKEN not in repr(address) + str(address)
    with pytest.raises(RolloutError) as refused:
        join(address, torch.device("cpu"))
    assert TOKEN not in str(refused.value)


def _connected(port: int) -> socket.socket:
    for _ in range(500):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            threading.Event().wait(0.01)
    raise AssertionError("the port is closed")
