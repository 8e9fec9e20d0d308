"""Fixtures of files that talk to one server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordexp.engine.client import ServerClient
from support.rollout_servers import RunningServer


@pytest.fixture
def client(server: RunningServer) -> Iterator[ServerClient]:
    client = server.client()
    yield client
    client.close()
