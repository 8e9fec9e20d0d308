"""Shipped configurations with rollout servers: by ``coordexp launch``, and trainers next to a running server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from as_shipped.starting import SERVERS, RowRun, check_row, finished, run_of
from as_shipped.table import LAUNCH, STARTED, Row, row
from support.ports import free_ports

pytest.importorskip("vllm")
LAUNCHED = [one for one in STARTED if one.command == LAUNCH and one.server is None]
TRAINED = [one for one in STARTED if one.server is not None]


@pytest.mark.parametrize("row", LAUNCHED, ids=lambda one: one.name)
def test_a_launch_starts_its_server_trains_and_ends_everything(row: Row, tmp_path: Path) -> None:
    check_row(row, tmp_path)


def with_three_servers(folder: Path) -> RowRun:
    """``server_3v1.yaml`` with all of its servers, on free ports."""
    ports = free_ports(6)
    three = [{"base_url": f"http://127.0.0.1:{ports[i]}", "group_port": ports[i + 3]} for i in range(3)]
    file = row("stage2_rollout_aligned/server_3v1")
    return run_of(replace(file, short={**file.short, SERVERS: three}), folder)


def test_a_dry_run_prints_what_would_be_started(tmp_path: Path) -> None:
    one = with_three_servers(tmp_path)
    output = finished([*one.command_by(LAUNCH), "--dry-run"], tmp_path)
    assert all(f"server{number} on the CPU" in output for number in range(3)) and "trainer on the CPU" in output
    assert not one.run.exists()


@pytest.mark.campaign
def test_three_servers_answer_one_trainer(tmp_path: Path) -> None:
    """The launch that ``server_3v1.yaml`` documents."""
    one = with_three_servers(tmp_path)
    one.command = one.command_by(LAUNCH)
    output = one.to_the_end()
    assert all(f"server{number}: answers at" in output for number in range(3)), output[-6000:]
    one.answers()


@pytest.mark.parametrize("row", TRAINED, ids=lambda one: one.name)
def test_a_trainer_next_to_a_server_runs_to_its_end(row: Row, server: RowRun, tmp_path: Path) -> None:
    check_row(row, tmp_path, servers=server.servers)
