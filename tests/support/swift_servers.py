"""A real ``swift rollout`` with CoordExp's plugin, started by the command that ``coordexp launch`` would use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordexp.config import load_config
from coordexp.launch.plan import LaunchPlan, ProcessPlan, plan_launch
from support.config_samples import write_yaml
from support.forked import SWIFT, Handle, forked
from support.forked import swift_rollout as rollout_program
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
    return plan_launch(load_config(path), path)


def with_arguments(process: ProcessPlan, **flags: Any) -> ProcessPlan:
    """``process`` with values of its flags changed: ms-swift takes the last one given."""
    more = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return replace(process, command=(*process.command, *more))


@contextmanager
def swift_rollout(folder: Path, config: Mapping[str, Any], **flags: Any) -> Iterator[RunningServer]:
    """``swift rollout``, healthy: :mod:`forked <support.forked>`, and its workers from it. From the command line it is
    started by ``coordexp launch``, and tested there. Ended with everything it started."""
    (server,) = plan_of(folder, config).servers
    assert server.process is not None
    process = with_arguments(server.process, **flags)
    assert process.command[1:3] == ("-m", "swift.cli.rollout")
    process.log.parent.mkdir(parents=True, exist_ok=True)
    environment = serving_environment(**process.environment)
    arguments = list(process.command[3:])
    started = Handle(forked(rollout_program, arguments, log=process.log, environment=environment, behind=SWIFT))
    running = RunningServer(started, server.base_url, server.group_port, process.log)
    try:
        wait_until_healthy(running)
        yield running
    finally:
        end(running)
