"""What ``coordexp launch`` will start: pure, from the validated configuration alone, before anything runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from coordexp.config import RunConfig
from coordexp.config.vllm import ServerEntry
from coordexp.engine.arguments import NAMES_ENABLE
from coordexp.engine.cpu import DIE_WITH_PARENT, SERVER_API_KEY, engine_environment
from coordexp.engine.guard_activation import (
    CONFIG_JSON,
    CONFIG_JSON_PATH,
    ENABLE,
    activation_environment,
)
from coordexp.errors import ConfigError
from coordexp.serving.serve.options import ServeOptions, serve_options

LOOPBACK = "127.0.0.1"
PLUGIN = Path(__file__).parents[2] / "engine" / "plugin" / "coordexp_rollout_plugin.py"
# The guard belongs to servers: what a shell exports must not reach the learner.
SERVER_ONLY = (ENABLE, CONFIG_JSON, CONFIG_JSON_PATH, NAMES_ENABLE, SERVER_API_KEY)
SWIFT_MODEL_TYPE = "qwen3_vl"  # the one that learners train; called the same in transformers and ms-swift
_SWIFT_ENGINE_KEYS = ("max_num_batched_tokens", "kv_cache_dtype", "cpu_offload_gb", "mm_encoder_tp_mode")


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """One program. ``environment`` is added to the launcher's own; ``secrets``: variable → the variable of the
    launcher's environment that holds its value, so that no plan ever shows one. ``devices`` [] is the CPU."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    devices: tuple[int, ...]
    log: Path
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A rollout server: started here, where it takes ``ports`` of ``listen_host``, or (``process`` None) expected to
    run where ``base_url`` says."""

    base_url: str
    group_port: int
    ports: tuple[int, ...]
    process: ProcessPlan | None
    listen_host: str = ""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that is started, in order: servers, then the learner once they answer. ``learner_grace_s``: how long
    a learner that is asked to end may take."""

    servers: tuple[ServerPlan, ...]
    learner: ProcessPlan
    wait_s: float
    repeat_terminate: Mapping[str, Any] | None
    api_key_env: str | None
    learner_grace_s: float = 30.0

    @property
    def server_base_urls(self) -> tuple[str, ...]:
        """A projection of ``rollout_matching.vllm.server.servers[]`` for launch wiring, in its order."""
        return tuple(server.base_url for server in self.servers)

    def to_json(self) -> str:
        """One line that :func:`plan_from_json` reads back."""
        return json.dumps(asdict(self), default=str)


_PLAN: TypeAdapter[LaunchPlan] = TypeAdapter(LaunchPlan)


def plan_from_json(text: str) -> LaunchPlan:
    """The inverse of :meth:`LaunchPlan.to_json`."""
    return _PLAN.validate_json(text)


def server_entries(config: RunConfig) -> tuple[ServerEntry, ...]:
    """The servers that this run asks; none where it generates by itself."""
    rollout = config.rollout_matching
    if rollout is None or rollout.rollout_backend != "vllm" or rollout.vllm.mode != "server":
        return ()
    assert rollout.vllm.server is not None, "the schema requires servers for mode: server"
    return rollout.vllm.server.servers


def plan_launch(
    config: RunConfig,
    config_path: Path,
    *,
    local: Sequence[bool],
    model_type: str,
    arguments: Sequence[str] = (),
    listen_host: str | None = None,
) -> LaunchPlan:
    """The processes of a run.

    Args:
        local: for each server whether its address is this machine's.
        model_type: ``model_type`` of the checkpoint's config.json.
        arguments: ``key.path=value``, as ``config`` was loaded with; programs that read the file are given them too.
        listen_host: where the servers listen, instead of what ``config`` says of each.

    Raises:
        ConfigError: device lists that do not fit the servers, or overlap.
    """
    launch, rollout = config.launch, config.rollout_matching
    entries = server_entries(config)
    devices = _devices_of_servers(config, local)
    logs = launch.log_dir or Path(config.training.output_dir) / "logs"
    named = (str(config_path), *arguments)
    servers = tuple(
        ServerPlan(
            entry.base_url.rstrip("/"),
            entry.group_port,
            (_port_of(config, index), entry.group_port) if here else (),
            _server_process(config, named, index, devices[index], logs, model_type, listen_host) if here else None,
            listen_host_of(entry, listen_host),
        )
        for index, (entry, here) in enumerate(zip(entries, local, strict=True))
    )
    guard = rollout.repeat_terminate if rollout is not None else None
    return LaunchPlan(
        servers=servers,
        learner=_learner_process(config, named, logs, local),
        wait_s=launch.wait_s,
        repeat_terminate=guard.model_dump() if guard is not None and guard.enabled else None,
        api_key_env=rollout.vllm.server.api_key_env if rollout is not None and rollout.vllm.server else None,
        learner_grace_s=_grace_s(config),
    )


def listen_host_of(entry: ServerEntry, given: str | None = None) -> str:
    """Where a server listens: as ``given``, as its entry says, or on the host of its ``base_url``."""
    return given or entry.listen_host or urlsplit(entry.base_url).hostname or ""


def _grace_s(config: RunConfig) -> float:
    """What the learner allows itself, and a moment to end."""
    return config.training.stop_within_s + 15.0


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
            "launch.learner_devices: missing, while servers have devices; name the learner's too, or it would train on "
            "the CPU"
        )
    for index, (one, here) in enumerate(zip(devices, local, strict=True)):
        if owner and here and not one:
            problems.append(f"launch.server_devices[{index}]: missing, while others have devices; name this server's")
    if problems:
        raise ConfigError("\n".join(problems))
    return devices


def _port_of(config: RunConfig, index: int) -> int:
    url = urlsplit(server_entries(config)[index].base_url)
    return url.port or (443 if url.scheme == "https" else 80)


def _server_process(
    config: RunConfig,
    named: Sequence[str],
    index: int,
    devices: tuple[int, ...],
    logs: Path,
    model_type: str,
    listen_host: str | None,
) -> ProcessPlan:
    rollout = config.rollout_matching
    assert rollout is not None and rollout.vllm.server is not None
    options = serve_options(config, index, None, len(devices), listen_host)
    key_env = rollout.vllm.server.api_key_env
    if config.launch.server == "swift":
        command = _swift_command(options, model_type)
        secrets = {} if key_env is None else {SERVER_API_KEY: key_env}
    else:
        command = (sys.executable, "-m", "coordexp", "serve", "--config", *named, "--index", str(index))
        command = command if listen_host is None else (*command, "--host", listen_host)
        secrets = {}
    environment = {
        **engine_environment({}, gpu=bool(devices)),
        **activation_environment(rollout.repeat_terminate),
        **({NAMES_ENABLE: "1"} if rollout.vllm.server.closed_names else {}),
        **_visible(devices),
        DIE_WITH_PARENT: "1",
    }
    return ProcessPlan(f"server{index}", command, environment, devices, logs / f"server{index}.log", secrets)


def foreign_to_swift(model_type: str) -> str:
    """What is wrong with a model of a family that ``swift rollout`` is not started for."""
    return (
        f"its config.json has model_type {model_type!r}, and swift rollout is started for {SWIFT_MODEL_TYPE} only; "
        "write launch.server: coordexp"
    )


def _swift_command(options: ServeOptions, model_type: str) -> tuple[str, ...]:
    """``swift rollout`` as ``coordexp serve`` would run with the same options."""
    if model_type != SWIFT_MODEL_TYPE:
        raise ConfigError(f"model.model: {foreign_to_swift(model_type)}")
    engine = dict(options.engine)
    further = {name: engine[name] for name in _SWIFT_ENGINE_KEYS if name in engine}
    flags: dict[str, Any] = {
        "model": options.model,
        "model_type": model_type,
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
        "vllm_engine_kwargs": json.dumps(further) if further else None,
    }
    words = [sys.executable, "-m", "swift.cli.rollout"]  # what `swift rollout` runs, without a process between
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return tuple(words)


def _learner_process(config: RunConfig, named: Sequence[str], logs: Path, local: Sequence[bool]) -> ProcessPlan:
    """torchrun on this machine alone. Its processes meet in a file: the store of a port would listen to every network,
    whatever its address says."""
    devices = tuple(config.launch.learner_devices)
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={max(1, len(devices))}"),
        *("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--local-addr={LOOPBACK}"),
        *("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", f"--shutdown-timeout={_grace_s(config):.0f}"),
        *("-m", "coordexp", "train", *named),
    )
    # Also the processes' own connections. Where a server is elsewhere, weights must find the way to it.
    on_loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if all(local) else {}
    environment = {
        **_visible(devices),
        **({} if devices else {"OMP_WAIT_POLICY": "passive"}),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **on_loopback,
    }
    return ProcessPlan("learner", command, environment, devices, logs / "learner.log")


def _visible(devices: Sequence[int]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
