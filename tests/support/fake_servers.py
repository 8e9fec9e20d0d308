"""Fake servers over real HTTP: one of rollouts, and one of weights with a real group and receiver; without engines."""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from coordexp.checkpoints.fingerprints import fingerprint
from coordexp.engine.trainer.client import ServerClient
from coordexp.engine.wire.arguments import FINGERPRINT, refusal_of_owner
from coordexp.errors import RolloutError
from coordexp.weight_sync.group import GroupAddress
from coordexp.weight_sync.receiver import WeightReceiver
from support.fused_model import SHAPES, FakeWeights, FusedModel
from support.ports import free_ports
from support.settings import client_to

Reply = tuple[int, Any]


@functools.cache
def numbered_image(number: int) -> Path:
    """The smallest possible image file, named ``<number>.png``."""
    path = Path(_IMAGES.name) / f"{number}.png"
    Image.new("RGB", (1, 1)).save(path)
    return path


_IMAGES = tempfile.TemporaryDirectory(prefix="coordexp-numbered-")


class JsonServer:
    """Answers requests by :meth:`reply` on a free port, from its start to :meth:`close`; bytes are sent as they are."""

    def __init__(self) -> None:
        fake = self
        self.received: tuple[str, dict[str, str]] = ("", {})  # method and headers of the last request

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                status, reply = fake.reply(self.path, json.loads(self.rfile.read(size)) if size else {})
                fake.received = self.command, dict(self.headers)
                content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the client has given up, as a test may want
                    self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, format: str, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        raise NotImplementedError

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class FakeRolloutServer(JsonServer):
    """A test replaces ``infer`` to choose or spoil the answers.

    ``wedged``: accepts every request and answers none until the fake is closed.
    """

    def __init__(self, world_size: int = 1, status: dict[str, Any] | None = None) -> None:
        self.world_size = world_size
        self.status = status
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.infer: Callable[[dict[str, Any]], Reply] = lambda body: (200, [])
        self.wedged = threading.Event()
        self._ended = threading.Event()
        super().__init__()

    def __enter__(self) -> FakeRolloutServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.close()

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


class FakePushServer(JsonServer):
    """One worker. ``swift``: answers updates before their bytes arrive, and 200 to every failure, as ms-swift does;
    ``plain``: has no ``/status/`` and reports nothing, as ms-swift without our plugin. ``model``: the folder that it
    says it takes adapters for."""

    def __init__(
        self, *, swift: bool = False, plain: bool = False, dtype: str = "float32", model: Path | None = None
    ) -> None:
        self.fingerprint = None if model is None else fingerprint(model)
        self.model = FusedModel().to(getattr(torch, dtype))
        self.receiver = WeightReceiver(self.model, torch.device("cpu"), sharded=False)
        self.asked: list[str] = []
        self.interfere: dict[str, Callable[[Any], Any]] = {}  # endpoint → what happens to its reply
        self._swift = swift or plain
        self._plain = plain
        self._dtype = dtype
        self._lock = threading.Lock()  # workers do one thing after another
        self._threads: list[threading.Thread] = []
        (self.group_port,) = free_ports(1)
        super().__init__()

    def client(self, timeout_s: float = 20.0) -> ServerClient:
        return client_to(self.url, self.group_port, timeout_s=timeout_s)

    def holds(self, source: FakeWeights, dtype: torch.dtype = torch.float32) -> bool:
        read = dict(self.receiver.layout.read_back(SHAPES))
        return all(torch.equal(read[name], value.to(dtype)) for name, value in source.values.items())

    def close(self) -> None:
        super().close()
        with self._lock:
            self.receiver.close()

    def reply(self, path: str, body: dict[str, Any]) -> Reply:
        self.asked.append(path)
        try:
            reply = self._act(path, body)
        except Exception as error:  # any: a server reports it to its caller
            return (200, {"message": "received"}) if self._swift else (500, {"error": str(error)})
        if path in self.interfere:
            reply = self.interfere[path](reply)
        return (404, {}) if reply is None else (200, reply)

    def _act(self, path: str, body: Any) -> Any:
        if path == "/get_world_size/":
            return {"world_size": 1}
        if path == "/status/":
            return None if self._plain else {"workers": [self._status()], FINGERPRINT: self.fingerprint}
        if path.endswith("_communicator/"):
            reason = refusal_of_owner([self.receiver.owner], body["trainer"])
            if reason is not None:
                raise RolloutError(reason)
        if path == "/init_communicator/":
            address = GroupAddress(
                "127.0.0.1", body["port"], 0, body["world_size"], body["timeout_s"], body.get("token", "")
            )
            return self._work(lambda: self.receiver.open(address, body["trainer"]))
        if path == "/close_communicator/":
            return self._work(self.receiver.close)
        if path == "/update_flattened_params/":
            return self._work(lambda: self.receiver.receive(body["metadatas"]))
        if path == "/process_weights_after_loading/":
            return self._commit(body)
        return {"message": "done"}

    def _work(self, act: Callable[[], None]) -> Any:
        if not self._swift:
            with self._lock:
                act()
            return {"message": "done"}

        def behind() -> None:
            with self._lock:
                try:
                    act()
                except Exception:
                    return  # swallowed, as ms-swift does it; the receiver has noted it

        for thread in self._threads:
            thread.join()
        self._threads = [threading.Thread(target=behind)]
        self._threads[0].start()
        return {"message": "request received"}

    def _commit(self, body: Any) -> Any:
        for thread in self._threads:
            thread.join()
        with self._lock:
            try:
                report = self.receiver.commit(
                    body["weight_version"], body["wants_checksum"], lambda: None, body["trainer_id"]
                )
            except Exception:
                if not self._swift:
                    raise
                report = None
        return {"message": "committed"} if self._plain else {"message": "committed", "reports": [report]}

    def _status(self) -> dict[str, Any]:
        return {**self.receiver.report(), "device": "cpu", "dtype": self._dtype}
