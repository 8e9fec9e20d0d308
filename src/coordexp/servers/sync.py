"""The learner's side of weight pushes: one protocol for ``coordexp serve`` and ``swift rollout`` with our plugin.

A push streams the weights once, in buckets, to all servers at the same time: each server is told over HTTP what comes,
the bytes travel in its weight group. It counts only when every worker of every server reports the new version.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Literal

from coordexp.errors import CoordExpError, RolloutError
from coordexp.rollouts.backend import WeightSource
from coordexp.servers.client import ServerClient
from coordexp.servers.connection import ServerConnection
from coordexp.servers.push import SyncReport, WeightPush
from coordexp.weight_sync.buckets import in_buckets
from coordexp.weight_sync.stamp import WeightStamp

logger = logging.getLogger(__name__)
_ADAPTER_ERRORS = (CoordExpError, RuntimeError, ValueError, TypeError, KeyError, OSError)


class WeightSync:
    """Pushes a learner's weights to rollout servers. Not for several threads at once."""

    def __init__(
        self,
        clients: Sequence[ServerClient],
        source: WeightSource,
        *,
        mode: Literal["full", "adapter"] = "full",
        fallback_to_full: bool = True,
        bucket_mb: int = 512,
        timeout_s: float = 120.0,
        checksum_every: int = 0,
    ) -> None:
        """
        Args:
            clients: the servers; none on ranks that only take part in gathering ``source``.
            mode: what is tried first; a failed adapter push falls back to full ones for good, or fails.
            bucket_mb: size of buckets, in 2^20 bytes.
            timeout_s: deadline of a push once the servers are met, for which each client's own ``timeout_s`` holds.
            checksum_every: compare checksums on every N-th push; 0 on the first full one only.
        """
        self._learner_id = secrets.token_hex(8)  # of this process alone; nothing that is computed depends on it
        self._connections = [ServerConnection(client) for client in clients]
        self._source = source
        self._mode: Literal["full", "adapter"] = mode
        self._fallback_to_full = fallback_to_full
        self._bucket_bytes = bucket_mb << 20
        self._timeout_s = timeout_s
        self._checksum_every = checksum_every
        self._num_pushes = 0
        self._compared = False

    @property
    def mode(self) -> Literal["full", "adapter"]:
        """How the next push will be done."""
        return self._mode

    def push(self, version: int) -> SyncReport:
        """Make the learner's current weights, as ``version``, those of every server.

        Raises:
            RolloutError: any server has not got them; its answers are refused until a push succeeds.
        """
        if self._mode == "full":
            return self._push_full(version, None)
        try:
            return self._push_adapter(version)
        except _ADAPTER_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
            if not self._fallback_to_full:
                raise RolloutError(
                    f"version {version}: the adapter could not be pushed ({reason}). Write "
                    "rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"
                ) from error
        logger.warning(
            "version %d: the adapter could not be pushed (%s); pushes are full from here on", version, reason
        )
        self._mode = "full"
        return self._push_full(version, reason)

    def close(self) -> None:
        """Leave every weight group; safe to call twice."""
        for connection in self._connections:
            connection.close(tell=True)

    def _push_full(self, version: int, fallback: str | None) -> SyncReport:
        wants_checksum = self._wants_checksum()
        push = WeightPush(self._connections, self._stamp(version), "full", self._timeout_s, wants_checksum, fallback)
        with push, self._source.full() as weights:
            for bucket in in_buckets(weights, self._bucket_bytes):
                push.send(bucket)
            report = push.commit()
        self._num_pushes += 1
        self._compared |= wants_checksum
        return report

    def _push_adapter(self, version: int) -> SyncReport:
        adapter = self._source.adapter()
        if adapter is None:
            raise RolloutError("the learner trains no adapter (tuner.train_type is full)")
        if adapter.outside_llm:
            raise RolloutError(
                "the adapter reaches the vision tower or the aligner, where vLLM would ignore it; freeze them "
                "(tuner.freeze_vit, tuner.freeze_aligner)"
            )
        push = WeightPush(self._connections, self._stamp(version), "adapter", self._timeout_s, False, None)
        with push:
            push.refuse_overwritten()
            for bucket in in_buckets(adapter.changed, self._bucket_bytes):
                push.send(bucket)
            push.send_adapter(adapter)
            report = push.commit()
        self._num_pushes += 1
        return report

    def _stamp(self, version: int) -> WeightStamp:
        return WeightStamp(version, self._learner_id)

    def _wants_checksum(self) -> bool:
        every = self._checksum_every
        return not self._compared or (every > 0 and self._num_pushes % every == 0)
