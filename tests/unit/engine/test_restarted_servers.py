"""Servers that are not what they were: started anew between two pushes, or behind a group port that leads nowhere."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp.config.rollout import SyncConfig
from coordexp.engine.protocol import infer_payload
from coordexp.engine.push import ServerPusher
from coordexp.errors import RolloutError
from coordexp.modeling.inputs import build_messages
from coordexp.records import RolloutRequest
from coordexp.weight_sync.receiver import WeightReceiver
from support.fake_servers import FakePushServer
from support.fused_model import FakeWeights, FusedModel
from support.ports import free_ports
from support.settings import client_to, decoding


@pytest.fixture
def server() -> Iterator[FakePushServer]:
    server = FakePushServer()
    yield server
    server.close()


def start_anew(server: FakePushServer) -> None:
    """Another process at the same address: checkpoint weights, no group, no version."""
    server.receiver.close()
    server.receiver = WeightReceiver(FusedModel(), torch.device("cpu"), sharded=False)


def test_a_server_that_was_started_anew_gets_the_next_push_as_if_nothing_had_been(server: FakePushServer) -> None:
    source = FakeWeights()
    sync = ServerPusher([server.client()], source, SyncConfig(bucket_mb=1, timeout_s=15.0))
    sync.push(1)
    start_anew(server)
    source.step(2)
    assert not server.holds(source)
    sync.push(2)
    assert server.holds(source) and server.receiver.report()["weight_version"] == 2
    sync.close()


def test_a_group_port_that_another_program_has_is_named_within_the_deadline(server: FakePushServer) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", server.group_port))
        other.listen()
        sync = ServerPusher([server.client(timeout_s=2.0)], FakeWeights(), SyncConfig(timeout_s=60.0))
        began = time.monotonic()
        with pytest.raises(RolloutError, match=f"{server.group_port}.*choose another group_port"):
            sync.push(1)
        assert time.monotonic() - began < 15
        sync.close()


def test_a_group_port_that_only_the_server_reaches_is_named_within_the_deadline(server: FakePushServer) -> None:
    """As behind a firewall: HTTP passes, and the two sides never meet."""
    (port,) = free_ports(1)
    client = client_to(server.client().base_url, port, timeout_s=2.0)
    usual = server._act
    server._act = lambda path, body: usual(path, {**body, "port": server.group_port} if "port" in body else body)  # type: ignore[method-assign]
    sync = ServerPusher([client], FakeWeights(), SyncConfig(timeout_s=60.0))
    began = time.monotonic()
    with pytest.raises(RolloutError, match="not every member came within"):
        sync.push(1)
    assert time.monotonic() - began < 20
    sync.close()


def test_ms_swift_takes_what_servers_are_sent() -> None:
    """Its own classes read it: messages, images as strings, and how to decode."""
    swift: Any = pytest.importorskip("swift.infer_engine.protocol")
    request = RolloutRequest(
        "s", Path("/images/a b.png"), build_messages(Path("/images/a b.png"), "Detect ü.", "S"), (1,)
    )
    options = decoding(9, temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.1)
    body = infer_payload([request], 17, options, str)
    (one,) = body["infer_requests"]
    assert set(one) <= {field.name for field in fields(swift.RolloutInferRequest)}
    read = swift.RolloutInferRequest(**one)
    assert read.images == ["/images/a b.png"] and [m["role"] for m in read.messages] == ["system", "user"]
    config = swift.RequestConfig(**body["request_config"])
    assert (config.seed, config.max_tokens, config.temperature, config.top_p, config.top_k) == (17, 9, 0.5, 0.9, 7)
    assert (config.repetition_penalty, config.n, config.return_details) == (1.1, 1, True)
