"""What ``coordexp serve`` runs: one entry of ``rollout_matching.vllm.server.servers``, as values."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordexp.config import RunConfig, resolved_rollout
from coordexp.config.rollout import ServerEntry, VLLMConfig
from coordexp.engine.arguments import section_arguments
from coordexp.engine.client import api_key_from_environment
from coordexp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One server. ``engine`` holds the arguments of vLLM's engine that the YAML sets; ``api_key`` is never shown.
    ``host``: where it listens; ``advertised_host``: what learners call it, usually the same. ``push_wait_s``: seconds
    that a push waits for answers under way; ``ready_s``: seconds that engines may take to start."""

    model: Path
    host: str
    advertised_host: str
    port: int
    group_port: int
    data_parallel_size: int
    tensor_parallel_size: int
    max_images: int
    engine: Mapping[str, Any]
    push_wait_s: float
    ready_s: float
    closed_names: bool = False
    api_key: str | None = field(default=None, repr=False)

    @property
    def world_size(self) -> int:
        """Number of devices that generate."""
        return self.data_parallel_size * self.tensor_parallel_size


def serve_options(
    config: RunConfig, index: int, data_parallel_size: int | None, num_gpus: int, listen_host: str | None = None
) -> ServeOptions:
    """Options of server ``index``.

    Args:
        config: the learner's own configuration. index: which entry of ``servers``.
        data_parallel_size: engines side by side; None uses every visible GPU, or one engine on the CPU.
        num_gpus: visible GPUs.
        listen_host: where it listens, instead of the entry's ``listen_host`` or the host of its ``base_url``.

    Raises:
        ConfigError: no such server, devices that do not divide, or an open address without a token.
    """
    entry, vllm = _entry(config, index)
    where = f"rollout_matching.vllm.server.servers[{index}].base_url"
    url = urlsplit(entry.base_url)
    advertised_host = url.hostname or ""
    host = listen_host or entry.listen_host or advertised_host
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"{where}: {entry.base_url} has no usable port ({error})") from error
    if url.path.strip("/"):
        raise ConfigError(f"{where}: {entry.base_url} has a path; coordexp serve answers at the root of its port only")
    assert vllm.server is not None
    api_key = api_key_from_environment(vllm.server.api_key_env)
    reached_at = next((name for name in (host, advertised_host) if not is_loopback(name)), None)
    if reached_at is not None and api_key is None:
        raise ConfigError(
            f"{where}: {reached_at} can be reached from other machines, and whoever reaches a rollout server can "
            "overwrite its weights; set rollout_matching.vllm.server.api_key_env, or use http://127.0.0.1"
        )
    return ServeOptions(
        model=Path(config.model.model),
        host=host,
        port=port,
        group_port=entry.group_port,
        data_parallel_size=_replicas(data_parallel_size, vllm.tensor_parallel_size, num_gpus),
        tensor_parallel_size=vllm.tensor_parallel_size,
        max_images=vllm.limit_mm_per_prompt.image,
        engine=section_arguments(vllm),
        push_wait_s=vllm.sync.timeout_s,
        ready_s=config.launch.wait_s,
        closed_names=vllm.server.closed_names,
        advertised_host=advertised_host,
        api_key=api_key,
    )


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _entry(config: RunConfig, index: int) -> tuple[ServerEntry, VLLMConfig]:
    rollout = config.rollout_matching
    if rollout is None or rollout.vllm.server is None:
        raise ConfigError(
            "rollout_matching.vllm.server: missing; coordexp serve runs one of its servers[] (base_url, group_port)"
        )
    servers = rollout.vllm.server.servers
    if not 0 <= index < len(servers):
        raise ConfigError(f"rollout_matching.vllm.server.servers has {len(servers)} entries, there is no [{index}]")
    return servers[index], resolved_rollout(config).vllm


def _replicas(wanted: int | None, tensor_parallel_size: int, num_gpus: int) -> int:
    if num_gpus == 0:
        return wanted or 1
    replicas = num_gpus // tensor_parallel_size if wanted is None else wanted
    if replicas < 1 or replicas * tensor_parallel_size > num_gpus:
        raise ConfigError(
            f"rollout_matching.vllm.tensor_parallel_size {tensor_parallel_size} x {max(1, replicas)} engines need "
            f"{max(1, replicas) * tensor_parallel_size} GPUs, {num_gpus} are visible; lower it, or choose devices with "
            "CUDA_VISIBLE_DEVICES"
        )
    return replicas


def device_groups(
    num_replicas: int, tensor_parallel_size: int, environment: Mapping[str, str] | None = None
) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each engine, cut from this process's own."""
    environment = os.environ if environment is None else environment
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    needed = num_replicas * tensor_parallel_size
    devices = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(needed)]
    return [",".join(devices[start : start + tensor_parallel_size]) for start in range(0, needed, tensor_parallel_size)]
