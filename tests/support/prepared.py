"""Work in the main thread, in the place of work ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

from coordexp.background import Asked, Result


class PreparedInTurn(Generic[Asked, Result]):
    """As ``PreparedAhead`` without its thread: one is prepared when it is taken."""

    left_over = False

    def __init__(self, asked: Sequence[Asked], prepare: Callable[[Asked], Result], **_: object) -> None:
        self._asked, self._prepare = list(asked), prepare

    def __len__(self) -> int:
        return len(self._asked)

    def take(self) -> tuple[Asked, Result]:
        one = self._asked.pop(0)
        return one, self._prepare(one)

    def stop(self) -> None: ...

    def __enter__(self) -> PreparedInTurn[Asked, Result]:
        return self

    def __exit__(self, *_: object) -> None: ...
