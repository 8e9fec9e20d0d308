"""Weight pushes from a learner process into the engine inside it: whole, or the adapter alone while that works."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from coordexp import distributed
from coordexp.config.vllm import SyncConfig
from coordexp.errors import ConfigError, RolloutError
from coordexp.rollouts.backend import WeightSource

logger = logging.getLogger("coordexp")


class ColocatedPush:
    """Pushes are collective: every rank pushes into its own engine, all in the same mode.

    ``mode``: how the next push is done. ``fallbacks``: why adapters are pushed no more; empty, or one text.
    """

    def __init__(self, config: SyncConfig, mode: Literal["full", "adapter"], weights: WeightSource) -> None:
        self.mode: Literal["full", "adapter"] = mode
        self.fallbacks: list[str] = []
        self._config = config
        self._weights = weights
        self._pushes = 0
        self._compared = False  # whether a push has been read back yet
        self._metrics: Counter[str] = Counter()

    def into(self, engine: Any, version: int) -> None:
        """Make the learner's current weights, as ``version``, those of ``engine``, and make room for its cache.

        Raises:
            RolloutError: any rank's engine has not got them; on every rank alike.
        """
        if self.mode == "adapter":
            self._adapter_into(engine, version)
        with distributed.raise_on_all_ranks("the push into the colocated engine"):
            if self.mode == "full":
                self._full_into(engine, version)
            engine.wake_up(["kv_cache"])
        self._pushes += 1

    def take_metrics(self) -> Mapping[str, float]:
        """Counters since the last call, by metric name."""
        taken, self._metrics = self._metrics, Counter()
        return taken

    def _adapter_into(self, engine: Any, version: int) -> None:
        """One rank's failure is everybody's: ranks may share one engine's model, or gather merged weights together."""
        try:
            with distributed.raise_on_all_ranks("the adapter push into the colocated engine"):
                adapter = self._weights.adapter()
                if adapter is None:
                    raise ConfigError(
                        "rollout_matching.vllm.sync.mode: adapter, but the learner has no adapter; write full instead"
                    )
                engine.load_adapter(adapter, version)
        except RolloutError as error:
            if not self._config.fallback_to_full:
                raise RolloutError(
                    f"{error}; write rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"
                ) from error
            logger.warning("adapter push failed (%s); merged weights are pushed from here on", error)
            self.fallbacks.append(f"version {version}: {error}")
            self._metrics["rollout/sync_fallbacks_total"] += 1
            self.mode = "full"

    def _full_into(self, engine: Any, version: int) -> None:
        every = self._config.checksum_every
        compares = not self._compared or (every > 0 and self._pushes % every == 0)
        with self._weights.full() as named:
            try:
                engine.load(named, version, self._config.bucket_mb << 20, compares_checksum=compares)
            finally:
                if self._weights.collective:
                    for _ in named:  # the other ranks gather to the end, and wait for this one there
                        pass
        self._compared |= compares
