"""The trainer's side of weight pushes: the base class, and pushes to rollout servers. (Pushes into an engine of the
trainer's own process are in ``colocated``.) The engines' side is ``WeightReceiver``."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from coordexp import distributed
from coordexp.background import in_background, wait_for_all
from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.checkpoints.folder import is_adapter_folder
from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.wire.arguments import FINGERPRINT, NAME_CHARACTERS
from coordexp.errors import CoordExpError, RolloutError
from coordexp.printable import printable
from coordexp.rollouts.backend import AdapterWeights, WeightSource
from coordexp.weight_sync import WeightVersion
from coordexp.weight_sync.buckets import (
    combined,
    computed_by_now,
    describe,
    in_buckets,
    piece_bytes,
    pieces,
    tensor_hashes,
)
from coordexp.weight_sync.group import Communicator, GroupAddress, join, wait_until_free

logger = logging.getLogger("coordexp")
Named = list[tuple[str, torch.Tensor]]
Mode = Literal["full", "adapter"]
THREAD = "weight-push"
CAUSE_S = 5.0  # how long a failed broadcast waits for the server's error message
# Raised by engines, peft and vLLM if they cannot use an adapter.
_ADAPTER_ERRORS = (CoordExpError, RuntimeError, ValueError, TypeError, KeyError, OSError)


@dataclass(frozen=True, slots=True)
class PushReport:
    """One push. ``fallback``: why it was full instead of an adapter, in the push that fell back.
    ``checksum``: of the trainer's weights, if it was compared with what every engine holds."""

    weights: WeightVersion
    mode: Mode
    bytes: int
    seconds: float
    checksum: str | None = None
    fallback: str | None = None


class WeightPusher(ABC):
    """Pushes the trainer's weights to its engines. :meth:`push` is collective: every rank calls it, and an error on one
    rank is raised on all. Not thread-safe."""

    converts = True  # whether to convert weights to the engines' dtype before sending; for checksums they always are

    def __init__(self, source: WeightSource, config: SyncConfig) -> None:
        self.mode: Mode = config.settled_mode
        self.fallbacks: list[str] = []  # why adapters are no longer pushed: empty, or one reason
        self.trainer_id: str | None = None
        self.has_engines = True  # False on ranks that only take part in gathering weights
        self._source = source
        self._config = config
        self._num_pushes = 0
        self.compared = False  # whether a full push has been compared yet

    def push(self, version: int) -> PushReport:
        """Push the trainer's current weights to every engine, as ``version``. After a RolloutError, engines refuse to
        answer until a push succeeds."""
        weights, fallback = WeightVersion(version, self.trainer_id), None
        if self.mode == "adapter":
            try:
                with distributed.raise_on_all_ranks("the adapter push"):
                    return self._push(weights)
            except _ADAPTER_ERRORS as error:
                fallback = f"{type(error).__name__}: {error}"
                if not self._config.fallback_to_full:
                    raise RolloutError(
                        f"version {version}: the adapter could not be pushed ({fallback}). Write "
                        "rollout_matching.vllm.sync.mode: full, or sync.fallback_to_full: true"
                    ) from error
                logger.warning(
                    "version %d: the adapter could not be pushed (%s); pushes are full from here on", version, fallback
                )
                self.fallbacks.append(f"version {version}: {fallback}")
                self.mode = "full"
        with distributed.raise_on_all_ranks("the weight push"):
            return self._push(weights, fallback)

    @abstractmethod
    def _begin(self, base: Path | None) -> torch.dtype | None:
        """Connect to every engine. Returns the dtype of their weights, None if unknown. ``base``: the folder of the
        model on which the adapter that follows is trained, None for full weights. Raises RolloutError if an engine has
        other weights than that folder's."""

    @abstractmethod
    def _send(self, tensors: Named, peft_config: Mapping[str, Any] | None = None) -> None:
        """Send a bucket of weights, or an adapter with its ``peft_config``, to every engine. May return before all has
        arrived; the tensors must not change until the commit."""

    @abstractmethod
    def _commit(self, weights: WeightVersion, expected: str | None) -> bool:
        """Let every engine use the new weights. Returns whether the ``expected`` checksum was compared."""

    @abstractmethod
    def _abort(self) -> None:
        """Abort the push; the next one starts over."""

    def _push(self, weights: WeightVersion, fallback: str | None = None) -> PushReport:
        started = time.monotonic()
        adapter = pushable(self._source) if self.mode == "adapter" else None
        # Of full pushes, the first is compared, and then every checksum_every-th push.
        every = self._config.checksum_every
        due = not self.compared or (every > 0 and self._num_pushes % every == 0)
        compares = adapter is None and self.has_engines and due
        hashes: dict[str, int] = {}
        num_bytes = 0
        with self._whole_source() if adapter is None else nullcontext(adapter.changed) as named, self._aborting():
            dtype = self._begin(None if adapter is None else adapter.base)
            # A rank without engines sends nothing; _whole_source takes its part in gathering sharded weights.
            for bucket in in_buckets(named, self._config.bucket_mb << 20) if self.has_engines else ():
                if self.converts or compares:
                    bucket = [(name, _converted(tensor, dtype)) for name, tensor in bucket]
                if compares:
                    hashes |= tensor_hashes(bucket)
                num_bytes += _num_bytes(bucket)
                self._send(bucket)
            if adapter is not None:
                num_bytes += _num_bytes(adapter.tensors)
                self._send(list(adapter.tensors), adapter.config)
            expected = combined(hashes) if compares else None
            verified = self._commit(weights, expected)
        self._num_pushes += 1
        self.compared |= compares
        seconds, checksum = time.monotonic() - started, expected if verified else None
        return PushReport(weights, self.mode, num_bytes, seconds, checksum, fallback)

    @contextmanager
    def _whole_source(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        with self._source.full() as named:
            try:
                yield named
            finally:
                if self._source.collective:  # gathering is collective: read the rest after a failure too
                    for _ in named:
                        pass

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abort()
            raise


def pushable(source: WeightSource) -> AdapterWeights:
    """The adapter of ``source``. Raises RolloutError if it has none, or one that no engine would apply whole."""
    adapter = source.adapter()
    if adapter is None:
        raise RolloutError(
            "rollout_matching.vllm.sync.mode is adapter, but the trainer trains no adapter (tuner.train_type is "
            "full); write sync.mode: full"
        )
    if adapter.outside_llm:
        raise RolloutError(
            "the adapter reaches the vision tower or the aligner, where vLLM would ignore it; freeze them "
            "(tuner.freeze_vit, tuner.freeze_aligner)"
        )
    if is_adapter_folder(adapter.base):
        raise RolloutError(
            "model.model has adapters of its own, which the engine would lack: it loads their base model; merge "
            "them (coordexp model merge), and train from the merged checkpoint"
        )
    return adapter


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    # Fewer bytes to send, and checksums are comparable with the engine's.
    tensor = tensor.detach()
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _name_of(trainer_id: str) -> str:
    # This process, as a server names it to other trainers.
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    shown = textwrap.shorten(printable(command), 240, placeholder=" …")
    return f"trainer {trainer_id} (process {os.getpid()} on {socket.gethostname()}: {shown})"[:NAME_CHARACTERS]


def _num_bytes(named: Sequence[tuple[str, torch.Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named)


class ServerPusher(WeightPusher):
    """Pushes to ``coordexp serve`` and ``swift rollout``. A bucket is announced over HTTP, and its bytes go through a
    weight group, to all servers at the same time, while the next bucket is prepared."""

    def __init__(self, clients: Sequence[ServerClient], source: WeightSource, config: SyncConfig) -> None:
        """``clients``: the servers; none on ranks that only take part in gathering ``source``."""
        super().__init__(source, config)
        self.trainer_id = secrets.token_hex(8)  # unique to this process; no computation depends on it
        self.has_engines = bool(clients)
        self.links = [ServerLink(client, _name_of(self.trainer_id)) for client in clients]
        self._deadline = float("inf")
        self._sending: list[Future[None]] = []

    def close(self) -> None:
        """Leave the servers; safe to call twice."""
        for link in self.links:
            link.close(notify=True)

    def _begin(self, base: Path | None) -> torch.dtype | None:
        wait_for_all(self._on_each(lambda link: link.open()))
        own = fingerprint(base) if base is not None and self.links else None  # the first time, it may read all weights
        self._deadline = time.monotonic() + self._config.timeout_s  # connecting has its own timeout
        for link in self.links if base is not None else ():  # an adapter needs the checkpoint's own weights as its base
            if link.base_overwritten:
                raise RolloutError(
                    f"{link}: an earlier push of full weights already contains the adapter, so it would be applied "
                    "twice; restart the server"
                )
            if link.base != own:
                raise RolloutError(
                    f"{link}: its model has the fingerprint {link.base}, and {base}, on which this run trains its "
                    f"adapter, has {own}; start the server from the same checkpoint with vllm.enable_lora: true"
                )
        dtypes = {link.dtype for link in self.links if link.dtype is not None}
        if len(dtypes) > 1:
            raise RolloutError(
                f"the servers hold weights of different types ({dtypes}); use one rollout_matching.vllm.dtype"
            )
        return dtypes.pop() if dtypes else None

    def _send(self, tensors: Named, peft_config: Mapping[str, Any] | None = None) -> None:
        self._finish_sending()
        computed = computed_by_now(tensors[0][1].device)
        self._sending = self._on_each(lambda link: link.send(tensors, self._seconds_left, peft_config, computed))

    def _commit(self, weights: WeightVersion, expected: str | None) -> bool:
        self._finish_sending()
        wait_for_all(self._on_each(lambda link: link.commit(weights, expected, self._seconds_left())))
        return any(link.verifiable for link in self.links)

    def _abort(self) -> None:
        self._sending = []
        for link in self.links:
            link.close(notify=False)

    def _finish_sending(self) -> None:
        sending, self._sending = self._sending, []
        wait_for_all(sending)

    def _on_each(self, act: Callable[[ServerLink], None]) -> list[Future[None]]:
        return [in_background(partial(act, link), THREAD) for link in self.links]

    def _seconds_left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise RolloutError(
                f"the push took longer than rollout_matching.vllm.sync.timeout_s ({self._config.timeout_s:g} s); raise "
                "it, or look into the servers' logs"
            )
        return left


class ServerLink:
    """The pusher's connection to one server: client, weight group, and the workers' reported state."""

    def __init__(self, client: ServerClient, trainer: str) -> None:
        """``trainer``: this one, as the server's messages name it to others."""
        self._client = client
        self._trainer = trainer
        self._group: Communicator | None = None
        self._rank = -1
        self._pushed: WeightVersion | None = None
        self.dtype: torch.dtype | None = None
        self.base_overwritten = False
        self.base: str | None = None  # the fingerprint of the model that it loaded, where it takes adapters
        self.verifiable = False  # whether its workers report what they hold

    def __str__(self) -> str:
        return str(self._client)

    def open(self) -> None:
        """Join a weight group with the server's workers, if there is none yet; they leave the group of an earlier
        trainer. Raises RolloutError also if another trainer is connected, or has pushed since this one did."""
        status = self._client.status()
        workers = status.get("workers", [])
        self.base = status.get(FINGERPRINT)
        self.verifiable = bool(workers)
        if not workers and self._group is None:
            logger.warning(
                "%s has no /status/: names, versions and checksums of pushes cannot be checked there; start swift "
                "rollout with CoordExp's plugin",
                self,
            )
        for worker in workers:
            # None: a server that was restarted. A trainer that starts takes over a server without a connected one.
            if self._pushed is not None and worker["trainer_id"] not in (None, self._pushed.trainer_id):
                raise RolloutError(
                    f"{self}: trainer {worker['trainer_id']} has pushed its weights since this one ({self._pushed}) "
                    "did; give each trainer its own servers, and resume one of them from its last checkpoint"
                )
            self.dtype = getattr(torch, worker["dtype"])
        self.base_overwritten = any(worker["base_overwritten"] for worker in workers)
        if self._group is None or not all(worker["communicator_open"] for worker in workers):
            self.close(notify=False)
            # check_servers has refused servers on GPUs where the trainer has none.
            on_gpu = any(worker["device"].startswith("cuda") for worker in workers)
            on_gpu |= not workers and torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
            client, token = self._client, secrets.token_hex(16)
            self._rank = rank = client.world_size()  # the last one
            address = GroupAddress(client.host, client.group_port, rank, rank + 1, client.timeout_s, token)
            client.close_communicator(client.timeout_s, self._trainer)
            # Until the old group's port is free, this rank could join the old group's store, which has stale keys.
            wait_until_free(address, client.timeout_s)
            announced = in_background(
                lambda: client.init_communicator(rank + 1, 0, client.timeout_s, token, self._trainer), THREAD
            )
            joined = in_background(lambda: join(address, device), THREAD)
            wait_for_all([announced, joined])
            self._group = joined.result()

    def send(
        self,
        tensors: Named,
        seconds_left: Callable[[], float],
        peft_config: Mapping[str, Any] | None = None,
        computed: torch.cuda.Event | None = None,
    ) -> None:
        """Send a bucket of weights, or an adapter if ``peft_config`` is given, once the GPU has reached the event
        ``computed``."""
        group = self._group
        if group is None:
            raise RolloutError(f"{self}: the weight group is closed")
        payload = [asdict(info) for info in describe(tensors)]
        # The server replies when all bytes have arrived, so announce the bucket in a thread and broadcast meanwhile. If
        # either side fails, the other stops waiting.
        announced = in_background(
            lambda: self._client.update_flattened_params(payload, seconds_left(), peft_config), THREAD
        )

        def check() -> None:  # the broadcast polls it; an exception ends the broadcast
            seconds_left()
            if announced.done():
                announced.result()

        try:
            if computed is not None:
                torch.cuda.current_stream(group.device).wait_event(computed)
            sent = [
                piece_bytes([tensors[index][1].to(group.device) for index in piece])
                for piece in pieces(describe(tensors))
            ]
            group.broadcast(sent, self._rank, give_up=check)
        except RolloutError as error:
            # A server that refused the bucket breaks the broadcast too; its own message is more precise.
            wait([announced], timeout=CAUSE_S)
            if announced.done() and (cause := announced.exception()) is not None:
                raise cause from error
            raise
        announced.result()

    def commit(self, weights: WeightVersion, expected: str | None, timeout_s: float) -> None:
        """End the push. Raises RolloutError unless every worker reports ``weights`` and the ``expected`` checksum."""
        reports = self._client.commit_weights(weights, expected is not None, timeout_s)
        if self.verifiable and (reports is None or len(reports) != self._client.world_size()):
            raise RolloutError(
                f"{self}: expected a report of each of its {self._client.world_size()} workers after the push, got "
                f"{str(reports)[:200]}, so it is unknown which weights it has; restart the server"
            )
        if reports is None:
            self._client.reset_caches(timeout_s=timeout_s)
            return
        for number, report in enumerate(reports):
            where = f"{self}, worker {number}"
            held = WeightVersion(report["weight_version"], report["trainer_id"])
            if held != weights or report["failure"] is not None:
                raise RolloutError(
                    f"{where}: it has {held} after {weights} was pushed "
                    f"({report['failure'] or 'no error was reported'})"
                )
            check_checksum(where, report["checksum"], expected)
        self._pushed = weights

    def close(self, *, notify: bool) -> None:
        """Leave the group; ``notify`` the server too, or its workers leave at the next push."""
        group, self._group = self._group, None
        if group is None:
            return
        group.close()
        if notify:
            try:
                self._client.close_communicator(CAUSE_S, self._trainer)
            except RolloutError as error:
                logger.info("%s: could not be notified that the trainer leaves (%s)", self, error)


def check_checksum(where: str, held: str | None, expected: str | None) -> None:
    if expected is not None and held != expected:
        raise RolloutError(
            f"{where}: the checksum of its weights is {held}, the trainer's {expected}; its answers would not be the "
            "trainer's"
        )
