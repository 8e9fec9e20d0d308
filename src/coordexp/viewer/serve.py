"""One page on this machine's own address, for where opening a file is not possible (over an SSH tunnel, say)."""

from __future__ import annotations

from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def make_server(page: str, port: int = 0) -> ThreadingHTTPServer:
    """A server of ``page`` at ``/`` on 127.0.0.1; port 0 takes a free one. The caller runs and closes it."""
    body = page.encode("utf-8")

    class Page(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:  # the name that http.server calls
            if self.path.split("?")[0] != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are no news here."""

    return ThreadingHTTPServer(("127.0.0.1", port), Page)
