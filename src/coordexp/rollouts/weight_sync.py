"""The learner's side of weight pushes: one protocol for ``coordexp serve`` and ``swift rollout`` with our plugin.

A push streams the weights once, in buckets, to all servers at the same time: each server is told over HTTP what comes,
the bytes travel in its weight group. It counts only when every worker of every server reports the new version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from coordexp.errors import CoordExpError, RolloutError
from coordexp.rollouts.backend import AdapterWeights, WeightSource
from coordexp.rollouts.engine import checksum
from coordexp.rollouts.engine.buckets import describe, in_buckets, piece_bytes, pieces
from coordexp.rollouts.engine.communicator import Communicator, GroupAddress, join, wait_until_free
from coordexp.rollouts.server_client import ServerClient

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Named = list[tuple[str, torch.Tensor]]
_CAUSE_S = 5.0  # how long a failed broadcast waits for the server's own account of it
_ADAPTER_ERRORS = (CoordExpError, RuntimeError, ValueError, TypeError, KeyError, OSError)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one push did. ``fallback``: why it was full although adapters were asked for, in the push that decided so.
    ``checksum``: of the learner's weights, where it was compared with every worker's."""

    version: int
    mode: Literal["full", "adapter"]
    bytes: int
    seconds: float
    num_tensors: int
    checksum: str | None = None
    fallback: str | None = None


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
            bucket_mb: size of buckets, in 2^20 bytes. timeout_s: deadline of a whole push.
            checksum_every: compare checksums on every N-th push; 0 on the first full one only.
        """
        self._lanes = [_Lane(client, timeout_s) for client in clients]
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
        for lane in self._lanes:
            lane.close(tell=True)

    def _push_full(self, version: int, fallback: str | None) -> SyncReport:
        wants_checksum = self._wants_checksum()
        push = _Push(self._lanes, version, "full", time.monotonic() + self._timeout_s, wants_checksum, fallback)
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
        push = _Push(self._lanes, version, "adapter", time.monotonic() + self._timeout_s, False, None)
        with push:
            push.refuse_overwritten()
            for bucket in in_buckets(adapter.changed, self._bucket_bytes):
                push.send(bucket)
            push.send_adapter(adapter)
            report = push.commit()
        self._num_pushes += 1
        return report

    def _wants_checksum(self) -> bool:
        every = self._checksum_every
        return not self._compared or (every > 0 and self._num_pushes % every == 0)


class _Push:
    """One push to all servers. Leaving it by an error tears their groups down, so that the next one starts afresh."""

    def __init__(
        self,
        lanes: Sequence[_Lane],
        version: int,
        mode: Literal["full", "adapter"],
        deadline: float,
        wants_checksum: bool,
        fallback: str | None,
    ) -> None:
        self._lanes = lanes
        self._version = version
        self._mode: Literal["full", "adapter"] = mode
        self._deadline = deadline
        self._wants_checksum = wants_checksum
        self._fallback = fallback
        self._started = time.monotonic()
        self._hashes: dict[str, int] = {}
        self._bytes = 0
        self._num_tensors = 0
        self._sending: list[Future[None]] = []

    def __enter__(self) -> _Push:
        try:
            self._on_all(lambda lane: lane.open(self._left()))
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self._tear_down()

    def refuse_overwritten(self) -> None:
        """An adapter belongs on the checkpoint's own weights."""
        for lane in self._lanes:
            if lane.base_overwritten:
                raise RolloutError(
                    f"{lane}: it holds full weights of an earlier push, where an adapter would count twice; restart it"
                )

    def send(self, bucket: Named) -> None:
        """Send a bucket to every server, while the caller prepares the next."""
        bucket = [(name, self._converted(tensor)) for name, tensor in bucket]
        if self._wants_checksum:
            self._hashes |= {name: checksum.tensor_hash(tensor) for name, tensor in bucket}
        self._count(bucket)
        self._finish_sending()
        left = self._left()
        self._sending = [_in_background(lambda lane=lane: lane.send(bucket, left)) for lane in self._lanes]

    def send_adapter(self, adapter: AdapterWeights) -> None:
        """Send an adapter to every server."""
        tensors = list(adapter.tensors)
        self._count(tensors)
        self._finish_sending()
        left = self._left()
        self._sending = [
            _in_background(lambda lane=lane: lane.send_adapter(adapter.config, tensors, left)) for lane in self._lanes
        ]

    def commit(self) -> SyncReport:
        """Let every server take the weights over, and check what its workers say."""
        self._finish_sending()
        expected = checksum.combined(self._hashes) if self._wants_checksum else None
        self._on_all(lambda lane: lane.commit(self._version, expected, self._left()))
        return SyncReport(
            version=self._version,
            mode=self._mode,
            bytes=self._bytes,
            seconds=time.monotonic() - self._started,
            num_tensors=self._num_tensors,
            checksum=expected if any(lane.verifiable for lane in self._lanes) else None,
            fallback=self._fallback,
        )

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the engines' number type: what they would make of it anyway, at fewer bytes, and comparable."""
        tensor = tensor.detach()
        dtypes = {lane.dtype for lane in self._lanes if lane.dtype is not None}
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
        _all(sending)

    def _on_all(self, act: Callable[[_Lane], None]) -> None:
        _all([_in_background(lambda lane=lane: act(lane)) for lane in self._lanes])

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RolloutError(
                f"version {self._version}: the push took longer than rollout_matching.vllm.sync.timeout_s; raise it, "
                "or look into the servers' logs"
            )
        return left

    def _tear_down(self) -> None:
        for lane in self._lanes:
            lane.close(tell=False)


class _Lane:
    """The way to one server: its client and this side of its weight group."""

    def __init__(self, client: ServerClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = min(timeout_s, client.timeout_s)
        self._group: Communicator | None = None
        self._rank = -1
        self.dtype: torch.dtype | None = None
        self.base_overwritten = False
        self.verifiable = False

    def __str__(self) -> str:
        return str(self._client)

    def open(self, left_s: float) -> None:
        """Meet the server's workers, unless that happened before. A group of an earlier learner is torn down there."""
        status = self._client.status(timeout_s=left_s)
        workers = [] if status is None else status["workers"]
        self.verifiable = bool(workers)
        if not workers and self._group is None:
            logger.warning(
                "%s has no /status/: names, versions and checksums of pushes cannot be checked there; start swift "
                "rollout with CoordExp's plugin",
                self,
            )
        for worker in workers:
            self.dtype = getattr(torch, worker["dtype"])
        self.base_overwritten = any(worker["base_overwritten"] for worker in workers)
        if self._group is not None and all(worker["communicator_open"] for worker in workers):
            return
        self.close(tell=False)
        self._group = self._join(_device_for(workers), min(left_s, self._timeout_s))

    def _join(self, device: torch.device, timeout_s: float) -> Communicator:
        world_size = self._client.world_size() + 1
        self._rank = world_size - 1
        address = GroupAddress(self._client.host, self._client.group_port, self._rank, world_size, self._timeout_s)
        self._client.close_communicator(timeout_s=timeout_s)
        # Otherwise this side could meet the members of the old group, whose store still holds their keys.
        wait_until_free(address, timeout_s)
        told = _in_background(lambda: self._client.init_communicator(world_size, 0, timeout_s))
        joined = _in_background(lambda: join(address, device))
        _all([told, joined])
        return joined.result()

    def send(self, bucket: Named, left_s: float) -> None:
        infos = describe(bucket)
        payload = [info.payload() for info in infos]
        self._announce_and_send(lambda: self._client.update_flattened_params(payload, left_s), bucket)

    def send_adapter(self, config: Any, tensors: Named, left_s: float) -> None:
        payload = [info.payload() for info in describe(tensors)]
        self._announce_and_send(lambda: self._client.update_adapter(config, payload, left_s), tensors)

    def _announce_and_send(self, announce: Callable[[], None], tensors: Named) -> None:
        group = self._group
        if group is None:
            raise RolloutError(f"{self}: the weight group is closed")
        told = _in_background(announce)

        def give_up() -> None:
            if told.done():
                told.result()

        try:
            for piece in pieces(describe(tensors)):
                on_device = [(name, tensor.to(group.device)) for name, tensor in (tensors[index] for index in piece)]
                group.broadcast(piece_bytes(on_device, range(len(on_device))), self._rank, give_up)
        except RolloutError as error:
            wait([told], timeout=_CAUSE_S)
            if told.done() and (cause := told.exception()) is not None:
                raise cause from error
            raise
        told.result()

    def commit(self, version: int, expected_checksum: str | None, left_s: float) -> None:
        reports = self._client.commit_weights(version, expected_checksum is not None, left_s)
        if reports is None:
            self._client.reset_caches(timeout_s=left_s)
            return
        for number, report in enumerate(reports):
            where = f"{self}, worker {number}"
            if report is None:
                raise RolloutError(f"{where}: the push failed there ({self._failure(number)})")
            if report["weight_version"] != version or report["failure"] is not None:
                raise RolloutError(
                    f"{where}: it holds version {report['weight_version']} after version {version} was pushed "
                    f"({report['failure'] or 'no error was reported'})"
                )
            if expected_checksum is not None and report["checksum"] != expected_checksum:
                raise RolloutError(
                    f"{where}: the checksum of its weights is {report['checksum']}, the learner's "
                    f"{expected_checksum}; its answers would not be the learner's"
                )

    def _failure(self, number: int) -> str:
        status = self._client.status(timeout_s=_CAUSE_S)
        workers = [] if status is None else status["workers"]
        return str(workers[number]["failure"]) if number < len(workers) else "look into the server's log"

    def close(self, *, tell: bool) -> None:
        """Leave the group; ``tell`` the server too, whose workers would otherwise notice at the next push."""
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        if tell:
            try:
                self._client.close_communicator(timeout_s=_CAUSE_S)
            except RolloutError as error:
                logger.info("%s: not told that the learner leaves (%s)", self, error)


def _device_for(workers: Sequence[dict[str, Any]]) -> torch.device:
    on_gpu = any(worker["device"].startswith("cuda") for worker in workers) if workers else torch.cuda.is_available()
    if not on_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RolloutError("the server's weights are on GPUs and this learner has none, so no group can hold both")
    return torch.device("cuda", torch.cuda.current_device())


def _in_background(act: Callable[[], Result]) -> Future[Result]:
    """Run ``act`` in a thread of its own, which a hung call may outlive without holding up the process's end."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # the future's owner gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="weight-push").start()
    return future


def _all(futures: Sequence[Future[Any]]) -> None:
    """Wait for all; the first error ends the waiting."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
