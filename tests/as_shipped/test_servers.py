"""Shipped configurations with rollout servers: by ``coordexp launch``, and trainers next to a running server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from as_shipped.starting import SERVERS, RowRun, check_row, finished, started
from as_shipped.table import LAUNCH, ROWS, SERVED, Row, row
from support.ports import free_ports
from support.rollout_servers import BOOT_S
from support.settings import client_to

pytest.importorskip("vllm")
# The token that server_multi_node.yaml asks for, in every process here.
TOKEN = {"COORDEXP_API_KEY": "as-shipped"}
LAUNCHED = [one for one in ROWS if one.command == LAUNCH and one.server is None]
TRAINED = [one for one in ROWS if one.server is not None]


@pytest.mark.parametrize("row", LAUNCHED, ids=lambda one: one.name)
def test_a_launch_starts_its_server_trains_and_ends_everything(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


def test_a_dry_run_prints_what_would_be_started(tmp_path: Path) -> None:
    """With the file's three servers, on free ports."""
    ports = free_ports(6)
    three = [{"base_url": f"http://127.0.0.1:{ports[i]}", "group_port": ports[i + 3]} for i in range(3)]
    file = row("stage2_rollout_aligned/server_3v1")
    one = RowRun(replace(file, short={**file.short, SERVERS: three}), tmp_path)
    output = finished([*one.command_by(LAUNCH), "--dry-run"], tmp_path)
    assert all(f"server{number} on the CPU" in output for number in range(3)) and "learner on the CPU" in output
    assert not one.run.exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowRun]:
    """``coordexp serve`` of the row that the others name, up and answering."""
    one = RowRun(row(SERVED), tmp_path_factory.mktemp("serve"))
    command = [*one.command_by("coordexp serve configs/{name}.yaml --index 0")]
    process = started(command, one.folder, **TOKEN)
    try:
        process.until(lambda: is_healthy(one), BOOT_S, "a healthy server")
        yield one
        process.process.terminate()
        process.end(30.0, "the server's end")
        process.nothing_is_left()
    finally:
        process.kill()


def is_healthy(served: RowRun) -> bool:
    from coordexp.errors import RolloutError

    (entry,) = served.servers
    client = client_to(entry["base_url"], entry["group_port"], timeout_s=5.0, infer_timeout_s=5.0)
    try:
        client.health(timeout_s=5.0)
    except RolloutError:
        return False
    finally:
        client.close()
    return True


@pytest.mark.parametrize("row", TRAINED, ids=lambda one: one.name)
def test_a_trainer_next_to_a_server_runs_to_its_end(row: Row, server: RowRun, tmp_path: Path) -> None:
    check_row(row, tmp_path, servers=server.servers, environment=TOKEN)
