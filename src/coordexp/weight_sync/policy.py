"""The learner's side of a push, the same for servers and for an engine in its own process: which kind comes next (the
adapter alone or all weights, checksums compared or not), and weights that every rank reads to the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from coordexp.config.rollout import SyncConfig
from coordexp.errors import RolloutError
from coordexp.rollouts.backend import AdapterWeights, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("coordexp")


class PushPolicy:
    """``mode``: of the next push. ``fallbacks``: why adapters are pushed no more; empty, or one text."""

    def __init__(self, config: SyncConfig) -> None:
        self.mode: Literal["full", "adapter"] = config.settled_mode
        self.fallbacks: list[str] = []
        self._fallback_to_full = config.fallback_to_full
        self._checksum_every = config.checksum_every
        self._num_pushes = 0
        self._compared = False  # whether a full push has been compared yet

    def compares_checksum(self) -> bool:
        """Whether the next full push is compared: the first one, and then every ``checksum_every``-th push."""
        every = self._checksum_every
        return not self._compared or (every > 0 and self._num_pushes % every == 0)

    def done(self, *, compared: bool = False) -> None:
        """Note a push that succeeded."""
        self._num_pushes += 1
        self._compared |= compared

    def fall_back(self, version: int, error: Exception) -> None:
        """Push full weights from here on, because the adapter could not be pushed.

        Raises:
            RolloutError: ``sync.fallback_to_full`` does not allow it.
        """
        reason = f"{type(error).__name__}: {error}"
        if not self._fallback_to_full:
            raise RolloutError(
                f"version {version}: the adapter could not be pushed ({reason}). Write "
                "rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"
            ) from error
        logger.warning(
            "version %d: the adapter could not be pushed (%s); pushes are full from here on", version, reason
        )
        self.fallbacks.append(f"version {version}: {reason}")
        self.mode = "full"


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
