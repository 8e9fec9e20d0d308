"""HTTP client of one rollout server, ``coordexp serve`` or ``swift rollout``: every call has a timeout, and an error
names the URL, the answer and a fix. Does not import torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import httpx
import msgspec

from coordexp.addresses import KEEPALIVE, split_url
from coordexp.background import in_background
from coordexp.engine.wire.arguments import JoinRequest
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.weight_sync import WeightVersion

CONNECT_S = 10.0
# An idle connection is used again for less time than servers keep it (uvicorn: 5 s), however long a packet takes.
IDLE_S = 2.0
_POLL_S = 0.5
EXCERPT = 600
MAX_ANSWER_BYTES = 16 << 20
_NOT_AS_EXPECTED = (msgspec.DecodeError, ValueError, RecursionError)  # of a server's JSON
_GRACE_S = 0.5  # after which a call is given up that httpx's own timeouts did not end
# Size of an answer to /infer/: a prompt of 32,768 tokens and its text; for each new token its id, text and JSON.
_BYTES_OF_PROMPT, _BYTES_OF_TOKEN = 1 << 19, 64


class _Health(msgspec.Struct):
    engine_silent_s: float = 0.0
    engine_tokenless_s: float = 0.0


class _WorldSize(msgspec.Struct):
    world_size: Annotated[int, msgspec.Meta(ge=1)]


class _Committed(msgspec.Struct):
    reports: list[dict[str, Any]] | None = None  # plain ms-swift's has none


STALL_KEYS = _Health.__struct_fields__  # of /health/ and /status/; not every server has them


class ServerClient:
    """One rollout server. Safe to use from several threads at once."""

    def __init__(
        self, base_url: str, group_port: int, *, timeout_s: float, infer_timeout_s: float | None, api_key: str | None
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
            transport=httpx.HTTPTransport(
                trust_env=False,
                limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
                socket_options=KEEPALIVE,
            ),
            trust_env=False,  # would use proxies and passwords of .netrc
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
        body = self._reply("GET", "/health/", timeout_s=timeout_s)
        try:
            health = msgspec.json.decode(body, type=_Health)
        except _NOT_AS_EXPECTED:
            return 0.0
        return max(health.engine_silent_s, health.engine_tokenless_s)

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
            reply: _WorldSize = self._call("GET", "/get_world_size/", kind=_WorldSize)
            self._world_size = reply.world_size
        return self._world_size

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The server's ``/status/``, with a list of ``workers``; empty for ms-swift without our plugin."""
        try:
            reply = self._call("GET", "/status/", kind=dict[str, Any], timeout_s=timeout_s)
        except ServerRefused as error:
            if error.status == 404:
                return {}
            raise
        workers = reply.get("workers")
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
            kind=list[dict[str, Any]],
            timeout_s=self._infer_timeout_s,
            no_deadline=True,
            max_bytes=MAX_ANSWER_BYTES + num_requests * answer_bytes,
        )
        if len(reply) != num_requests:
            raise ServerRefused(
                f"POST {self.base_url}/infer/: {len(reply)} answers to {num_requests} requests; see the server's log"
            )
        return reply

    def init_communicator(
        self, world_size: int, first_rank: int, timeout_s: float, token: str = "", trainer: str = ""
    ) -> None:
        """Let the server's workers join the weight group at this server's host and group_port. Returns when they have
        joined (ours) or at once (ms-swift): join from the trainer's side meanwhile. ``trainer``: who asks, as
        messages name it; a server refuses others while it is connected."""
        request = JoinRequest(
            host=self.host,
            port=self.group_port,
            world_size=world_size,
            first_rank=first_rank,
            timeout_s=timeout_s,
            token=token,
            trainer=trainer,
        )
        self._call("POST", "/init_communicator/", request.model_dump(), timeout_s=timeout_s + CONNECT_S)

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
        payload = {**weights.payload(), "wants_checksum": wants_checksum}
        endpoint = "/process_weights_after_loading/"
        return self._call("POST", endpoint, payload, kind=_Committed, timeout_s=timeout_s).reports

    def reset_caches(self, timeout_s: float | None = None) -> None:
        for cache in ("prefix", "encoder", "mm"):
            self._call("POST", f"/reset_{cache}_cache/", timeout_s=timeout_s)

    def close(self) -> None:
        self._http.close()

    def _call(
        self, method: str, endpoint: str, payload: Mapping[str, Any] | None = None, *, kind: Any = Any, **limits: Any
    ) -> Any:
        # The answer's JSON as ``kind``; ``limits``: see _reply.
        body = self._reply(method, endpoint, payload, **limits)
        try:
            return msgspec.json.decode(body, type=kind)
        except _NOT_AS_EXPECTED as error:
            raise ServerRefused(
                f"{method} {self.base_url}{endpoint}: an unexpected answer ({error}): {_excerpt(body)}; is this a "
                "rollout server?"
            ) from error

    def _reply(
        self,
        method: str,
        endpoint: str,
        payload: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        no_deadline: bool = False,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytearray:
        # The body of an answer with status 200. timeout_s covers connecting, sending and the whole answer. By default
        # it is the client's own, or none with no_deadline.
        url = f"{self.base_url}{endpoint}"
        where = f"{method} {url}"
        read_s = timeout_s if timeout_s is not None else None if no_deadline else self.timeout_s
        connect_s = min(CONNECT_S, self.timeout_s if read_s is None else read_s)
        timeout = httpx.Timeout(read_s, connect=connect_s, pool=None)

        def exchange() -> tuple[int, bytearray]:
            body = bytearray()
            with self._http.stream(method, url, json=payload, timeout=timeout) as reply:
                for chunk in reply.iter_bytes():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ServerRefused(
                            f"{where}: the answer is longer than {max_bytes:,} bytes, the most that this call can "
                            "need; is this a rollout server?"
                        )
            return reply.status_code, body

        try:
            # In a thread that can be left behind: httpx's timeouts apply to each chunk, so a call to a server that
            # sends a byte now and then would never end.
            calling = in_background(exchange, "http", exit_waits=False)
            status, body = calling.result(None if read_s is None else read_s + _GRACE_S)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnreachable(
                f"{where}: no rollout server accepts connections there ({error}); start it (coordexp serve "
                "X.yaml, or swift rollout) and check base_url; without a server, write rollout_matching.vllm.mode: "
                "colocate or rollout_matching.rollout_backend: hf"
            ) from error
        except (TimeoutError, httpx.TimeoutException) as error:
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
        if status == 200:
            return body
        try:
            content = msgspec.json.decode(body, type=dict[str, Any])
        except _NOT_AS_EXPECTED:
            content = {}
        # The server's own error message, or the beginning of its answer.
        message = content.get("error", content.get("detail"))
        message = message[:EXCERPT] if isinstance(message, str) else _excerpt(body)
        advice = {
            401: "the token is missing or wrong: set rollout_matching.vllm.server.api_key_env on both sides",
            403: "the token is wrong: set rollout_matching.vllm.server.api_key_env on both sides",
            404: "is this a rollout server, and does base_url hold its prefix?",
        }.get(status, "look into the server's log")
        refused = ServerRefused(f"{where}: status {status}, {message}; {advice}")
        refused.status = status
        raise refused


def _excerpt(body: bytes | bytearray) -> str:
    return repr(body[: 4 * EXCERPT].decode("utf-8", errors="replace")[:EXCERPT])
