"""Ports for servers that a test or a benchmark starts."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

import psutil

# Below the ports that Linux hands out itself: between the look and the server's start, minutes on a busy machine,
# another process could be given one of those.
FIRST, LAST = 15_000, 32_000
_choice = random.SystemRandom()  # test workers are forked: a seeded one would choose the same in each


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free a moment ago, all different: for a configuration of servers."""
    with ExitStack() as held:  # all of them at once, or the same port comes twice
        ports: list[int] = []
        for port in _choice.sample(range(FIRST, LAST), 100 + count):
            if len(ports) == count:
                break
            listener = held.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
            ports.append(port)
        assert len(ports) == count, f"only {len(ports)} of {count} ports between {FIRST} and {LAST} are free"
        return ports


def listening(pid: int | None = None) -> set[tuple[str, int]]:
    """Addresses and ports on which a process listens, by default this one; nothing if it has ended."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}
