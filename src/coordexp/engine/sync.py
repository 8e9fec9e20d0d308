"""The learner's side of weight pushes: one protocol for ``coordexp serve`` and ``swift rollout`` with our plugin.

A push streams the weights once, in buckets, to all servers at the same time: each server is told over HTTP what comes,
the bytes travel in its weight group. It counts only when every worker of every server reports the new version.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from coordexp.background import in_background, wait_for_all
from coordexp.config.rollout import SyncConfig
from coordexp.engine.client import ServerClient
from coordexp.engine.connection import PUSHES, Named, ServerConnection
from coordexp.errors import CoordExpError, RolloutError
from coordexp.rollouts.backend import AdapterWeights, WeightSource
from coordexp.weight_sync import checksum
from coordexp.weight_sync.buckets import in_buckets
from coordexp.weight_sync.policy import PushPolicy
from coordexp.weight_sync.stamp import WeightStamp

_ADAPTER_ERRORS = (CoordExpError, RuntimeError, ValueError, TypeError, KeyError, OSError)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one push did. ``fallback``: why it was full although adapters were asked for, in the push that decided so.
    ``checksum``: of the learner's weights, where it was compared with every worker's."""

    stamp: WeightStamp
    mode: Literal["full", "adapter"]
    bytes: int
    seconds: float
    num_tensors: int
    checksum: str | None = None
    fallback: str | None = None


class WeightPush:
    """One push to all servers. Leaving it by an error tears their groups down, so that the next one starts afresh."""

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        stamp: WeightStamp,
        mode: Literal["full", "adapter"],
        timeout_s: float,
        wants_checksum: bool,
        fallback: str | None,
    ) -> None:
        self._connections = connections
        self._stamp = stamp
        self._mode: Literal["full", "adapter"] = mode
        self._timeout_s = timeout_s
        self._deadline = float("inf")  # set when the servers are met, which has a time of its own
        self._wants_checksum = wants_checksum
        self._fallback = fallback
        self._started = time.monotonic()
        self._hashes: dict[str, int] = {}
        self._bytes = 0
        self._num_tensors = 0
        self._sending: list[Future[None]] = []

    def __enter__(self) -> WeightPush:
        try:
            wait_for_all(self._on_each(lambda connection: connection.open()))
            self._deadline = time.monotonic() + self._timeout_s
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._tear_down()

    def refuse_overwritten(self) -> None:
        """An adapter belongs on the checkpoint's own weights."""
        for connection in self._connections:
            if connection.base_overwritten:
                raise RolloutError(
                    f"{connection}: it holds full weights of an earlier push, where an adapter would count twice; "
                    "restart it"
                )

    def send(self, bucket: Named) -> None:
        """Send a bucket to every server, while the caller prepares the next."""
        bucket = [(name, self._converted(tensor)) for name, tensor in bucket]
        if self._wants_checksum:
            self._hashes |= {name: checksum.tensor_hash(tensor) for name, tensor in bucket}
        self._count(bucket)
        self._finish_sending()
        self._sending = self._on_each(lambda connection: connection.send(bucket, self._left))

    def send_adapter(self, adapter: AdapterWeights) -> None:
        """Send an adapter to every server."""
        tensors = list(adapter.tensors)
        self._count(tensors)
        self._finish_sending()
        self._sending = self._on_each(lambda connection: connection.send_adapter(adapter.config, tensors, self._left))

    def commit(self) -> SyncReport:
        """Let every server take the weights over, and check what its workers say."""
        self._finish_sending()
        expected = checksum.combined(self._hashes) if self._wants_checksum else None
        wait_for_all(self._on_each(lambda connection: connection.commit(self._stamp, expected, self._left())))
        return SyncReport(
            stamp=self._stamp,
            mode=self._mode,
            bytes=self._bytes,
            seconds=time.monotonic() - self._started,
            num_tensors=self._num_tensors,
            checksum=expected if any(connection.verifiable for connection in self._connections) else None,
            fallback=self._fallback,
        )

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the engines' number type: what they would make of it anyway, at fewer bytes, and comparable."""
        tensor = tensor.detach()
        dtypes = {connection.dtype for connection in self._connections if connection.dtype is not None}
        if len(dtypes) > 1:
            raise RolloutError(
                f"the servers hold weights of different types ({dtypes}); use one rollout_matching.vllm.dtype"
            )
        return tensor.to(dtypes.pop()) if dtypes and tensor.is_floating_point() else tensor

    def _count(self, tensors: Named) -> None:
        self._num_tensors += len(tensors)
        self._bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)

    def _finish_sending(self) -> None:
        sending, self._sending = self._sending, []
        wait_for_all(sending)

    def _on_each(self, act: Callable[[ServerConnection], None]) -> list[Future[None]]:
        return [in_background(partial(act, connection), PUSHES) for connection in self._connections]

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RolloutError(
                f"version {self._stamp.version}: the push took longer than rollout_matching.vllm.sync.timeout_s "
                f"({self._timeout_s:g} s); raise it, or look into the servers' logs"
            )
        return left

    def _tear_down(self) -> None:
        for connection in self._connections:
            connection.close(tell=False)


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
