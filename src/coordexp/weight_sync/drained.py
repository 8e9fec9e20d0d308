"""Weights that every rank reads to the end, whatever becomes of the push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from coordexp.rollouts.backend import AdapterWeights, WeightSource

if TYPE_CHECKING:
    from torch import Tensor


class DrainedWeights:
    """A weight source of which every rank reads to the end, also when the push fails: where weights are sharded, each
    read is a collective, and a rank that stops would leave the others waiting."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._was_read = False

    @property
    def collective(self) -> bool:
        """The source's own answer."""
        return self._source.collective

    def names(self) -> Sequence[str]:
        """The source's own names."""
        return self._source.names()

    def adapter(self) -> AdapterWeights | None:
        """The source's own adapter."""
        return self._source.adapter()

    @contextmanager
    def full(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The source's weights; what the caller leaves unread is read at the end where other ranks wait for it."""
        self._was_read = True
        with self._source.full() as named:
            try:
                yield named
            finally:
                if self.collective:
                    for _ in named:
                        pass

    def finish(self) -> None:
        """Take part in this push's gathering, if this rank has not yet."""
        if self.collective and not self._was_read:
            with self.full():
                pass
        self._was_read = False
