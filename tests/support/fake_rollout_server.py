"""A fake rollout server: speaks the protocol over real HTTP, has no engine, and misbehaves when told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Reply = tuple[int, Any]


class FakeRolloutServer:
    """Answers every prompt with ``ids`` that its test chooses; ``infer`` can be replaced by what is wrong this time.

    ``wedged``: accepts every request and answers none until the fake is closed.
    """

    def __init__(self, world_size: int = 1, status: dict[str, Any] | None = None) -> None:
        self.world_size = world_size
        self.status = status
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.infer: Callable[[dict[str, Any]], Reply] = lambda body: (200, [])
        self.wedged = threading.Event()
        self._ended = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeRolloutServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [body for path, body in self.seen if path == "/infer/"]

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        self.seen.append((path, body))
        if self.wedged.is_set():
            self._ended.wait(60)
        if path == "/health/":
            return 200, {}
        if path == "/get_world_size/":
            return 200, {"world_size": self.world_size}
        if path == "/status/" and self.status is not None:
            return 200, self.status
        return self.infer(body) if path == "/infer/" else (404, {})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(*fake.reply(self.path, {}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*fake.reply(self.path, body))

            def _answer(self, code: int, reply: Any) -> None:
                encoded = json.dumps(reply).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(encoded)))
                self.end_headers()
                self.wfile.write(encoded)

            def log_message(self, format: str, *args: Any) -> None: ...

        return Handler
