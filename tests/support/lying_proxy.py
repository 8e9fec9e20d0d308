"""A proxy in front of a real server that breaks requests and answers like networks, load balancers and bugs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Answer = Callable[[bytes], bytes]


@dataclass
class LyingProxy:
    """Forwards every request to ``target``; applies ``behaviour`` to requests for ``path``, ``times`` of them or
    until it heals."""

    target: str
    url: str = ""
    path: str = ""
    behaviour: str = ""
    times: float = math.inf
    kept: bytes = b""  # the last good answer, which a stale one repeats
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def heal(self) -> None:
        self.path = self.behaviour = ""

    def misbehave(self, path: str, behaviour: str, times: float = math.inf) -> None:
        with self.lock:
            self.path, self.behaviour, self.times = path, behaviour, times

    def behaviour_to(self, path: str) -> str:
        with self.lock:
            if path != self.path or self.times <= 0:
                return ""
            self.times -= 1
            return self.behaviour

    def forward(self, method: str, path: str, headers: Any, body: bytes) -> httpx.Response:
        kept = {name: value for name, value in headers.items() if name.lower() in ("content-type", "authorization")}
        return httpx.request(method, self.target + path, headers=kept, content=body, timeout=120.0, trust_env=False)


def changed(change: Callable[[list[Any]], list[Any]]) -> Answer:
    """The answers of a call, changed; ``change`` may edit them in place."""
    return lambda body: json.dumps(change(json.loads(body))).encode()


def without_tokens(answers: list[Any]) -> list[Any]:
    """As by a gateway that passes only OpenAI's fields on."""
    for answer in answers:
        del answer["response"]["choices"][0]["token_ids"]
    return answers


# By place: before the server sees the request, in its answer, after it has answered.
BEFORE = ("closes at once", "closes half way through the request", "hangs before the server")
ANSWERS: dict[str, Answer] = {
    "swaps answers": changed(lambda answers: answers[::-1]),
    "gives the first answer twice": changed(lambda answers: [answers[0], answers[0], *answers[2:]]),
    "drops token ids": changed(without_tokens),
    "drops the envelope": changed(lambda answers: [{"response": answer["response"]} for answer in answers]),
    "answers in the server's place": lambda _: b"<html>It works!</html>",
}
AFTER = ("closes before the answer", "closes after the header", "closes half way", "hangs after the server",
          "hangs half way", "drips")  # fmt: skip
STALE = "gives an answer of before"


@contextmanager
def lying_proxy(target: str) -> Iterator[LyingProxy]:
    proxy = LyingProxy(target)
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    http.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{http.server_address[1]}"
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.over.set()
        http.shutdown()
        http.server_close()


def _handler(proxy: LyingProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with suppress(OSError):
                self._do(proxy.behaviour_to(self.path))

        do_POST = do_GET

        def _do(self, behaviour: str) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.close_connection = behaviour in (*BEFORE, *AFTER)
            if behaviour == "closes at once":
                return
            if behaviour == "closes half way through the request":
                self.rfile.read(length // 2)
                return
            body = self.rfile.read(length)
            if behaviour == "hangs before the server":
                proxy.over.wait()
                return
            reply = proxy.forward(self.command, self.path, self.headers, body)
            answer = ANSWERS[behaviour](reply.content) if behaviour in ANSWERS else reply.content
            if behaviour == STALE:
                answer = proxy.kept
            elif self.path == "/infer/" and not behaviour:
                proxy.kept = answer
            self._answer(reply.status_code, reply.headers.get("content-type", "text/plain"), answer, behaviour)

        def _answer(self, status: int, kind: str, answer: bytes, behaviour: str) -> None:
            if behaviour == "hangs after the server":
                proxy.over.wait()
            if behaviour in ("hangs after the server", "closes before the answer"):
                return
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if behaviour == "closes after the header":
                return
            if behaviour == "drips":
                for place in range(len(answer)):
                    self.wfile.write(answer[place : place + 1])
                    self.wfile.flush()
                    if proxy.over.wait(0.1):
                        return
            elif behaviour in ("closes half way", "hangs half way"):
                self.wfile.write(answer[: len(answer) // 2])
                self.wfile.flush()
                if behaviour == "hangs half way":
                    proxy.over.wait()
            else:
                self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

    return Handler
