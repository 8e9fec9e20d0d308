"""Settings of one ``coordexp serve``, from the trainer's configuration. Imports neither torch nor vLLM."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordexp.addresses import split_url
from coordexp.config import RunConfig, resolved_rollout
from coordexp.engine.wire.arguments import section_arguments
from coordexp.engine.wire.engine_process import api_key_from_environment
from coordexp.errors import ConfigError

SERVERS = "rollout_matching.vllm.server.servers"
LEAST_WORKERS = 8  # that may run on any CPU, however few cores it has


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One server.

    Args:
        host: address to listen on. advertised_host: name by which trainers reach the server, usually the same.
        engine: vLLM engine arguments that the YAML sets.
        push_wait_s: seconds that a push waits for running answers. ready_s: seconds that engines may take to start.
        fingerprint: of ``model``, where adapters may be put on it.
    """

    model: Path
    host: str
    advertised_host: str
    port: int
    group_port: int
    data_parallel_size: int
    tensor_parallel_size: int
    engine: Mapping[str, Any]
    push_wait_s: float
    ready_s: float
    takes_class_names: bool = False
    skip_forced_tokens: bool = False
    fingerprint: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


def serve_options(
    config: RunConfig, index: int, data_parallel_size: int | None, num_gpus: int, listen_host: str | None = None
) -> ServeOptions:
    """Settings of server ``index`` in the trainer's configuration. ``data_parallel_size``: number of engines; None uses
    every visible GPU, or one engine on the CPU. Raises ConfigError for no such server, too few GPUs or cores, or an
    address open to other machines without a token."""
    rollout = config.rollout_matching
    if rollout is None or rollout.vllm.server is None:
        raise ConfigError(
            "rollout_matching.vllm.server: missing; coordexp serve runs one of its servers[] (base_url, group_port)"
        )
    vllm = resolved_rollout(config).vllm
    assert vllm.server is not None
    servers = vllm.server.servers
    if not 0 <= index < len(servers):
        raise ConfigError(f"{SERVERS} has {len(servers)} entries, there is no [{index}]")
    entry, where = servers[index], f"{SERVERS}[{index}].base_url"
    url = split_url(entry.base_url)
    advertised_host = url.hostname or ""
    host = listen_host or entry.listen_host or advertised_host
    port = url.port or (443 if url.scheme == "https" else 80)
    if url.path.strip("/"):
        raise ConfigError(f"{where}: {entry.base_url} has a path; coordexp serve answers at the root of its port only")
    if url.scheme == "https" and host == advertised_host:
        raise ConfigError(
            f"{where}: {entry.base_url} needs TLS, which a rollout server does not have; write http://, or, if a "
            "proxy is in front of it, name its own address in listen_host"
        )
    api_key = api_key_from_environment(vllm.server.api_key_env)
    open_host = next((name for name in (host, advertised_host) if not is_loopback(name)), None)
    if open_host is not None and api_key is None:
        raise ConfigError(
            f"{where}: {open_host} can be reached from other machines, and every client of a rollout server can "
            "overwrite its weights; set rollout_matching.vllm.server.api_key_env, or use http://127.0.0.1"
        )
    tensor_parallel_size, num_engines = vllm.tensor_parallel_size, data_parallel_size or 1
    if num_gpus:
        num_engines = num_gpus // tensor_parallel_size if data_parallel_size is None else data_parallel_size
        if num_engines < 1 or num_engines * tensor_parallel_size > num_gpus:
            needed = max(1, num_engines)
            raise ConfigError(
                f"rollout_matching.vllm.tensor_parallel_size {tensor_parallel_size} x {needed} engines need "
                f"{needed * tensor_parallel_size} GPUs, {num_gpus} are visible; lower it, or choose devices with "
                "CUDA_VISIBLE_DEVICES"
            )
    num_workers, most = num_engines * tensor_parallel_size, max(LEAST_WORKERS, os.cpu_count() or 1)
    if not num_gpus and num_workers > most:
        raise ConfigError(
            f"{num_engines} engines of tensor_parallel_size {tensor_parallel_size} are {num_workers} processes; this "
            f"CPU has {os.cpu_count()} cores: start at most {most} (--data-parallel-size)"
        )
    return ServeOptions(
        model=Path(config.model.model),
        host=host,
        advertised_host=advertised_host,
        port=port,
        group_port=entry.group_port,
        data_parallel_size=num_engines,
        tensor_parallel_size=tensor_parallel_size,
        engine=section_arguments(vllm, gpu=num_gpus > 0),
        push_wait_s=vllm.sync.timeout_s,
        ready_s=config.launch.wait_s,
        takes_class_names=vllm.server.closed_names,
        skip_forced_tokens=rollout.skips_forced_tokens(on_gpu=num_gpus > 0),
        api_key=api_key,
    )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
