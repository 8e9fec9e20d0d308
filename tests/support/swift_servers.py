"""A real ``swift rollout`` with CoordExp's plugin, started by the command that ``coordexp launch`` would use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordexp.config import load_config
from coordexp.serving.launch.plan import LaunchPlan, ProcessPlan
from coordexp.serving.launch.preflight import make_plan
from support.config_samples import write_yaml
from support.rollout_servers import RunningServer, end, server_config, serving_environment, wait_until_healthy

# The sharpened tiny model repeats itself at different steps: of six answers of 64 tokens, two stay below these limits.
GUARD: dict[str, Any] = {
    "enabled": True,
    "min_new_tokens": 40,
    "max_consecutive_token_repeats": 30,
    "ngram_size": 20,
    "ngram_repeats": 2,
}
GUARDED_TOKENS = 64


def guarded_config(folder: Path, server: str, **keys: Any) -> dict[str, Any]:
    """As :func:`rollout_servers.server_config`, with the guard on. ``server``: the program, swift or coordexp."""
    return server_config(
        folder,
        launch={"server": server, "wait_s": 240.0},
        rollout_matching__repeat_terminate=GUARD,
        rollout_matching__max_new_tokens=GUARDED_TOKENS,
        **keys,
    )


def plan_of(folder: Path, config: Mapping[str, Any], name: str = "launch.yaml") -> LaunchPlan:
    """What ``coordexp launch`` would start for this configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_yaml(folder, dict(config), name)
    return make_plan(load_config(path), path)


def with_arguments(process: ProcessPlan, **flags: Any) -> ProcessPlan:
    """``process`` with values of its flags changed: ms-swift takes the last one given."""
    more = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return replace(process, command=(*process.command, *more))


@contextmanager
def started_process(process: ProcessPlan, base_url: str, group_port: int) -> Iterator[RunningServer]:
    """The server of a plan, not waited for; ended with everything it started."""
    process.log.parent.mkdir(parents=True, exist_ok=True)
    with process.log.open("wb") as log:
        running = subprocess.Popen(
            process.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=serving_environment(**process.environment),
            start_new_session=True,
        )
    server = RunningServer(running, base_url, group_port, process.log)
    try:
        yield server
    finally:
        end(server)


@contextmanager
def swift_rollout(folder: Path, config: Mapping[str, Any], **flags: Any) -> Iterator[RunningServer]:
    """``swift rollout``, healthy."""
    (server,) = plan_of(folder, config).servers
    assert server.process is not None
    process = with_arguments(server.process, **flags)
    with started_process(process, server.base_url, server.group_port) as running:
        wait_until_healthy(running)
        yield running
