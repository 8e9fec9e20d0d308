"""The trainer's side of a push to servers without an engine: each way in which weights could silently be wrong."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coordexp import distributed
from coordexp.config.rollout import SyncConfig
from coordexp.data.files import asset
from coordexp.engine.trainer.push import ServerPusher
from coordexp.errors import CoordExpError, RolloutError
from coordexp.rollouts.backend import AdapterWeights
from coordexp.weight_sync import buckets
from coordexp.weight_sync.receiver import WeightReceiver
from support.fake_servers import FakePushServer
from support.fused_model import SHAPES, FakeWeights, FusedModel
from support.ports import free_ports
from support.settings import client_to

Start = Callable[..., FakePushServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[FakePushServer] = []

    def start_one(**keys: Any) -> FakePushServer:
        servers.append(FakePushServer(**keys))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


@contextmanager
def syncing(servers: list[FakePushServer], source: Any, **keys: Any) -> Iterator[ServerPusher]:
    sync = ServerPusher(
        [server.client() for server in servers], source, SyncConfig(**{"bucket_mb": 1, "timeout_s": 15.0, **keys})
    )
    try:
        yield sync
    finally:
        sync.close()


@pytest.mark.parametrize("kind", [{}, {"swift": True}, {"plain": True}], ids=["ours", "swift and plugin", "swift"])
def test_every_kind_of_server_gets_the_weights(
    start: Start, kind: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    server, source = start(**kind), FakeWeights()
    with syncing([server], source) as sync:
        for version in (3, 4):
            source.step(version)
            report = sync.push(version)
            assert server.holds(source)
            assert report.weights.version == version
            assert (report.checksum is not None) is (version == 3 and "plain" not in kind)
    assert ("/reset_prefix_cache/" in server.asked) is ("plain" in kind)  # the others do it with the commit
    assert ("cannot be checked" in caplog.text) is ("plain" in kind)


@pytest.mark.parametrize("kind", [{}, {"swift": True}], ids=["ours", "swift and plugin"])
def test_large_weights_are_written_in_place_once_proven(
    start: Start, kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "LONE_PIECE_BYTES", 25)  # k, v, norm and the bias travel together
    server, source = start(**kind), FakeWeights()
    in_place = []
    with syncing([server], source, checksum_every=1) as sync:
        for version in (1, 2, 3):
            source.step(version)
            sync.push(version)
            assert server.holds(source)
            in_place.append(server.receiver.report()["num_in_place"])
        norm = server.model.get_submodule("language.model.layer.norm")
        norm.weight = torch.nn.Parameter(torch.zeros(3))  # an engine that reallocates its weights
        sync.push(4)
        assert server.holds(source)
        in_place.append(server.receiver.report()["num_in_place"])
    assert in_place == [0, len(SHAPES) - 4, len(SHAPES) - 4, 0]


def test_several_servers_get_one_push(start: Start) -> None:
    servers, source = [start(), start(), start(swift=True)], FakeWeights()
    with syncing(servers, source) as sync:
        sync.push(1)
    assert all(server.holds(source) for server in servers)
    assert source.given == len(SHAPES)  # read once, not once per server


def test_servers_receive_at_the_same_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server receives a bucket only while the other one does too."""
    servers, source, together = [start(), start()], FakeWeights(), threading.Barrier(2)
    receive = WeightReceiver.receive

    def receive_together(receiver: WeightReceiver, payload: Any) -> None:
        together.wait(10)
        receive(receiver, payload)
        together.wait(10)

    monkeypatch.setattr(WeightReceiver, "receive", receive_together)
    with syncing(servers, source) as sync:
        sync.push(1)
    assert all(server.holds(source) for server in servers)


def test_weights_are_sent_in_the_engines_dtype(start: Start) -> None:
    server, source = start(dtype="bfloat16"), FakeWeights()
    with syncing([server], source) as sync:
        report = sync.push(1)
    assert server.holds(source, torch.bfloat16)
    assert report.bytes == sum(2 * value.numel() for value in source.values.values())


def test_servers_with_different_dtypes_are_refused(start: Start) -> None:
    with (
        syncing([start(), start(dtype="bfloat16")], FakeWeights()) as sync,
        pytest.raises(RolloutError, match=r"different types.*vllm\.dtype"),
    ):
        sync.push(1)


def test_a_push_fails_if_one_server_fails_and_the_next_push_repairs_it(start: Start) -> None:
    good, bad = start(), start()
    source = FakeWeights()

    with syncing([good, bad], source) as sync:
        bad.reply = _with_error(bad, "/update_flattened_params/", "no room for the bucket")  # type: ignore[method-assign]
        with pytest.raises(RolloutError, match="no room for the bucket"):
            sync.push(1)
        bad.reply = type(bad).reply.__get__(bad)  # type: ignore[method-assign]
        source.step(2)
        sync.push(2)
    assert good.holds(source) and bad.holds(source)


def _with_error(server: FakePushServer, endpoint: str, message: str) -> Callable[[str, Any], tuple[int, Any]]:
    usual = type(server).reply.__get__(server)
    return lambda path, body: (500, {"error": message}) if path == endpoint else usual(path, body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_version": 7}, "it has version 7 of trainer .* after version 1 of trainer .* was pushed"),
        ({"trainer_id": "theirs"}, "it has version 1 of trainer theirs after version 1 of trainer"),
        ({"failure": "ValueError: x"}, "ValueError: x"),
        ({"checksum": "0" * 32}, "the checksum of its weights is 0000"),
    ],
    ids=["version", "trainer", "failure", "checksum"],
)
def test_worker_reports_are_checked(start: Start, change: dict[str, Any], message: str) -> None:
    server = start()
    server.interfere["/process_weights_after_loading/"] = lambda reply: {"reports": [{**reply["reports"][0], **change}]}
    with syncing([server], FakeWeights()) as sync, pytest.raises(RolloutError, match=message):
        sync.push(1)


def test_a_push_times_out(start: Start) -> None:
    server = start()

    def slowly(reply: Any) -> Any:
        time.sleep(3)
        return reply

    server.interfere["/update_flattened_params/"] = slowly
    begun = time.monotonic()
    with syncing([server], FakeWeights(), timeout_s=1.0) as sync, pytest.raises(RolloutError):
        sync.push(1)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("collective", [True, False])
def test_ranks_without_servers_join_the_collective_reads(collective: bool) -> None:
    source = FakeWeights()
    source.collective = collective
    report = ServerPusher([], source, SyncConfig()).push(1)
    assert source.given == (len(SHAPES) if collective else 0) and report.checksum is None


def test_a_failed_push_completes_the_collective_reads(start: Start) -> None:
    server, source = start(), FakeWeights()
    source.collective = True
    server.reply = _with_error(server, "/init_communicator/", "no room")  # type: ignore[method-assign]
    with syncing([server], source) as sync, pytest.raises(CoordExpError):
        sync.push(1)
    assert source.given == len(SHAPES)


@pytest.mark.parametrize("failure", [RolloutError("the cable"), RuntimeError("CUDA out of memory")])
def test_any_error_in_a_push_is_raised_on_every_rank(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeWeights):
        collective = True

        def full(self) -> Any:
            raise failure

    told: list[Exception | None] = []
    tell = distributed.raise_first_failure
    monkeypatch.setattr(distributed, "raise_first_failure", lambda what, where: (told.append(what), tell(what, where)))
    with pytest.raises(type(failure), match=str(failure)):
        ServerPusher([], Failing(), SyncConfig()).push(1)
    assert told == [failure]


class Broken(FakeWeights):
    """Its adapter cannot be read."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure

    def adapter(self) -> AdapterWeights | None:
        raise self.failure


ADAPTER = (("a", torch.zeros(2)),)
MODEL, OTHER_MODEL = (asset(f"checkpoints/{name}") for name in ("demo-stage1", "demo-incomplete"))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (FakeWeights(None), "trains no adapter"),
        (FakeWeights(AdapterWeights({"r": 4}, ADAPTER, MODEL, outside_llm=True)), "vision tower"),
        (FakeWeights(AdapterWeights({"r": 4}, ADAPTER, OTHER_MODEL)), "its model has the fingerprint"),
        (FakeWeights(AdapterWeights({"r": 4}, ADAPTER, MODEL)), "update_adapter_flattened_param"),
        *((Broken(kind("no file")), "no file")
          for kind in (RuntimeError, ValueError, TypeError, KeyError, OSError, CoordExpError)),
    ],
    ids=lambda value: type(getattr(value, "failure", None)).__name__ if isinstance(value, Broken) else None,
)  # fmt: skip
def test_after_any_failed_adapter_push_all_pushes_are_full(
    start: Start, caplog: pytest.LogCaptureFixture, source: FakeWeights, reason: str
) -> None:
    server = start(model=MODEL)
    server.reply = _with_error(server, "/update_adapter_flattened_param/", "started without adapters")  # type: ignore[method-assign]
    with syncing([server], source, mode="adapter") as sync:
        with caplog.at_level(logging.WARNING):
            first = sync.push(1)
        assert first.mode == "full" and first.fallback is not None and reason in first.fallback
        assert "pushes are full from here on" in caplog.text
        source.step(2)
        second = sync.push(2)
        assert (second.mode, second.fallback, sync.mode) == ("full", None, "full")
        assert server.holds(source)
    strict = ServerPusher([server.client()], source, SyncConfig(mode="adapter", fallback_to_full=False, timeout_s=15.0))
    with pytest.raises(RolloutError, match=r"sync\.fallback_to_full: true"):
        strict.push(3)
    strict.close()


def test_adapters_of_a_model_with_adapters_are_not_pushed(start: Start, tmp_path: Path) -> None:
    """Engines load the plain model below both."""
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    source = FakeWeights(AdapterWeights({"r": 4}, ADAPTER, tmp_path))
    strict = {"mode": "adapter", "fallback_to_full": False}
    with syncing([start()], source, **strict) as sync, pytest.raises(RolloutError, match="adapters of its own"):
        sync.push(1)


def test_a_server_belongs_to_the_trainer_that_is_connected(start: Start) -> None:
    server, source = start(), FakeWeights()
    source.step(5)
    with syncing([server], source) as first:
        first.push(1)
        with (
            syncing([server], FakeWeights()) as second,
            pytest.raises(
                RolloutError,
                match=rf"belongs to trainer {first.trainer_id} \(process \d+ on .*\), which is connected, so "
                rf"trainer {second.trainer_id} \(process .*\) cannot push",
            ),
        ):
            second.push(1)
        assert server.holds(source)
        source.step(6)
        first.push(2)
        assert server.holds(source)
    with syncing([server], FakeWeights()) as third:
        assert third.push(1).weights.trainer_id == third.trainer_id, "the owner has ended"


def test_a_trainer_that_is_killed_no_longer_owns_its_server(start: Start) -> None:
    server = start()
    killed = ServerPusher([server.client()], FakeWeights(), SyncConfig(bucket_mb=1, timeout_s=15.0))
    killed.push(1)
    killed.links[0].close(notify=False)  # the system closes its connection, and nobody tells the server
    with syncing([server], FakeWeights()) as second:
        second.push(2)
        with pytest.raises(RolloutError, match="has pushed its weights since this one"):
            killed.push(3)


def test_a_restarted_server_gets_the_next_push(start: Start) -> None:
    server, source = start(), FakeWeights()
    with syncing([server], source) as sync:
        sync.push(1)
        # Another process at the same address: checkpoint weights, no group, no version.
        server.receiver.close()
        server.receiver = WeightReceiver(FusedModel(), torch.device("cpu"), sharded=False)
        source.step(2)
        assert not server.holds(source)
        sync.push(2)
        assert server.holds(source) and server.receiver.report()["weight_version"] == 2


def test_a_group_port_in_use_is_named_before_the_timeout(start: Start) -> None:
    server = start()
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


def test_an_unreachable_group_port_is_named_before_the_timeout(start: Start) -> None:
    """As with a firewall: HTTP passes, but the two sides cannot connect."""
    server = start()
    (port,) = free_ports(1)
    client = client_to(server.client().base_url, port, timeout_s=2.0)
    usual = server._act
    server._act = lambda path, body: usual(path, {**body, "port": server.group_port} if "port" in body else body)  # type: ignore[method-assign]
    sync = ServerPusher([client], FakeWeights(), SyncConfig(timeout_s=60.0))
    began = time.monotonic()
    with pytest.raises(RolloutError, match="not every member connected within"):
        sync.push(1)
    assert time.monotonic() - began < 20
    sync.close()
