"""Rollouts by servers, ``coordexp serve`` or ``swift rollout``, one or many.

Requests of a whole optimizer step are distributed over the servers, micro-step after micro-step, and sent as soon as
the receiving devices have room: at most ``decode_batch_size`` sequences on each, over all ranks. Rank 0 alone pushes
weights.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from coordexp import distributed
from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.coords import CoordVocab
from coordexp.data.preparation import NO_RESIZE, ImagePreparation
from coordexp.engine.client import STALL_KEYS, ServerClient
from coordexp.engine.fleet import check_names, make_clients, world_sizes
from coordexp.engine.protocol import image_source, infer_payload, read_answer
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.backend import DecodingOptions, IndexedRollout, RolloutRound, Seeds, collect_in_order
from coordexp.rollouts.chunking import Call, Post, chunk_size, plan_calls, plan_posts, server_slots
from coordexp.rollouts.learner import LearnerParts
from coordexp.weight_sync import WeightVersion

if TYPE_CHECKING:
    from coordexp.engine.push import WeightPusher


logger = logging.getLogger("coordexp")
Reply = TypeVar("Reply")
WATCH_S = 30.0  # after so long without any answer, the servers that owe one are checked for signs of life
SIGN_OF_LIFE_S = 5.0
RETRY_WAIT_S = 1.0


def in_flight(
    posts: Sequence[Post],
    slots: Sequence[int],
    ask: Callable[[Post], Reply],
    watch: Callable[[set[int]], None],
    watch_s: float,
) -> Iterator[tuple[Post, Reply]]:
    """``(post, ask(post))`` of every post, in the order in which they finish.

    The posts of one server start in their order, while their requests fit into its slots; ``watch(servers)`` is called
    when none has finished for ``watch_s`` seconds, with the servers that owe replies, and may raise.

    Raises: the first failure of any post or of ``watch``. Posts still under way then are left to end by themselves, in
        threads that no exit waits for.
    """
    waiting = [deque(post for post in posts if post.server == server) for server in range(len(slots))]
    free = list(slots)
    owed: list[Post] = []
    done: queue.SimpleQueue[tuple[Post, Reply | None, BaseException | None]] = queue.SimpleQueue()

    def work(post: Post) -> None:
        try:
            done.put((post, ask(post), None))
        except BaseException as error:  # raised again below, in the thread that waits
            done.put((post, None, error))

    def start(server: int) -> None:
        while waiting[server] and waiting[server][0].size <= free[server]:
            post = waiting[server].popleft()
            free[server] -= post.size
            owed.append(post)
            threading.Thread(target=work, args=(post,), name=f"infer-{server}", daemon=True).start()

    for server in range(len(slots)):
        start(server)
    while owed:
        try:
            post, reply, error = done.get(timeout=watch_s)
        except queue.Empty:
            watch({post.server for post in owed})
            continue
        if error is not None:
            raise error
        owed.remove(post)
        free[post.server] += post.size
        start(post.server)
        yield post, reply  # pyright: ignore[reportReturnType]
    assert not any(waiting), "a post larger than its server's slots"


class ServerKind(Enum):
    """The kind of server at a ``base_url``, by its ``/status/``."""

    COORDEXP = "coordexp serve"
    PLUGIN = "swift rollout with CoordExp's plugin"
    PLAIN = "swift rollout, or another server of its protocol"

    @classmethod
    def of(cls, status: Mapping[str, Any] | None) -> ServerKind:
        if status is not None and status.get("server") == "coordexp serve":
            return cls.COORDEXP
        return cls.PLUGIN if status is not None and STALL_KEYS[0] in status else cls.PLAIN

    @property
    def opens_images_as_we_do(self) -> bool:
        return self is ServerKind.COORDEXP

    @property
    def reports_health(self) -> bool:
        """Whether it answers ``/health/`` while it decodes. A plain ms-swift does not, so its silence means nothing."""
        return self is not ServerKind.PLAIN

    @property
    def stamps_answers(self) -> bool:
        """Whether each answer says which weights it comes from, and which request it belongs to."""
        return self is not ServerKind.PLAIN

    @property
    def serializes_calls(self) -> bool:
        """Whether it decodes one call after the other, so that the small calls of many micro-steps decode alone."""
        return self is not ServerKind.COORDEXP


class LivenessWatch:
    """Gives up on a server that owes answers and shows no sign of life for ``timeout_s``: of the process that answers
    HTTP, or of the engine behind it. (TCP keep-alive notices a dead process or machine.)"""

    def __init__(self, clients: Mapping[int, ServerClient], timeout_s: float) -> None:
        """``clients``: by server index, of those that answer ``/health/`` while they decode."""
        self._clients = clients
        self._timeout_s = timeout_s
        self._heard_at = dict.fromkeys(clients, time.monotonic())

    def heard(self, server: int) -> None:
        """An answer is a sign of life."""
        self._heard_at[server] = time.monotonic()

    def check(self, servers: set[int]) -> None:
        """
        Raises:
            ServerTimeout: one of ``servers``, which owe answers, shows no sign of life.
        """
        for server in sorted(servers & self._clients.keys()):
            client, heard_at = self._clients[server], self._heard_at[server]
            left_s = self._timeout_s - (time.monotonic() - heard_at)
            try:
                stall_seconds = client.engine_stall_seconds(timeout_s=max(0.5, min(SIGN_OF_LIFE_S, left_s)))
            except ServerTimeout as error:
                silent_s = time.monotonic() - heard_at
                if silent_s >= self._timeout_s:
                    raise ServerTimeout(
                        f"{client.base_url}: owes answers and gave no sign of life for {silent_s:.0f} s; see its log"
                    ) from error
            else:
                self.heard(server)
                if stall_seconds >= self._timeout_s:
                    raise ServerTimeout(
                        f"{client.base_url}: owes answers and its engine has not got on for {stall_seconds:.0f} s (no "
                        "sign of life, or no token), while the process before it lives; restart the server, and see "
                        "its log"
                    )


class ServerBackend:
    """vLLM servers as a rollout backend."""

    def __init__(
        self,
        clients: Sequence[ServerClient],
        pusher: WeightPusher,
        config: RolloutMatchingConfig,
        vocab: CoordVocab,
        options: DecodingOptions,
        preparation: ImagePreparation = NO_RESIZE,
        names: Sequence[str] = (),
    ) -> None:
        """``preparation``: what the trainer does to an image before its model sees it. ``names``: the closed list of
        descriptions; empty for any."""
        server = config.vllm.server
        assert server is not None, "the schema requires servers for mode: server"
        self._clients = tuple(clients)
        self._pusher = pusher
        self._vocab = vocab
        self._options = options
        self._preparation = preparation
        self._names = tuple(names)
        self._images: Literal["path", "base64"] = server.images
        self._retries = server.retries
        self._timeout_s = server.timeout_s
        self._guarded = config.repeat_terminate.enabled
        self._decode_batch_size = config.decode_batch_size
        self._world_sizes = world_sizes(self._clients)
        self._slots = server_slots(
            config.decode_batch_size, self._world_sizes, distributed.world_size(), distributed.rank()
        )
        statuses = [client.status() for client in self._clients]
        if self._names:
            for client, status in zip(self._clients, statuses, strict=True):
                check_names(client, status)
        self._kinds = [ServerKind.of(status) for status in statuses]
        # Greedy answers depend on no seed, so calls of several micro-steps may share a post where that helps.
        joinable = [index for index, kind in enumerate(self._kinds) if kind.serializes_calls]
        self._joined = frozenset(joinable if options.temperature == 0 else ())
        self._weights: WeightVersion | None = None
        self._last_push: Mapping[str, Any] = {}
        self._calls: list[dict[str, Any]] = []
        self._metrics: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the metrics, which call threads count in

    @classmethod
    def connect(
        cls,
        config: RolloutMatchingConfig,
        learner: LearnerParts,
        options: DecodingOptions,
        names: Sequence[str] = (),
    ) -> ServerBackend:
        """Find the servers; groups for weights are opened by the first push, by rank 0."""
        from coordexp.engine.push import ServerPusher

        clients = make_clients(config)
        pusher = ServerPusher(clients if distributed.is_main() else (), learner.weights, config.vllm.sync)
        return cls(clients, pusher, config, learner.vocab, options, learner.preparation, names)

    def generate(
        self, requests: Sequence[RolloutRequest], seeds: Seeds, on_answer: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """One round, as :meth:`generate_window` answers it."""
        return collect_in_order(self.generate_window([RolloutRound(tuple(requests), seeds)]), on_answer)

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        """As :meth:`RolloutBackend.generate_window`; may be iterated in another thread, while the trainer trains.

        Every answer must come from the weights that the servers have now; the next :meth:`sync_weights` must wait for
        the last answer.
        """
        batches = plan_calls([len(one.requests) for one in rounds], self._slots)
        posts = plan_posts(batches, self._joined)
        self._calls = [
            self._describe(number, post, call, rounds) for number, post in enumerate(posts) for call in post.calls
        ]
        if not posts:
            return iter(())
        if self._weights is None:
            raise RolloutError("the servers have no weights of this run yet; call sync_weights before asking them")
        return self._answers(posts, rounds, self._weights)

    def _answers(
        self, posts: Sequence[Post], rounds: Sequence[RolloutRound], weights: WeightVersion
    ) -> Iterator[IndexedRollout]:
        watched = {index: self._clients[index] for index, kind in enumerate(self._kinds) if kind.reports_health}
        watch = LivenessWatch(watched, self._timeout_s)
        watch_s = min(WATCH_S, self._timeout_s / 5)
        for post, items in in_flight(posts, self._slots, lambda post: self._ask(post, rounds), watch.check, watch_s):
            watch.heard(post.server)
            where = f"{self._clients[post.server].base_url}/infer/"
            stamped = self._kinds[post.server].stamps_answers
            for place, ((round_idx, index), item) in enumerate(zip(_places(post), items, strict=True)):
                request = rounds[round_idx].requests[index]
                rollout = read_answer(
                    item,
                    request,
                    self._vocab,
                    weights,
                    self._guarded,
                    where,
                    stamped=stamped,
                    max_new_tokens=self._options.max_new_tokens,
                    place=place if stamped else None,
                )
                yield IndexedRollout(round_idx, index, rollout)

    @property
    def batch_size(self) -> int:
        return chunk_size(self._decode_batch_size, self._world_sizes, distributed.world_size())

    def sync_weights(self, version: int) -> None:
        """Push by rank 0; where weights are sharded, all ranks gather while rank 0 sends."""
        distributed.barrier()  # every rank has its answers of the old weights
        self._weights = None  # no answers between old and new weights
        report = self._pusher.push(version)
        if distributed.is_main():
            self._metrics["rollout/sync_fallbacks_total"] += report.fallback is not None
            self._metrics["rollout/sync_bytes_total"] += report.bytes
        self._last_push = distributed.gather_json(  # rank 0's, which has pushed
            {
                "mode": report.mode,
                "seconds": report.seconds,
                "bytes": report.bytes,
                "fallback": report.fallback,
                "learner_id": report.weights.learner_id,
            }
        )[0]
        self._weights = WeightVersion(version, self._last_push["learner_id"])

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
        """Counters and seconds since the last call, and whether the repeat guard is on."""
        with self._lock:
            taken, self._metrics = self._metrics, Counter()
        return {"rollout/repeat_terminate_active": float(self._guarded), "rollout/server_retries_total": 0.0, **taken}

    def close(self) -> None:
        self._pusher.close()
        for client in self._clients:
            client.close()

    def _describe(self, number: int, post: Post, call: Call, rounds: Sequence[RolloutRound]) -> dict[str, Any]:
        """A call as it is sent: in the window's post ``number``, with that post's one seed."""
        return {
            "server": call.server,
            "post": number,
            "micro_step": rounds[call.round_idx].seeds.micro_step_idx,
            "first": call.indices.start,
            "requests": len(call.indices),
            "seed": _seed_of(post, rounds),
        }

    def _ask(self, post: Post, rounds: Sequence[RolloutRound]) -> list[dict[str, Any]]:
        """One post, with the retries that the configuration allows. Runs in a thread of its own."""
        client = self._clients[post.server]
        requests = [rounds[round_idx].requests[index] for round_idx, index in _places(post)]
        payload = infer_payload(
            requests,
            _seed_of(post, rounds),
            self._options,
            partial(
                image_source,
                images=self._images,
                preparation=self._preparation,
                ours=self._kinds[post.server].opens_images_as_we_do,
            ),
            tagged=self._kinds[post.server].stamps_answers,
            names=self._names,
        )
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
        """A server that broke a connection may have been restarted, with the weights on disk. Its answers must then say
        which weights they come from, which ms-swift's own do not."""
        if client.status() is None:
            raise ServerRefused(
                f"{client.base_url}: the connection broke, and this server cannot tell which weights it has; restart "
                "it and resume from the last checkpoint, or use coordexp serve, which can"
            )


def _places(post: Post) -> list[tuple[int, int]]:
    """Round and index of each request that ``post`` carries, in its order."""
    return [(call.round_idx, index) for call in post.calls for index in call.indices]


def _seed_of(post: Post, rounds: Sequence[RolloutRound]) -> int:
    """The seed that ``post`` carries: its first call's."""
    first = post.calls[0]
    return rounds[first.round_idx].seeds.seed_of(first.indices.start)


def _may_pass(error: RolloutError) -> bool:
    """A dropped connection or an error inside the server may pass; a refused request stays refused."""
    return not isinstance(error, ServerRefused) or (error.status or 0) >= 500
