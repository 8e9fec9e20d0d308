"""A hanging, dying or dead ``coordexp serve``: the trainer's errors, and no process is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coordexp.config.rollout import SyncConfig
from coordexp.engine.trainer.push import ServerPusher
from coordexp.errors import RolloutError, ServerRefused, ServerTimeout, ServerUnreachable
from coordexp.modeling.trainer_weights import TrainerWeights
from support.rollout_servers import (
    RunningServer,
    all_gone,
    load_served,
    payload,
    requests_of,
    server_config,
    serving,
    serving_environment,
    started,
    tail,
)

TOKEN = "a-token-that-is-not-logged"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    config = server_config(folder, rollout_matching__vllm__server__api_key_env="ROLLOUT_TOKEN")
    how: dict[str, Any] = {
        "arguments": ["--data-parallel-size", "2"],
        "environment": serving_environment(ROLLOUT_TOKEN=TOKEN),
    }
    with serving(folder, config, **how) as running:
        yield running


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return held


def test_a_trainer_without_the_token_is_refused(server: RunningServer) -> None:
    for key in (None, "another"):
        stranger = server.client(api_key=key)
        stranger.health()  # probes hold no token
        with pytest.raises(ServerRefused, match=r"401.*api_key_env") as refused:
            stranger.infer(payload(requests_of(load_served(), 1)))
        assert TOKEN not in str(refused.value)
        stranger.close()
    assert TOKEN not in server.log.read_text(errors="replace")


# One server for all faults in order: starting one for each would take a minute.
def test_a_servers_life_from_start_to_exit(server: RunningServer) -> None:
    trainer = load_served()
    requests = requests_of(trainer, 3)
    client = server.client(api_key=TOKEN, timeout_s=3.0, infer_timeout_s=3.0)
    sync = ServerPusher([client], TrainerWeights(trainer.model), SyncConfig(bucket_mb=1, timeout_s=3.0))
    family = server.children()

    assert client.world_size() == 2
    sync.push(1)
    status = client.status()
    assert status is not None
    assert [worker["weight_version"] for worker in status["workers"]] == [1, 1]
    assert len({worker["pid"] for worker in status["workers"]}) == 2
    assert len(client.infer(payload(requests, 4))) == 3

    # Wedged: it accepts connections and never answers.
    server.process.send_signal(signal.SIGSTOP)
    for act in (client.health, lambda: client.infer(payload(requests)), lambda: sync.push(2)):
        begun = time.monotonic()
        with pytest.raises(ServerTimeout, match="no answer within"):
            act()
        assert time.monotonic() - begun < 15
    server.process.send_signal(signal.SIGCONT)
    patient = server.client(api_key=TOKEN)
    patient.wait_until_healthy(30)
    recovered = ServerPusher([patient], TrainerWeights(trainer.model), SyncConfig(bucket_mb=1, timeout_s=60.0))
    recovered.push(3)
    assert len(patient.infer(payload(requests, 4))) == 3

    # One of its engines hangs; the HTTP process still answers.
    os.kill(status["workers"][0]["pid"], signal.SIGSTOP)
    assert until(lambda: patient.engine_stall_seconds() > 4.0), "a hung engine was not detected"
    os.kill(status["workers"][0]["pid"], signal.SIGCONT)
    assert until(lambda: patient.engine_stall_seconds() < 3.0), "the engine responds again"

    # One of its engines dies.
    os.kill(status["workers"][1]["pid"], signal.SIGKILL)

    def is_unhealthy() -> bool:
        try:
            patient.health()
        except ServerRefused as refused:
            assert refused.status == 503
            return True
        return False

    assert until(is_unhealthy), "a dead engine was not detected"
    with pytest.raises(RolloutError):
        patient.infer(payload(requests))
    begun = time.monotonic()
    with pytest.raises(RolloutError):
        recovered.push(4)
    assert time.monotonic() - begun < 60

    # And it is killed itself.
    server.process.kill()
    server.process.wait()
    with pytest.raises(ServerUnreachable, match="start it"):
        patient.infer(payload(requests))
    assert all_gone(family), f"left behind by the server: {tail(server.log)}"
    client.close()
    patient.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT], ids=lambda sent: sent.name)
def test_stopping_a_starting_server_ends_all_its_processes(
    tmp_path_factory: pytest.TempPathFactory, sent: signal.Signals
) -> None:
    folder = tmp_path_factory.mktemp("server")
    with started(folder, server_config(folder)) as server:
        assert until(lambda: bool(server.children()) or server.process.poll() is not None, 90), tail(server.log)
        time.sleep(1.0)
        family = server.children()
        server.process.send_signal(sent)
        assert server.process.wait(60) != 0
        assert all_gone(family)


def test_an_engine_that_starts_too_slowly_is_stopped(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("server")
    with started(folder, server_config(folder, launch__wait_s=0.5)) as server:
        assert server.process.wait(90) == 2
        assert all_gone(server.children())
    assert "launch.wait_s" in tail(server.log)


def test_a_port_in_use_is_reported_before_an_engine_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("server")
    config = server_config(folder)
    port = int(config["rollout_matching"]["vllm"]["server"]["servers"][0]["base_url"].rpartition(":")[2])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with started(folder, config) as server:
            assert server.process.wait(90) == 2
    assert "this address cannot be taken" in tail(server.log)
