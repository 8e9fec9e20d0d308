"""Rollouts by one or several servers (``coordexp serve`` or ``swift rollout``), and their checks before a run.

Requests of a whole optimizer step are distributed over the servers, micro-step after micro-step, and sent as soon as
the receiving devices have room: at most ``decode_batch_size`` sequences on each, over all ranks.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from coordexp import distributed
from coordexp.background import in_background
from coordexp.config.rollout import RolloutMatchingConfig, VLLMConfig
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.wire.arguments import (
    CLASS_NAMES_ENABLE,
    CLASS_NAMES_STATUS,
    ENGINE,
    SETTINGS,
    check_guard,
    refusal_of_owner,
    settings_of,
)
from coordexp.engine.wire.engine_process import api_key_from_environment
from coordexp.engine.wire.protocol import image_source, infer_payload, read_answer
from coordexp.errors import (
    ConfigError,
    MissingDependency,
    RolloutError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
)
from coordexp.rollouts.backend import DecodingOptions, IndexedRollout, RolloutBackend, RolloutRound, TrainerParts
from coordexp.rollouts.chunking import Post, chunk_size, plan_calls, plan_posts, server_slots
from coordexp.weight_sync import WeightVersion

logger = logging.getLogger("coordexp")
Reply = TypeVar("Reply")
WATCH_S = 30.0  # seconds without any answer after which servers with open requests are checked
PROBE_S = 5.0  # timeout of such a check
RETRY_WAIT_S = 1.0


def make_clients(config: RolloutMatchingConfig) -> tuple[ServerClient, ...]:
    """One client per entry of ``servers[]``; no request is sent yet."""
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


def check_servers(config: RolloutMatchingConfig, trainer_world_size: int, with_class_names: bool = False) -> None:
    """Wait until every server is up, and check that it can serve this run, before any model is loaded.

    Raises: RolloutError: a server does not answer within ``server.timeout_s``, has another repeat guard than
    configured, belongs to another trainer, or does not support class names. ConfigError: too few devices for the
    ranks, or one that server and trainer would share. MissingDependency: weights could not be pushed to GPUs.
    """
    clients = make_clients(config)
    try:
        chunk_size(config.decode_batch_size, world_sizes(clients), trainer_world_size)
        for client in clients:
            status = client.status()
            workers = status.get("workers", [])
            check_guard(status.get("workers"), config.repeat_terminate, client.base_url)
            if with_class_names:
                check_names(client, workers)
            if (reason := refusal_of_owner([one.get("owner") for one in workers], "this run")) is not None:
                raise RolloutError(f"{client.base_url}: {reason}")
            for worker in workers:
                check_engine(client, worker, config.vllm)
            if any(one.get("device", "").startswith("cuda") for one in workers):
                _check_gpus(client, [one.get("device_uuid") for one in workers])
    finally:
        for client in clients:
            client.close()


def world_sizes(clients: Sequence[ServerClient]) -> tuple[int, ...]:
    """Devices of each server, once it is up. Raises RolloutError after ``server.timeout_s``."""
    for client in clients:
        client.wait_until_healthy()
    return tuple(client.world_size() for client in clients)


def _check_gpus(client: ServerClient, server_uuids: Sequence[str | None]) -> None:
    # Check that NCCL can send weights from this process's GPU to the server's GPUs.
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"{client.base_url}: the server is on GPUs and this trainer is not, so weights cannot be pushed; train on "
            "a GPU, or start the server on the CPU"
        )
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependency(
            f"{client.base_url}: its weights are on GPUs, and pushes to GPUs go through vLLM's NCCL binding, which the "
            "trainer needs too; pip install 'coordexp[vllm]' where it trains"
        )
    own = str(torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).uuid)
    if own in server_uuids:
        raise ConfigError(
            f"{client.base_url}: it and this trainer are on the same GPU ({own}), where NCCL cannot connect them; give "
            "each a device of its own (launch.server_devices, launch.learner_devices, CUDA_VISIBLE_DEVICES), or share "
            "one with rollout_matching.vllm.mode: colocate"
        )


def check_names(client: ServerClient, workers: Sequence[Mapping[str, Any]]) -> None:
    """Raises RolloutError if a server does not support class names: it would ignore them silently."""
    if not workers or not all(one.get(CLASS_NAMES_STATUS) for one in workers):
        raise RolloutError(
            f"{client.base_url}: this server would ignore the list of class names; start it with "
            f"rollout_matching.vllm.server.closed_names: true (swift rollout: {CLASS_NAMES_ENABLE}=1 and CoordExp's "
            "plugin), or write rollout_backend: hf, or vllm.mode: colocate"
        )


def check_same(client: ServerClient, worker: Mapping[str, Any], key: str, ours: Mapping[str, Any]) -> None:
    """Raises RolloutError if a server's worker reports other settings under ``key`` than ``ours``: pushes bring
    weights, and no setting that decides how they are applied."""
    if key not in worker:
        note = "%s: an older CoordExp runs there and does not report %s, so nothing checks that they are this run's"
        logger.warning(note, client.base_url, key)
        return
    for name, value in ours.items():
        found = worker[key].get(name)
        if found != value:
            raise RolloutError(
                f"{client.base_url}: its {name} is {found}, and {value} in this run; start the server with this run's "
                "YAML, from the same checkpoint"
            )


def check_engine(client: ServerClient, worker: Mapping[str, Any], vllm: VLLMConfig) -> None:
    """Raises RolloutError if a server's engine answers by other keys than this run's resolved section: it cuts answers
    earlier, or computes in another number type."""
    theirs = worker.get(ENGINE, {}).get("max_model_len", math.inf)
    ours = {
        "dtype": vllm.dtype,
        "kv_cache_dtype": vllm.given_args.get("kv_cache_dtype", "auto"),
        "max_model_len": None if vllm.max_model_len is None else max(theirs, vllm.max_model_len),  # at least ours
    }
    check_same(client, worker, ENGINE, {name: value for name, value in ours.items() if value is not None})


def in_flight(
    posts: Sequence[Post],
    slots: Sequence[int],
    ask: Callable[[Post], Reply],
    watch: Callable[[set[int]], None],
    watch_s: float,
) -> Iterator[tuple[Post, Reply]]:
    """``(post, ask(post))`` of every post, in the order in which they finish.

    The posts of one server start in their order, while their requests fit into its slots; ``watch(servers)`` is called
    when none has finished for ``watch_s`` seconds, with the servers whose replies are missing. The first failure of any
    post or of ``watch`` is raised; running posts then end in background threads, which do not delay an exit.
    """
    waiting = [deque(post for post in posts if post.server == server) for server in range(len(slots))]
    free = list(slots)
    owed: dict[Future[Reply], Post] = {}

    def start(server: int) -> None:
        while waiting[server] and waiting[server][0].size <= free[server]:
            post = waiting[server].popleft()
            free[server] -= post.size
            owed[in_background(partial(ask, post), f"infer-{server}", exit_waits=False)] = post

    for server in range(len(slots)):
        start(server)
    while owed:
        finished = wait(owed, watch_s, FIRST_COMPLETED).done
        if not finished:
            watch({post.server for post in owed.values()})
        for future in finished:
            reply, post = future.result(), owed.pop(future)
            free[post.server] += post.size
            start(post.server)
            yield post, reply
    assert not any(waiting), "a post larger than its server's slots"


class LivenessWatch:
    """Raises ServerTimeout if a server with open requests shows no activity for ``timeout_s``, in its HTTP process or
    in its engine. (TCP keep-alive notices a dead process or machine.)"""

    def __init__(self, clients: Mapping[int, ServerClient], timeout_s: float) -> None:
        self._clients = clients
        self._timeout_s = timeout_s
        self.heard_at = dict.fromkeys(clients, time.monotonic())

    def check(self, servers: set[int]) -> None:
        for server in sorted(servers & self._clients.keys()):
            client, heard_at = self._clients[server], self.heard_at[server]
            left_s = self._timeout_s - (time.monotonic() - heard_at)
            try:
                still_s = client.engine_stall_seconds(timeout_s=max(0.5, min(PROBE_S, left_s)))
                self.heard_at[server] = time.monotonic()
                what = "its engine has made no progress"  # no sign of life, or no token, while its HTTP process lives
            except ServerTimeout:
                still_s, what = time.monotonic() - heard_at, "gave no sign of life"
            if still_s >= self._timeout_s:
                raise ServerTimeout(
                    f"{client.base_url}: owes answers and {what} for {still_s:.0f} s; see its log, and restart it"
                )


class ServerBackend(RolloutBackend):
    """vLLM servers as a rollout backend."""

    def __init__(
        self,
        config: RolloutMatchingConfig,
        trainer: TrainerParts,
        options: DecodingOptions,
        class_names: Sequence[str] = (),
    ) -> None:
        """Wait for the servers; rank 0 opens groups for weights with its first push. ``class_names``: those that
        answers may use, empty for any."""
        from coordexp.engine.trainer.push import ServerPusher

        server = config.vllm.server
        assert server is not None, "the schema requires servers for mode: server"
        self._server = server
        self._clients = make_clients(config)
        self._pusher = ServerPusher(self._clients if distributed.is_main() else (), trainer.weights, config.vllm.sync)
        self._trainer = trainer
        self._options = options
        self._class_names = tuple(class_names)
        self._guarded = config.repeat_terminate.enabled
        self._decode_batch_size = config.decode_batch_size
        self._world_sizes = world_sizes(self._clients)
        self._slots = server_slots(
            config.decode_batch_size, self._world_sizes, distributed.world_size(), distributed.rank()
        )
        statuses = [client.status() for client in self._clients]
        for client, status in zip(self._clients, statuses, strict=True):
            for worker in status.get("workers", []):
                check_same(client, worker, SETTINGS, settings_of(trainer.checkpoint))
        self._ours = [status.get("server") == "coordexp serve" for status in statuses]
        # Servers that answer /health/ while they decode, and return each answer with its weight version and request:
        # ours, and ms-swift's with our plugin. A plain ms-swift does neither, so its liveness cannot be watched.
        self._reports = [bool(status) for status in statuses]
        # ms-swift decodes one call after the other, so the small calls of many micro-steps would not be batched.
        # Greedy answers do not depend on seeds, so these calls are sent together.
        joinable = [index for index, ours in enumerate(self._ours) if not ours]
        self._joined = frozenset(joinable if options.temperature == 0 else ())
        self._weights: WeightVersion | None = None
        self._last_push: Mapping[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._metrics: Counter[str] = Counter()
        self._lock = threading.Lock()  # protects the metrics, which several threads update

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        """As :meth:`RolloutBackend.generate_rounds`; may be iterated in another thread, while the trainer trains. The
        next :meth:`sync_weights` must wait for the last answer."""
        batches = plan_calls([len(one.requests) for one in rounds], self._slots)
        posts = plan_posts(batches, self._joined)
        self._calls = [
            {
                "server": call.server,
                "post": number,
                "micro_step": rounds[call.round_idx].seeds.micro_step_idx,
                "first": call.indices.start,
                "requests": len(call.indices),
                "seed": _seed_of(post, rounds),
            }
            for number, post in enumerate(posts)
            for call in post.calls
        ]
        if not posts:
            return iter(())
        if self._weights is None:
            raise RolloutError("the servers have no weights of this run yet; call sync_weights before generate_rounds")
        return self._answers(posts, rounds, self._weights)

    def _answers(
        self, posts: Sequence[Post], rounds: Sequence[RolloutRound], weights: WeightVersion
    ) -> Iterator[IndexedRollout]:
        watched = {index: self._clients[index] for index, reports in enumerate(self._reports) if reports}
        watch = LivenessWatch(watched, self._server.timeout_s)
        watch_s = min(WATCH_S, self._server.timeout_s / 5)
        for post, items in in_flight(posts, self._slots, lambda post: self._ask(post, rounds), watch.check, watch_s):
            watch.heard_at[post.server] = time.monotonic()
            where = f"{self._clients[post.server].base_url}/infer/"
            tagged = self._reports[post.server]
            for place, ((round_idx, index), item) in enumerate(zip(_places(post), items, strict=True)):
                request = rounds[round_idx].requests[index]
                rollout = read_answer(
                    item,
                    request,
                    self._trainer.vocab,
                    weights,
                    self._guarded,
                    where,
                    max_new_tokens=self._options.max_new_tokens,
                    place=place if tagged else None,
                )
                yield IndexedRollout(round_idx, index, rollout)

    @property
    def batch_size(self) -> int:
        return chunk_size(self._decode_batch_size, self._world_sizes, distributed.world_size())

    def sync_weights(self, version: int) -> None:
        distributed.barrier()  # until every rank has its answers from the old weights
        self._weights = None  # no answers between old and new weights
        report = self._pusher.push(version)  # by rank 0; if weights are sharded, all ranks gather while it sends
        if distributed.is_main():
            self._metrics["rollout/sync_fallbacks_total"] += report.fallback is not None
            self._metrics["rollout/sync_bytes_total"] += report.bytes
        self._last_push = distributed.gather_json(  # rank 0's, which has pushed
            {
                "mode": report.mode,
                "seconds": report.seconds,
                "bytes": report.bytes,
                "fallback": report.fallback,
                "trainer_id": report.weights.trainer_id,
            }
        )[0]
        self._weights = WeightVersion(version, self._last_push["trainer_id"])

    def release(self) -> None: ...

    def last_report(self) -> Mapping[str, Any]:
        return {
            "backend": "vllm",
            "mode": "server",
            "weight_version": None if self._weights is None else self._weights.version,
            "servers": [
                {"base_url": client.base_url, "group_port": client.group_port, "world_size": size}
                for client, size in zip(self._clients, self._world_sizes, strict=True)
            ],
            "sync": dict(self._last_push),
            "fallbacks": list(self._pusher.fallbacks),
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
        self._pusher.close()
        for client in self._clients:
            client.close()

    def _ask(self, post: Post, rounds: Sequence[RolloutRound]) -> list[dict[str, Any]]:
        # Runs in a thread of its own.
        client, ours = self._clients[post.server], self._ours[post.server]
        requests = [rounds[round_idx].requests[index] for round_idx, index in _places(post)]
        greedy = rounds[post.calls[0].round_idx].greedy  # of the whole post: calls are joined only at temperature 0
        payload = infer_payload(
            requests,
            _seed_of(post, rounds),
            replace(self._options, temperature=0.0) if greedy else self._options,
            lambda path: image_source(path, self._server.images, self._trainer.preparation, ours),
            tagged=self._reports[post.server],
            class_names=self._class_names,
        )
        attempt = 0
        while True:
            try:
                # The server may have restarted, with the weights of its folder instead of the pushed ones. Answers that
                # report their weight version reveal that; those of a plain ms-swift do not.
                if attempt and not client.status():
                    raise ServerRefused(
                        f"{client.base_url}: the connection broke, and this server does not report which weights it "
                        "has; restart it and resume from the last checkpoint, or use coordexp serve, which can"
                    )
                return client.infer(payload)
            except (ServerUnreachable, ServerRefused) as error:
                # A dropped connection or an error inside the server may be temporary; a refusal (4xx) is final.
                is_final = isinstance(error, ServerRefused) and (error.status or 0) < 500
                if is_final or attempt >= self._server.retries:
                    raise
                attempt += 1
                logger.warning("retry %d of %d: %s", attempt, self._server.retries, error)
                with self._lock:
                    self._metrics["rollout/server_retries_total"] += 1
            time.sleep(RETRY_WAIT_S)


def _places(post: Post) -> list[tuple[int, int]]:
    # Round and index of each request, in the order of the post.
    return [(call.round_idx, index) for call in post.calls for index in call.indices]


def _seed_of(post: Post, rounds: Sequence[RolloutRound]) -> int:
    first = post.calls[0]
    return rounds[first.round_idx].seeds.seed_of(first.indices.start)
