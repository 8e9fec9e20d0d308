"""Fixtures of files that send requests to one server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordexp.engine.trainer.client import ServerClient
from support.rollout_servers import PlainServer, RunningServer


@pytest.fixture(scope="module")
def server(plain_server: PlainServer) -> RunningServer:
    """The server that files share; a file with a server of its own has a fixture of this name."""
    return plain_server.get().running


@pytest.fixture
def client(server: RunningServer) -> Iterator[ServerClient]:
    client = server.client()
    yield client
    client.close()
