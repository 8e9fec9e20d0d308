"""The viewer's page, served on 127.0.0.1 with the original images, and updated during a run."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from coordexp.data.images import open_rgb
from coordexp.errors import DataError
from coordexp.viewer.collect import ViewData
from coordexp.viewer.render import image_paths, render

_WATCHED = ("rollout_records/*.jsonl", "*.jsonl", "evaluation/*.jsonl", "checkpoint-*/trainer_state.json",
            "trainer_state.json", "log_history.json")  # fmt: skip
_QUALITY = 92


@dataclass(frozen=True, slots=True)
class _Page:
    version: str
    body: bytes
    images: Sequence[str]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser may leave before its answer is there.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def version_of(sources: Sequence[Path]) -> str:
    """Changes whenever a file that the page is made of does: a hash of names, sizes and times."""
    files: list[Path] = []
    for source in sources:
        files += [source] if source.is_file() else sorted(path for one in _WATCHED for path in source.glob(one))
    stats = []
    for path in files:
        with suppress(OSError):  # gone since it was listed, as old checkpoints are, or a broken link
            stats.append((str(path), (stat := path.stat()).st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def make_server(
    sources: Sequence[Path],
    collect: Callable[[], ViewData],
    image_side: int | None = None,
    port: int = 0,
    follow: bool = False,
) -> ThreadingHTTPServer:
    """A server of the page at ``/`` on 127.0.0.1; port 0 takes a free one. The caller runs and closes it.

    With ``follow``, the page is made again when it is requested after a file of ``sources`` changed. Raises DataError
    if there is nothing to show, OSError if the port is in use.
    """
    lock = threading.Lock()

    def make(version: str) -> _Page:
        data = collect()
        return _Page(version, render(data, image_side, None, version, follow).encode("utf-8"), image_paths(data))

    page = make(version_of(sources))

    def current() -> _Page:
        nonlocal page
        if follow:
            with lock:
                version = version_of(sources)
                if version != page.version:
                    page = make(version)
        return page

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:  # the name that http.server calls
            if not self._from_this_machine():
                port = server.server_port
                own = f"This page is http://127.0.0.1:{port}/ and nothing else."
                far = f"From another machine forward the same port: ssh -L {port}:127.0.0.1:{port} HOST"
                self.send_error(HTTPStatus.FORBIDDEN, explain=f"{own} {far}")
                return
            try:
                reply = self._reply(self.path.split("?")[0])
            except (DataError, OSError) as error:  # a file that is gone, or half written: the next request may succeed
                self._send(
                    "text/plain; charset=utf-8", str(error).encode(errors="replace"), HTTPStatus.SERVICE_UNAVAILABLE
                )
                return
            if reply is None:
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send(*reply)

        def _reply(self, path: str) -> tuple[str, bytes] | None:
            image = re.fullmatch(r"/image/(\d{1,7})", path)
            if path == "/":
                return "text/html; charset=utf-8", current().body
            if path == "/version":
                return "text/plain", (version_of(sources) if follow else page.version).encode()
            if image is None or int(image[1]) >= len(page.images):
                return None
            buffer = io.BytesIO()
            open_rgb(Path(page.images[int(image[1])])).save(buffer, format="JPEG", quality=_QUALITY)
            return "image/jpeg", buffer.getvalue()

        def _from_this_machine(self) -> bool:
            """Whether the page was requested by its own address. Another page's name server could resolve its own name
            to this machine, and the page would read images and answers."""
            own = {f"{name}:{server.server_port}" for name in ("127.0.0.1", "localhost")}
            origin = self.headers.get("Origin")
            return self.headers.get("Host") in own and (origin is None or origin.removeprefix("http://") in own)

        def _send(self, kind: str, body: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
            self.send_response(status)
            if status != HTTPStatus.OK:
                self.send_header("Refresh", "3")  # a followed page would stay an error
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    try:
        server = _Server(("127.0.0.1", port), Handler)
        return server
    except OSError as error:
        error.filename = f"127.0.0.1:{port}"  # which the socket's error does not name
        raise
