"""The way to one rollout server: its client, and the learner's end of its weight group."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch

from coordexp.background import in_background, wait_for_all
from coordexp.engine.client import ServerClient
from coordexp.errors import RolloutError
from coordexp.weight_sync.buckets import describe, piece_bytes, pieces
from coordexp.weight_sync.group import Communicator, GroupAddress, join, wait_until_free
from coordexp.weight_sync.stamp import WeightStamp

logger = logging.getLogger(__name__)
Named = list[tuple[str, torch.Tensor]]
Left = Callable[[], float]
PUSHES = "weight-push"  # the name of every thread of a push
CAUSE_S = 5.0  # how long a failed broadcast waits for the server's own account of it


class ServerConnection:
    """The way to one server: its client and this side of its weight group."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._group: Communicator | None = None
        self._rank = -1
        self.dtype: torch.dtype | None = None
        self.base_overwritten = False
        self.verifiable = False
        self._pushed: WeightStamp | None = None

    def __str__(self) -> str:
        return str(self._client)

    def open(self) -> None:
        """Meet the server's workers, unless that happened before; at most the client's ``timeout_s``. A group of an
        earlier learner is torn down there.

        Raises:
            RolloutError: also where another learner has pushed since this one did.
        """
        status = self._client.status()
        workers = [] if status is None else status["workers"]
        self.verifiable = bool(workers)
        if not workers and self._group is None:
            logger.warning(
                "%s has no /status/: names, versions and checksums of pushes cannot be checked there; start swift "
                "rollout with CoordExp's plugin",
                self,
            )
        for worker in workers:
            self._refuse_shared(worker["learner_id"])
            self.dtype = getattr(torch, worker["dtype"])
        self.base_overwritten = any(worker["base_overwritten"] for worker in workers)
        if self._group is not None and all(worker["communicator_open"] for worker in workers):
            return
        self.close(tell=False)
        self._group = self._join(_device_for(workers), self._client.timeout_s)

    def _refuse_shared(self, pushed_last: str | None) -> None:
        """None stands for a server that was started anew. A learner that starts takes over whatever it finds."""
        if self._pushed is not None and pushed_last not in (None, self._pushed.learner_id):
            raise RolloutError(
                f"{self}: learner {pushed_last} has pushed its weights since this one ({self._pushed}) did; give each "
                "learner its own servers, and resume one of them from its last checkpoint"
            )

    def _join(self, device: torch.device, timeout_s: float) -> Communicator:
        world_size = self._client.world_size() + 1
        self._rank = world_size - 1
        token = secrets.token_hex(16)
        address = GroupAddress(self._client.host, self._client.group_port, self._rank, world_size, timeout_s, token)
        self._client.close_communicator(timeout_s=timeout_s)
        # Otherwise this side could meet the members of the old group, whose store still holds their keys.
        wait_until_free(address, timeout_s)
        told = in_background(lambda: self._client.init_communicator(world_size, 0, timeout_s, token), PUSHES)
        joined = in_background(lambda: join(address, device), PUSHES)
        wait_for_all([told, joined])
        return joined.result()

    def send(self, bucket: Named, left: Left) -> None:
        """Send one bucket. ``left()``: seconds that are left of the push; it raises when there are none."""
        payload = [info.payload() for info in describe(bucket)]
        self._announce_and_send(lambda: self._client.update_flattened_params(payload, left()), bucket, left)

    def send_adapter(self, config: Any, tensors: Named, left: Left) -> None:
        """Announce an adapter and send its tensors, which lie in one bucket."""
        payload = [info.payload() for info in describe(tensors)]
        self._announce_and_send(lambda: self._client.update_adapter(config, payload, left()), tensors, left)

    def _announce_and_send(self, announce: Callable[[], None], tensors: Named, left: Left) -> None:
        group = self._group
        if group is None:
            raise RolloutError(f"{self}: the weight group is closed")
        told = in_background(announce, PUSHES)

        def give_up() -> None:
            left()
            if told.done():
                told.result()

        try:
            sent = [
                piece_bytes([tensors[index][1].to(group.device) for index in piece])
                for piece in pieces(describe(tensors))
            ]
            group.broadcast(sent, self._rank, give_up=give_up)
        except RolloutError as error:
            wait([told], timeout=CAUSE_S)
            if told.done() and (cause := told.exception()) is not None:
                raise cause from error
            raise
        told.result()

    def commit(self, stamp: WeightStamp, expected_checksum: str | None, left_s: float) -> None:
        """End the push: the server reports ``stamp`` from every worker, or it has not got the weights.

        Raises:
            RolloutError: a worker reports another version, or nothing where reports are due.
        """
        reports = self._client.commit_weights(stamp, expected_checksum is not None, left_s)
        if self.verifiable and (not isinstance(reports, list) or len(reports) != self._client.world_size()):
            raise RolloutError(
                f"{self}: the push was to end with a report of each of its {self._client.world_size()} workers, and "
                f"ended with {str(reports)[:200]}: nobody can tell which weights it has. Restart the server"
            )
        if reports is None:
            self._client.reset_caches(timeout_s=left_s)
            return
        for number, report in enumerate(reports):
            where = f"{self}, worker {number}"
            if report is None:
                raise RolloutError(f"{where}: the push failed there ({self._failure(number)})")
            held = WeightStamp(report["weight_version"], report["learner_id"])
            if held != stamp or report["failure"] is not None:
                raise RolloutError(
                    f"{where}: it holds {held} after {stamp} was pushed "
                    f"({report['failure'] or 'no error was reported'})"
                )
            if expected_checksum is not None and report["checksum"] != expected_checksum:
                raise RolloutError(
                    f"{where}: the checksum of its weights is {report['checksum']}, the learner's "
                    f"{expected_checksum}; its answers would not be the learner's"
                )
        self._pushed = stamp

    def _failure(self, number: int) -> str:
        status = self._client.status(timeout_s=CAUSE_S)
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
                self._client.close_communicator(timeout_s=CAUSE_S)
            except RolloutError as error:
                logger.info("%s: not told that the learner leaves (%s)", self, error)


def _device_for(workers: Sequence[dict[str, Any]]) -> torch.device:
    on_gpu = any(worker["device"].startswith("cuda") for worker in workers) if workers else torch.cuda.is_available()
    if not on_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RolloutError("the server's weights are on GPUs and this learner has none, so no group can hold both")
    return torch.device("cuda", torch.cuda.current_device())
