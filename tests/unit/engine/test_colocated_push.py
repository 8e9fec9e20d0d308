"""A push into a colocated engine that fails, without an engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from coordexp import distributed
from coordexp.errors import RolloutError
from support.settings import colocated_of


class FakeFullEngine:
    """Wakes up, and has no room for weights."""

    def wake_up(self, parts: Any) -> None: ...
    def sleep(self, level: int) -> None: ...
    def close(self) -> None: ...

    def load(self, *_: Any, **__: Any) -> None:
        raise RolloutError("no room on this rank's device")


class NoWeights:
    collective = False

    def full(self) -> Any:
        return nullcontext(iter(()))


def test_a_push_that_fails_on_one_rank_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would go on to ask their engines, and wait there for this rank's requests."""
    told: list[tuple[str, Exception | None]] = []
    tell = distributed.raise_first_failure
    monkeypatch.setattr(
        distributed, "raise_first_failure", lambda what, where: (told.append((where, what)), tell(what, where))
    )
    backend = colocated_of(NoWeights(), tensor_parallel_size=2)
    backend._engine = FakeFullEngine()
    with pytest.raises(RolloutError, match="no room"):
        backend.sync_weights(1)
    assert [(where, str(what)) for where, what in told] == [
        ("starting the colocated engine", "None"),
        ("the push into the colocated engine", "no room on this rank's device"),
    ]
