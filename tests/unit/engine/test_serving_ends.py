"""How ``coordexp serve`` takes its address, and how it ends."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.checkpoints.folder import Checkpoint
from coordexp.data.files import asset
from coordexp.engine.server.serving import note_without_adapters, take_address
from coordexp.errors import RolloutError
from coordexp.launch.plan import can_listen
from support.installed import needs

TWICE = """
import asyncio, logging, os, signal, socket, sys
from contextlib import asynccontextmanager

import uvicorn
from coordexp.engine.server.serving import serve_to_the_end
from fastapi import FastAPI

@asynccontextmanager
async def lifespan(_):
    asyncio.get_running_loop().call_later(0.2, interrupt)
    yield
    print("closed")

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)

logging.basicConfig(level=logging.ERROR)
signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
listener = socket.create_server(("127.0.0.1", 0))
asyncio.run(serve_to_the_end(uvicorn.Config(FastAPI(lifespan=lifespan), log_config=None), listener))
"""


@needs("fastapi", "uvicorn")
def test_two_ctrl_c_at_once_end_a_server_without_a_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("closed\n", "", 130)


def test_the_address_of_a_server_that_is_still_starting_is_taken() -> None:
    """Two launches with the same ports would otherwise both start, and the second one train with the first's server."""
    with take_address("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(RolloutError, match="this address cannot be taken"):
            take_address("127.0.0.1", port)
        assert not can_listen("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    assert can_listen("127.0.0.1", port)


def test_a_folder_with_adapters_is_said_to_answer_without_them(tmp_path: Path) -> None:
    base = asset("checkpoints/demo-stage1")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}), encoding="utf-8")
    note = note_without_adapters(Checkpoint.open(tmp_path))
    assert note is not None and f"until then answers are those of {base}, without them" in note
    assert note_without_adapters(Checkpoint.open(base)) is None
