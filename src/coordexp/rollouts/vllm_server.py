"""Rollouts by servers: ``coordexp serve`` or ``swift rollout``, one or many, pushed to and asked over the network.

Requests of a whole optimizer step are dealt to servers, micro-step after micro-step, and sent as soon as the receiving
devices have room: at most ``decode_batch_size`` sequences on each, over all learner ranks. Under torchrun rank 0 alone
pushes weights, between barriers, and its outcome is everybody's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coordexp import distributed
from coordexp.config.rollout import RepeatTerminateConfig, RolloutMatchingConfig
from coordexp.coords import CoordVocab
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import (
    AdapterWeights,
    Answer,
    DecodingOptions,
    RolloutRound,
    Seeds,
    WeightSource,
)
from coordexp.rollouts.chunking import Call, chunk_size, plan_calls, server_slots
from coordexp.rollouts.engine.guard_activation import ACTIVATION_PATH, check_guard
from coordexp.rollouts.in_flight import in_flight
from coordexp.rollouts.server_client import ServerClient, api_key_from_environment
from coordexp.rollouts.server_payload import infer_payload, read_answer

if TYPE_CHECKING:
    from torch import Tensor

    from coordexp.rollouts.weight_sync import WeightSync

logger = logging.getLogger("coordexp")

WATCH_S = 30.0  # without any answer for so long, the servers that owe one are asked whether they live
SIGN_OF_LIFE_S = 5.0
RETRY_WAIT_S = 1.0


def make_clients(config: RolloutMatchingConfig) -> tuple[ServerClient, ...]:
    """One client per entry of ``servers[]``; nothing is asked yet."""
    server = config.vllm.server
    assert server is not None, "the schema requires servers for mode: server"
    key = api_key_from_environment(server.api_key_env)
    return tuple(
        ServerClient(
            entry.base_url,
            entry.group_port,
            timeout_s=server.timeout_s,
            infer_timeout_s=server.infer_timeout_s,
            api_key=key,
        )
        for entry in server.servers
    )


def check_servers(config: RolloutMatchingConfig, learner_world_size: int) -> None:
    """Wait until every server is up, and refuse what cannot work: before any model is loaded.

    Raises:
        RolloutError: a server does not answer within ``server.timeout_s``. ConfigError: too few devices for the ranks.
    """
    clients = make_clients(config)
    try:
        chunk_size(config.decode_batch_size, _world_sizes(clients), learner_world_size)
        for client in clients:
            _check_guard(client, config.repeat_terminate)
    finally:
        for client in clients:
            client.close()


def _world_sizes(clients: Sequence[ServerClient]) -> tuple[int, ...]:
    for client in clients:
        client.wait_until_healthy()
    return tuple(client.world_size() for client in clients)


def _check_guard(client: ServerClient, wanted: RepeatTerminateConfig) -> None:
    status = client.status()
    if status is not None:
        check_guard(status["workers"], wanted)
    elif wanted.enabled:
        raise RolloutError(
            f"{client.base_url}: rollout_matching.repeat_terminate is enabled, and this server has no /status/ to say "
            f"whether it guards its answers; it is activated by {ACTIVATION_PATH}"
        )


class ServerBackend:
    """vLLM servers as a rollout backend."""

    def __init__(
        self,
        clients: Sequence[ServerClient],
        weight_sync: WeightSync,
        weights: _Drained,
        config: RolloutMatchingConfig,
        vocab: CoordVocab,
        options: DecodingOptions,
        open_image: Callable[[Path], Any],
    ) -> None:
        server = config.vllm.server
        assert server is not None, "the schema requires servers for mode: server"
        self._clients = tuple(clients)
        self._sync = weight_sync
        self._weights = weights
        self._vocab = vocab
        self._options = options
        self._open_image = open_image
        self._images: Literal["path", "base64"] = server.images
        self._retries = server.retries
        self._timeout_s = server.timeout_s
        self._guarded = config.repeat_terminate.enabled
        self._decode_batch_size = config.decode_batch_size
        self._world_sizes = _world_sizes(self._clients)
        self._slots = server_slots(
            config.decode_batch_size, self._world_sizes, distributed.world_size(), distributed.rank()
        )
        self._version: int | None = None
        self._last_sync: Mapping[str, Any] = {}
        self._fallbacks: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._silent_since: dict[int, float] = {}
        # ms-swift says nothing while it decodes, not even that it is healthy: its silence has no meaning.
        self._heard_while_decoding = frozenset(
            index for index, client in enumerate(clients) if (client.status() or {}).get("server") == "coordexp serve"
        )
        self._metrics: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the metrics, which call threads count in

    @classmethod
    def connect(
        cls,
        config: RolloutMatchingConfig,
        vocab: CoordVocab,
        weights: WeightSource,
        options: DecodingOptions,
        open_image: Callable[[Path], Any],
    ) -> ServerBackend:
        """Find the servers; groups for weights are opened by the first push."""
        from coordexp.rollouts.weight_sync import WeightSync

        clients, drained = make_clients(config), _Drained(weights)
        sync = config.vllm.sync
        weight_sync = WeightSync(
            clients,
            drained,
            mode=sync.resolved(config.vllm.enable_lora),
            fallback_to_full=sync.fallback_to_full,
            bucket_mb=sync.bucket_mb,
            timeout_s=sync.timeout_s,
            checksum_every=sync.checksum_every,
        )
        return cls(clients, weight_sync, drained, config, vocab, options, open_image)

    def generate(self, requests: Sequence[RolloutRequest], seeds: Seeds) -> list[Rollout]:
        answers = sorted(self.generate_window([RolloutRound(tuple(requests), seeds)]), key=lambda answer: answer.index)
        return [answer.rollout for answer in answers]

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[Answer]:
        batches = plan_calls([len(one.requests) for one in rounds], self._slots)
        calls = [call for batch in batches for call in batch]
        self._calls = [self._describe(call, rounds) for call in calls]
        if not calls:
            return
        if self._version is None:
            raise RolloutError("the servers have no weights of this run yet; call sync_weights before asking them")
        self._silent_since.clear()
        for call, items in in_flight(calls, self._slots, lambda call: self._ask(call, rounds), self._watch, WATCH_S):
            self._silent_since.pop(call.server, None)  # an answer is a sign of life
            where = f"{self._clients[call.server].base_url}/infer/"
            for index, item in zip(call.indices, items, strict=True):
                request = rounds[call.round_idx].requests[index]
                rollout = read_answer(item, request, self._vocab, self._version, self._guarded, where)
                yield Answer(call.round_idx, index, rollout)

    def batch_size(self, decode_batch_size: int) -> int:
        """This rank's share of all servers' devices."""
        return chunk_size(decode_batch_size, self._world_sizes, distributed.world_size())

    def sync_weights(self, version: int) -> None:
        """Barrier, push by rank 0, barrier; where weights are sharded, all ranks gather while rank 0 sends."""
        with distributed.together("before the weight push"):
            self._version = None  # no answers between old and new weights
        failure: Exception | None = None
        report: Mapping[str, Any] = {}
        try:
            if distributed.is_main():
                report = self._push(version)
        except Exception as error:  # not handled here: raised again below, on every rank
            failure = error
        finally:
            self._weights.finish()
        distributed.raise_together(failure, "weight push")
        self._last_sync = distributed.gather_json(dict(report))[0]
        self._version = version

    def rest(self) -> None:
        """Servers go on by themselves."""

    def last_report(self) -> Mapping[str, Any]:
        return {
            "backend": "vllm",
            "mode": "server",
            "weight_version": self._version,
            "servers": [
                {"base_url": client.base_url, "group_port": client.group_port, "world_size": size}
                for client, size in zip(self._clients, self._world_sizes, strict=True)
            ],
            "sync": dict(self._last_sync),
            "fallbacks": list(self._fallbacks),
            "decode_batch_size": self._decode_batch_size,
            "learner_world_size": distributed.world_size(),
            "chunk": sum(self._slots),
            "caps": list(self._slots),
            "decoding": asdict(self._options),
            "repeat_terminate": self._guarded,
            "calls": self._calls,
        }

    def take_metrics(self) -> Mapping[str, float]:
        with self._lock:
            taken, self._metrics = self._metrics, Counter()
        return {"rollout/repeat_terminate_active": float(self._guarded), "rollout/server_retries_total": 0.0, **taken}

    def close(self) -> None:
        self._sync.close()
        for client in self._clients:
            client.close()

    def _push(self, version: int) -> Mapping[str, Any]:
        done = self._sync.push(version)
        if done.fallback is not None:
            self._fallbacks.append(f"version {version}: {done.fallback}")
            self._metrics["rollout/sync_fallbacks_total"] += 1
        self._metrics["rollout/sync_bytes_total"] += done.bytes
        return {"mode": done.mode, "seconds": done.seconds, "bytes": done.bytes, "fallback": done.fallback}

    def _describe(self, call: Call, rounds: Sequence[RolloutRound]) -> dict[str, Any]:
        seeds = rounds[call.round_idx].seeds
        return {
            "server": call.server,
            "micro_step": seeds.micro_step_idx,
            "first": call.indices.start,
            "requests": len(call.indices),
            "seed": seeds.seed_of(call.indices.start),
        }

    def _ask(self, call: Call, rounds: Sequence[RolloutRound]) -> list[dict[str, Any]]:
        """One call, with the retries that the configuration allows. Runs in a thread of its own."""
        one, client = rounds[call.round_idx], self._clients[call.server]
        requests = [one.requests[index] for index in call.indices]
        seed = one.seeds.seed_of(call.indices.start)
        payload = infer_payload(requests, seed, self._options, self._images, self._open_image)
        attempt = 0
        while True:
            try:
                return client.infer(payload)
            except (ServerUnreachable, ServerRefused) as error:
                if attempt >= self._retries or not _may_pass(error):
                    raise
                attempt += 1
                logger.warning("retry %d of %d: %s", attempt, self._retries, error)
                with self._lock:
                    self._metrics["rollout/server_retries_total"] += 1
            time.sleep(RETRY_WAIT_S)
            self._still_ours(client)

    def _still_ours(self, client: ServerClient) -> None:
        """A server that broke a connection may have been started anew, with the weights it found on disk: its answers
        must then say which weights they come from, which ms-swift's own do not."""
        if client.status() is None:
            raise ServerRefused(
                f"{client.base_url}: the connection broke, and this server cannot tell which weights it has; restart "
                "it and resume from the last checkpoint, or use coordexp serve, which can"
            )

    def _watch(self, servers: set[int]) -> None:
        """Servers may take their time over answers, but not over a sign of life, where they can give one. (Of others a
        dead process or machine shows by its connection, which TCP probes.)"""
        for server in sorted(servers & self._heard_while_decoding):
            client = self._clients[server]
            try:
                client.health(timeout_s=min(SIGN_OF_LIFE_S, self._timeout_s))
            except ServerTimeout as error:
                silent_s = time.monotonic() - self._silent_since.setdefault(server, time.monotonic())
                if silent_s >= self._timeout_s:
                    raise ServerTimeout(
                        f"{client.base_url}: owes answers and gave no sign of life for {silent_s:.0f} s; see its log"
                    ) from error
            else:
                self._silent_since.pop(server, None)


class _Drained:
    """A weight source of which every rank reads to the end, also when the push fails: where weights are sharded, each
    read is a collective, and a rank that stops would leave the others waiting."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._was_read = False

    @property
    def collective(self) -> bool:
        return self._source.collective

    def names(self) -> Sequence[str]:
        return self._source.names()

    def adapter(self) -> AdapterWeights | None:
        return self._source.adapter()

    @contextmanager
    def full(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
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


def _may_pass(error: RolloutError) -> bool:
    """A dropped connection or an error inside the server may pass; a refused request stays refused."""
    return not isinstance(error, ServerRefused) or (error.status or 0) >= 500
