"""The learner's side of weight pushes: one protocol for ``coordexp serve`` and ``swift rollout`` with our plugin.

A push streams the weights once, in buckets, to all servers at the same time: each server is told over HTTP what comes,
the bytes travel in its weight group. It counts only when every worker of every server reports the new version.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Literal

from coordexp.config.vllm import SyncConfig
from coordexp.errors import CoordExpError, RolloutError
from coordexp.rollouts.backend import WeightSource
from coordexp.servers.client import ServerClient
from coordexp.servers.connection import ServerConnection
from coordexp.servers.push import SyncReport, WeightPush
from coordexp.weight_sync.buckets import in_buckets
from coordexp.weight_sync.policy import PushPolicy
from coordexp.weight_sync.stamp import WeightStamp

_ADAPTER_ERRORS = (CoordExpError, RuntimeError, ValueError, TypeError, KeyError, OSError)


class WeightSync:
    """Pushes a learner's weights to rollout servers. Not for several threads at once."""

    def __init__(self, clients: Sequence[ServerClient], source: WeightSource, config: SyncConfig) -> None:
        """
        Args:
            clients: the servers; none on ranks that only take part in gathering ``source``. Each one's own
                ``timeout_s`` is the deadline for meeting it.
            config: the resolved section ``rollout_matching.vllm.sync``.
        """
        self._learner_id = secrets.token_hex(8)  # of this process alone; nothing that is computed depends on it
        self._connections = [ServerConnection(client) for client in clients]
        self._source = source
        self._policy = PushPolicy(config)
        self._bucket_bytes = config.bucket_mb << 20
        self._timeout_s = config.timeout_s

    @property
    def mode(self) -> Literal["full", "adapter"]:
        """How the next push will be done."""
        return self._policy.mode

    def push(self, version: int) -> SyncReport:
        """Make the learner's current weights, as ``version``, those of every server.

        Raises:
            RolloutError: any server has not got them; its answers are refused until a push succeeds.
        """
        fallback = None
        if self._policy.mode == "adapter":
            try:
                return self._push_adapter(version)
            except _ADAPTER_ERRORS as error:
                self._policy.fall_back(version, error)
                fallback = f"{type(error).__name__}: {error}"
        return self._push_full(version, fallback)

    def close(self) -> None:
        """Leave every weight group; safe to call twice."""
        for connection in self._connections:
            connection.close(tell=True)

    def _push_full(self, version: int, fallback: str | None) -> SyncReport:
        compares = self._policy.compares_checksum()
        push = WeightPush(self._connections, self._stamp(version), "full", self._timeout_s, compares, fallback)
        with push, self._source.full() as weights:
            for bucket in in_buckets(weights, self._bucket_bytes):
                push.send(bucket)
            report = push.commit()
        self._policy.done(compared=compares)
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
        self._policy.done()
        return report

    def _stamp(self, version: int) -> WeightStamp:
        return WeightStamp(version, self._learner_id)
