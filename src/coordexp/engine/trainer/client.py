"""HTTP client of one rollout server, ``coordexp serve`` or ``swift rollout``: every call has a timeout, and an error
names the URL, the answer and a fix. Does not import torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

from coordexp.addresses import KEEPALIVE, split_url
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.weight_sync import WeightVersion

CONNECT_S = 10.0
# An idle connection is used again for less time than servers keep it (uvicorn: 5 s), however long a packet takes.
IDLE_S = 2.0
_POLL_S = 0.5
EXCERPT = 600
MAX_ANSWER_BYTES = 16 << 20
STALL_KEYS = ("engine_silent_s", "engine_tokenless_s")  # of /health/ and /status/; not every server has them
# Size of an answer to /infer/: a prompt of 32,768 tokens and its text; for each new token its id, text and JSON.
_BYTES_OF_PROMPT, _BYTES_OF_TOKEN = 1 << 19, 64


class ServerClient:
    """One rollout server. Safe to use from several threads at once."""

    def __init__(
        self,
        base_url: str,
        group_port: int,
        *,
        timeout_s: float,
        infer_timeout_s: float | None,
        api_key: str | None,
    ) -> None:
        """``timeout_s``: of all calls except ``/infer/``; ``infer_timeout_s``: of ``/infer/``, None or <= 0 for none.
        ``api_key`` never appears in a message."""
        self.base_url = base_url.rstrip("/")
        self.group_port = group_port
        self.timeout_s = timeout_s
        self._infer_timeout_s = infer_timeout_s if infer_timeout_s is not None and infer_timeout_s > 0 else None
        self._world_size: int | None = None
        self._http = httpx.Client(
            headers={
                "Accept-Encoding": "identity",  # compressed answers could unpack to any size
                **({} if api_key is None else {"Authorization": f"Bearer {api_key}"}),
            },
            # trust_env would use proxies and passwords of .netrc.
            transport=DeadlineTransport(),
            trust_env=False,
            follow_redirects=False,
        )

    @property
    def host(self) -> str:
        return split_url(self.base_url).hostname or "127.0.0.1"

    def __str__(self) -> str:
        return self.base_url

    def health(self, timeout_s: float | None = None) -> None:
        """Raises RolloutError if the server is not up or its engine is dead."""
        self.engine_stall_seconds(timeout_s)

    def engine_stall_seconds(self, timeout_s: float | None = None) -> float:
        """Like :meth:`health`; returns for how many seconds the server's slowest engine has not responded, or has
        sampled no token although it has requests (its HTTP process may answer while the engine hangs). 0 if the server
        does not report it."""
        health = self._call("GET", "/health/", timeout_s=timeout_s, wants_json=False)
        stalls = [health.get(name) for name in STALL_KEYS] if isinstance(health, dict) else []
        return max((float(s) for s in stalls if isinstance(s, (int, float)) and not isinstance(s, bool)), default=0.0)

    def wait_until_healthy(self, timeout_s: float | None = None) -> None:
        """Wait for a server that is still starting, by default the client's own timeout. Raises the last attempt's
        RolloutError; raises at once if the server refuses the token."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            left = deadline - time.monotonic()
            try:
                return self.health(timeout_s=max(0.1, min(CONNECT_S, left)))
            except RolloutError as error:
                if time.monotonic() + _POLL_S >= deadline or (
                    isinstance(error, ServerRefused) and error.status in (401, 403)
                ):
                    raise
            time.sleep(_POLL_S)

    def world_size(self) -> int:
        """Number of devices of this server; requested once."""
        if self._world_size is None:
            endpoint = "/get_world_size/"
            reply = self._call("GET", endpoint)
            size = reply.get("world_size") if isinstance(reply, Mapping) else None
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ServerRefused(
                    f"GET {self.base_url}{endpoint}: {str(reply)[:EXCERPT]!r} has no positive world_size; is this a "
                    "rollout server?"
                )
            self._world_size = size
        return self._world_size

    def status(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The server's ``/status/``; None if it has none, as ms-swift without our plugin."""
        try:
            reply = self._call("GET", "/status/", timeout_s=timeout_s)
        except ServerRefused as error:
            if error.status == 404:
                return None
            raise
        workers = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(workers, list) or not all(isinstance(worker, dict) for worker in workers):
            raise ServerRefused(
                f"GET {self.base_url}/status/: {str(reply)[:EXCERPT]!r} lists no workers; is this a rollout server?"
            )
        return reply

    def infer(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Answers to ``payload["infer_requests"]``, one object each, in their order."""
        num_requests = len(payload["infer_requests"])
        config = payload.get("request_config")
        tokens = config.get("max_tokens") if isinstance(config, Mapping) else None
        answer_bytes = _BYTES_OF_PROMPT + _BYTES_OF_TOKEN * (tokens if isinstance(tokens, int) else 1 << 14)
        reply = self._call(
            "POST",
            "/infer/",
            payload,
            timeout_s=self._infer_timeout_s,
            no_deadline=True,
            max_bytes=MAX_ANSWER_BYTES + num_requests * answer_bytes,
        )
        where = f"POST {self.base_url}/infer/"
        if not isinstance(reply, list):
            raise ServerRefused(f"{where}: expected a list of answers, got {str(reply)[:EXCERPT]!r}")
        if len(reply) != num_requests:
            raise ServerRefused(f"{where}: {len(reply)} answers to {num_requests} requests; see the server's log")
        for index, item in enumerate(reply):
            if not isinstance(item, dict):
                raise ServerRefused(f"{where}: answer {index} is {str(item)[:EXCERPT]!r}, not an object")
        return reply

    def init_communicator(
        self, world_size: int, first_rank: int, timeout_s: float, token: str = "", trainer: str = ""
    ) -> None:
        """Let the server's workers join the weight group at this server's host and group_port. Returns when they have
        joined (ours) or at once (ms-swift): join from the trainer's side meanwhile. ``trainer``: who asks, as
        messages name it; a server refuses others while it is connected."""
        self._call(
            "POST",
            "/init_communicator/",
            {
                "host": self.host,
                "port": self.group_port,
                "world_size": world_size,
                "first_rank": first_rank,
                "timeout_s": timeout_s,
                "token": token,
                "trainer": trainer,
            },
            timeout_s=timeout_s + CONNECT_S,
        )

    def close_communicator(self, timeout_s: float | None = None, trainer: str = "") -> None:
        self._call("POST", "/close_communicator/", {"trainer": trainer}, timeout_s=timeout_s)

    def update_flattened_params(
        self, metadatas: Sequence[Mapping[str, Any]], timeout_s: float, peft_config: Mapping[str, Any] | None = None
    ) -> None:
        """Announce a bucket of weights, or an adapter with its ``peft_config``; the weight group carries the bytes."""
        endpoint, payload = "/update_flattened_params/", {"metadatas": metadatas}
        if peft_config is not None:
            endpoint, payload = "/update_adapter_flattened_param/", {**payload, "peft_config": peft_config}
        self._call("POST", endpoint, payload, timeout_s=timeout_s)

    def commit_weights(
        self, weights: WeightVersion, wants_checksum: bool, timeout_s: float
    ) -> list[dict[str, Any]] | None:
        """End a push: finalise layouts, empty caches, set the version. Returns each worker's report, None if the server
        sends none."""
        reply = self._call(
            "POST",
            "/process_weights_after_loading/",
            {**weights.payload(), "wants_checksum": wants_checksum},
            timeout_s=timeout_s,
        )
        return reply.get("reports") if isinstance(reply, dict) else None

    def reset_caches(self, timeout_s: float | None = None) -> None:
        for cache in ("prefix", "encoder", "mm"):
            self._call("POST", f"/reset_{cache}_cache/", timeout_s=timeout_s)

    def close(self) -> None:
        self._http.close()

    def _call(
        self,
        method: str,
        endpoint: str,
        payload: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        no_deadline: bool = False,
        wants_json: bool = True,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Any:
        # Returns the answer's JSON; None if it is not JSON and wants_json is False. timeout_s covers connecting,
        # sending and the whole answer. By default it is the client's own, or none with no_deadline.
        url = f"{self.base_url}{endpoint}"
        where = f"{method} {url}"
        read_s = timeout_s if timeout_s is not None else None if no_deadline else self.timeout_s
        connect_s = min(CONNECT_S, self.timeout_s if read_s is None else read_s)
        timeout = httpx.Timeout(read_s, connect=connect_s, pool=None)
        body = bytearray()
        try:
            with deadline(read_s), self._http.stream(method, url, json=payload, timeout=timeout) as reply:
                for chunk in reply.iter_bytes():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ServerRefused(
                            f"{where}: the answer is longer than {max_bytes:,} bytes, the most that this call can "
                            "need; is this a rollout server?"
                        )
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachable(
                f"{where}: no rollout server accepts connections there ({error}); start it (coordexp serve "
                "X.yaml, or swift rollout) and check base_url; without a server, write rollout_matching.vllm.mode: "
                "colocate or rollout_matching.rollout_backend: hf"
            ) from error
        except httpx.TimeoutException as error:
            key = "server.infer_timeout_s" if no_deadline else "server.timeout_s or sync.timeout_s"
            raise ServerTimeout(
                f"{where}: no answer within {read_s:g} s; see the server's log, or raise rollout_matching.vllm.{key}"
            ) from error
        except httpx.InvalidURL as error:
            raise ServerUnreachable(f"{where}: not a URL ({error}); check base_url") from error
        except httpx.HTTPError as error:
            raise ServerUnreachable(
                f"{where}: the connection broke ({type(error).__name__}: {error}); the server may have died: see its "
                "log"
            ) from error
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            if reply.status_code == 200 and wants_json:
                raise ServerRefused(
                    f"{where}: the answer is not JSON: {_excerpt(body)}; is this a rollout server?"
                ) from error
            content = None
        if reply.status_code == 200:
            return content
        # The server's own error message, or the beginning of its answer.
        message = content.get("error", content.get("detail")) if isinstance(content, dict) else None
        message = message[:EXCERPT] if isinstance(message, str) else _excerpt(body)
        advice = {
            401: "the token is missing or wrong: set rollout_matching.vllm.server.api_key_env on both sides",
            403: "the token is wrong: set rollout_matching.vllm.server.api_key_env on both sides",
            404: "is this a rollout server, and does base_url hold its prefix?",
        }.get(reply.status_code, "look into the server's log")
        refused = ServerRefused(f"{where}: status {reply.status_code}, {message}; {advice}")
        refused.status = reply.status_code
        raise refused


def _excerpt(body: bytes | bytearray) -> str:
    return repr(body[: 4 * EXCERPT].decode("utf-8", errors="replace")[:EXCERPT])


# httpx's timeouts apply to each chunk, so a server that sends a byte now and then would never time out. So connections
# limit each read and write to what is left until the current call's deadline.

_SEND_BYTES = 1 << 16
_this_thread = threading.local()  # ``end``: deadline of the call that this thread is in, None for none


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Limit all reads and writes of this thread's connections to ``seconds`` in total; None for no limit."""
    _this_thread.end = None if seconds is None else time.monotonic() + seconds
    try:
        yield
    finally:
        _this_thread.end = None


class DeadlineTransport(httpx.HTTPTransport):
    def __init__(self) -> None:
        super().__init__()
        self._pool = httpcore.ConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=None,
            keepalive_expiry=IDLE_S,
            socket_options=KEEPALIVE,
            network_backend=_Backend(),
        )


class _Backend(httpcore.SyncBackend):
    def connect_tcp(self, *args: Any, **options: Any) -> Any:
        return _Stream(super().connect_tcp(*args, **options))


class _Stream:
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        view = memoryview(buffer)
        for start in range(0, len(view), _SEND_BYTES):
            self._stream.write(bytes(view[start : start + _SEND_BYTES]), _left(timeout, httpcore.WriteTimeout))

    def start_tls(self, *args: Any, timeout: float | None = None, **options: Any) -> _Stream:
        return _Stream(self._stream.start_tls(*args, timeout=_left(timeout, httpcore.ConnectTimeout), **options))


def _left(timeout: float | None, error: type[Exception]) -> float | None:
    end = getattr(_this_thread, "end", None)
    if end is None:
        return timeout
    left = end - time.monotonic()
    if left <= 0:
        raise error("the deadline of the call passed")
    return left if timeout is None else min(timeout, left)
