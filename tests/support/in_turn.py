"""Work in the main thread, in the place of work ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from coordexp.background import Item, Result


class InTurn(Generic[Item, Result]):
    """As ``Prefetcher`` without its thread: one is prepared when it is taken."""

    has_unconsumed = False

    def __init__(self, asked: Sequence[Item], prepare: Callable[[Item], Result], **_: object) -> None:
        self._asked, self._prepare = list(asked), prepare

    def __len__(self) -> int:
        return len(self._asked)

    def take(self) -> tuple[Item, Result]:
        one = self._asked.pop(0)
        return one, self._prepare(one)

    def stop(self) -> None: ...

    def __enter__(self) -> InTurn[Item, Result]:
        return self

    def __exit__(self, *_: object) -> None: ...
