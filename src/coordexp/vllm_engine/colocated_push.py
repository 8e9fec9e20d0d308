"""Weight pushes from a learner process into the engine inside it: whole, or the adapter alone while that works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from coordexp import distributed
from coordexp.config.vllm import SyncConfig
from coordexp.errors import ConfigError, RolloutError
from coordexp.rollouts.backend import WeightSource
from coordexp.weight_sync.policy import DrainedWeights, PushPolicy


class ColocatedPush:
    """Pushes are collective: every rank pushes into its own engine, all in the same mode, ``policy.mode``."""

    def __init__(self, config: SyncConfig, weights: WeightSource) -> None:
        self.policy = PushPolicy(config)
        self._bucket_bytes = config.bucket_mb << 20
        self._weights = DrainedWeights(weights)
        self._metrics: Counter[str] = Counter()

    def into(self, engine: Any, version: int) -> None:
        """Make the learner's current weights, as ``version``, those of ``engine``, and make room for its cache.

        Raises:
            RolloutError: any rank's engine has not got them; on every rank alike.
        """
        if self.policy.mode == "adapter":
            self._adapter_into(engine, version)
        compares = self.policy.mode == "full" and self.policy.compares_checksum()
        with distributed.raise_on_all_ranks("the push into the colocated engine"):
            if self.policy.mode == "full":
                with self._weights.full() as named:
                    engine.load(named, version, self._bucket_bytes, compares_checksum=compares)
            engine.wake_up(["kv_cache"])
        self.policy.done(compared=compares)

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
                    raise ConfigError("the learner trains no adapter (tuner.train_type is full)")
                engine.load_adapter(adapter, version)
        except (RolloutError, ConfigError) as error:
            self.policy.fall_back(version, error)
            self._metrics["rollout/sync_fallbacks_total"] += 1
