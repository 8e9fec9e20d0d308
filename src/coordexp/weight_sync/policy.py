"""Which kind of push comes next, the same for servers and for an engine in the learner's process: the adapter alone or
all weights, and with checksums compared or not."""

from __future__ import annotations

import logging
from typing import Literal

from coordexp.config.vllm import SyncConfig
from coordexp.errors import RolloutError

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
