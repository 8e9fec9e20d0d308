"""Posts to several servers at once, as many as each has room for; results as they come."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from coordexp.rollouts.chunking import Post

Reply = TypeVar("Reply")


def in_flight(
    posts: Sequence[Post],
    slots: Sequence[int],
    ask: Callable[[Post], Reply],
    watch: Callable[[set[int]], None],
    watch_s: float,
) -> Iterator[tuple[Post, Reply]]:
    """``(post, ask(post))`` of every post, in the order in which they finish.

    The posts of one server start in their order, while their requests fit into its slots; ``watch(servers)`` is called
    when none has finished for ``watch_s`` seconds, with the servers that owe replies, and may raise.

    Raises: the first failure of any post or of ``watch``. Posts still under way then are left to end by themselves, in
        threads that no exit waits for.
    """
    waiting = [deque(post for post in posts if post.server == server) for server in range(len(slots))]
    free = list(slots)
    owed: list[Post] = []
    done: queue.SimpleQueue[tuple[Post, Reply | None, BaseException | None]] = queue.SimpleQueue()

    def work(post: Post) -> None:
        try:
            done.put((post, ask(post), None))
        except BaseException as error:  # raised again below, in the thread that waits
            done.put((post, None, error))

    def start(server: int) -> None:
        while waiting[server] and waiting[server][0].size <= free[server]:
            post = waiting[server].popleft()
            free[server] -= post.size
            owed.append(post)
            threading.Thread(target=work, args=(post,), name=f"infer-{server}", daemon=True).start()

    for server in range(len(slots)):
        start(server)
    while owed:
        try:
            post, reply, error = done.get(timeout=watch_s)
        except queue.Empty:
            watch({post.server for post in owed})
            continue
        if error is not None:
            raise error
        owed.remove(post)
        free[post.server] += post.size
        start(post.server)
        yield post, reply  # pyright: ignore[reportReturnType]
    assert not any(waiting), "a post larger than its server's slots"
