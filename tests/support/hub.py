"""A hub of models on this machine, which speaks the part of the Hugging Face hub's API that ``snapshot_download`` uses:
``HF_ENDPOINT=hub.url`` makes any process fetch from it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class HubOnDisk:
    """``models``: folders by ``OWNER/NAME``; ``commits``: their commits by branch, tag or commit. ``gated``: models
    whose files are refused; ``slow``: seconds before each 64 KiB of a file; ``requests``: method and path of each,
    in order; ``silent``: accepts connections and never answers; ``page``: status and HTML of every answer, as
    a proxy's."""

    models: Mapping[str, Path]
    commits: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    gated: frozenset[str] = frozenset()
    slow: float = 0.0
    silent: bool = False
    page: tuple[int, bytes] | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose contents were sent, sorted."""
        sent = [path for method, path in self.requests if method == "GET" and "/resolve/" in path]
        return sorted(path.rpartition("/")[2] for path in sent)

    def environment(self, home: Path) -> dict[str, str]:
        """For a process that fetches from here into the cache below ``home``."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "NO_PROXY": "*"}


@contextmanager
def serving(hub: HubOnDisk) -> Iterator[HubOnDisk]:
    class Handler(_Answers):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    of: HubOnDisk
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.of.requests.append((self.command, path))
        if self.of.silent:
            time.sleep(60)
            return
        if self.of.page is not None:
            status, html = self.of.page
            return self._send(html, {"Content-Type": "text/html"}, status)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._about("/".join(parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "EntryNotFound")

    def _about(self, repo: str, rest: list[str]) -> None:
        folder = self.of.models.get(repo)
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        commit = self._commit("/".join(rest[1:]) if rest else "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size,
                 "oid": _etag(path)[:40]}
                for path in files
            ]  # fmt: skip
            return self._send(json.dumps(listed).encode(), {"Content-Type": "application/json"})
        siblings = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
        about = {"id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": siblings, "tags": []}
        self._send(json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        folder, commit = self.of.models.get(repo), self._commit(revision)
        if folder is None or commit is None or not (folder / name).is_file():
            return self._refuse(404, "EntryNotFound")
        if repo in self.of.gated:
            return self._refuse(403, "GatedRepo")
        headers = {"ETag": f'"{_etag(folder / name)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        self._send((folder / name).read_bytes(), headers)

    def _commit(self, revision: str) -> str | None:
        known = self.of.commits
        return known.get(revision) or (revision if revision in known.values() else None)

    def _send(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(body), 1 << 16):
            if self.of.slow and "/resolve/" in self.path:
                time.sleep(self.of.slow)
            self.wfile.write(body[start : start + (1 << 16)])

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)


def _etag(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
