"""Calls to several servers at once, as many as each has room for; results as they come."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from coordexp.rollouts.chunking import Call

Reply = TypeVar("Reply")


def in_flight(
    calls: Sequence[Call],
    slots: Sequence[int],
    ask: Callable[[Call], Reply],
    watch: Callable[[set[int]], None],
    watch_s: float,
) -> Iterator[tuple[Call, Reply]]:
    """``(call, ask(call))`` of every call, in the order in which they finish.

    The calls of one server start in their order, while their requests fit into its slots; ``watch(servers)`` is called
    when none has finished for ``watch_s`` seconds, with the servers that owe replies, and may raise.

    Raises: the first failure of any call or of ``watch``. Calls still under way then are left to end by themselves, in
        threads that no exit waits for.
    """
    waiting = [deque(call for call in calls if call.server == server) for server in range(len(slots))]
    free = list(slots)
    owed: list[Call] = []
    done: queue.SimpleQueue[tuple[Call, Reply | None, BaseException | None]] = queue.SimpleQueue()

    def work(call: Call) -> None:
        try:
            done.put((call, ask(call), None))
        except BaseException as error:  # raised again below, in the thread that waits
            done.put((call, None, error))

    def start(server: int) -> None:
        while waiting[server] and len(waiting[server][0].indices) <= free[server]:
            call = waiting[server].popleft()
            free[server] -= len(call.indices)
            owed.append(call)
            threading.Thread(target=work, args=(call,), name=f"infer-{server}", daemon=True).start()

    for server in range(len(slots)):
        start(server)
    while owed:
        try:
            call, reply, error = done.get(timeout=watch_s)
        except queue.Empty:
            watch({call.server for call in owed})
            continue
        if error is not None:
            raise error
        owed.remove(call)
        free[call.server] += len(call.indices)
        start(call.server)
        yield call, reply  # pyright: ignore[reportReturnType]
    assert not any(waiting), "a call larger than its server's slots"
