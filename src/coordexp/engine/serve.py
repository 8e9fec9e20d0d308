"""``coordexp serve``: ms-swift's rollout endpoints (``serve_app``) and vLLM's own OpenAI endpoints and metrics
(``serve_http``) on vLLM's engine. This module imports no torch and no vLLM."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from coordexp.config import RunConfig, resolved_rollout
from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.arguments import ENABLE, activated_config, activation_environment, section_arguments
from coordexp.engine.client import api_key_from_environment
from coordexp.engine.engine_process import DIE_WITH_PARENT, complete_environment, set_engine_owner
from coordexp.engine.protocol import MAX_IMAGE_PIXELS, PromptBuilder
from coordexp.errors import ConfigError, RolloutError, require

if TYPE_CHECKING:
    from coordexp.engine.serve_app import RolloutServer

logger = logging.getLogger(__name__)
SERVERS = "rollout_matching.vllm.server.servers"
DRAIN_S = 10


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One server.

    Args:
        host: address to listen on. advertised_host: name by which learners reach the server, usually the same.
        engine: vLLM engine arguments that the YAML sets.
        push_wait_s: seconds that a push waits for running answers. ready_s: seconds that engines may take to start.
    """

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
    skip_forced_tokens: bool = False
    api_key: str | None = field(default=None, repr=False)

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


def serve_options(
    config: RunConfig, index: int, data_parallel_size: int | None, num_gpus: int, listen_host: str | None = None
) -> ServeOptions:
    """Settings of server ``index`` in the learner's configuration. ``data_parallel_size``: number of engines; None uses
    every visible GPU, or one engine on the CPU. Raises ConfigError for no such server, too few GPUs, or an address open
    to other machines without a token."""
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
    url = urlsplit(entry.base_url)
    advertised_host = url.hostname or ""
    host = listen_host or entry.listen_host or advertised_host
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"{where}: {entry.base_url} has no usable port ({error})") from error
    if url.path.strip("/"):
        raise ConfigError(f"{where}: {entry.base_url} has a path; coordexp serve answers at the root of its port only")
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
    return ServeOptions(
        model=Path(config.model.model),
        host=host,
        advertised_host=advertised_host,
        port=port,
        group_port=entry.group_port,
        data_parallel_size=num_engines,
        tensor_parallel_size=tensor_parallel_size,
        max_images=vllm.limit_mm_per_prompt.image,
        engine=section_arguments(vllm, gpu=num_gpus > 0),
        push_wait_s=vllm.sync.timeout_s,
        ready_s=config.launch.wait_s,
        closed_names=vllm.server.closed_names,
        skip_forced_tokens=rollout.skips_forced_tokens(on_gpu=num_gpus > 0),
        api_key=api_key,
    )


_VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"
_LONGEST_SOCKET = 107  # bytes of a socket's path in Linux


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepare_environment(repeat_terminate: RepeatTerminateConfig, *, gpu: bool) -> None:
    """Set the variables that engine processes read, before vLLM is imported. Raises RolloutError if the environment
    already activates another repeat guard than the configuration."""
    complete_environment(gpu=gpu)
    os.environ[DIE_WITH_PARENT] = "1"
    os.environ["VLLM_MAX_IMAGE_PIXELS"] = str(MAX_IMAGE_PIXELS)  # of images in OpenAI requests
    set_engine_owner()
    if ENABLE not in os.environ:
        os.environ.update(activation_environment(repeat_terminate))
    active = activated_config(os.environ)
    wanted = repeat_terminate if repeat_terminate.enabled else None
    if active != wanted:
        raise RolloutError(
            f"{ENABLE} activates the guard {active}, and rollout_matching.repeat_terminate is {wanted}: "
            "unset the variables, or make them agree"
        )


def run_server(options: ServeOptions, *, gpu: bool) -> None:
    """Serve until SIGTERM or SIGINT. Raises RolloutError: a taken port, or an engine unlike the configuration;
    CheckpointError: a weight that is NaN or infinite."""
    listener = _listener(options.host, options.port)  # before the engine starts, so a port in use is reported at once
    require("vllm", "coordexp serve")
    # Nothing else handles signals while the engine starts. SystemExit runs the clean-up that ends it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    from coordexp.checkpoints.folder import Checkpoint
    from coordexp.engine.serve_app import RolloutServer
    from coordexp.engine.serve_engine import ServedEngine
    from coordexp.modeling.load import load_processor

    checkpoint = Checkpoint.open(options.model)
    options = replace(options, model=checkpoint.base)  # adapters come with the trainer's first push
    prompts = PromptBuilder(load_processor(checkpoint), options.max_images)
    with listener, _folder_of_sockets():
        engine = ServedEngine.start(options, gpu)
        try:
            asyncio.run(_serve(RolloutServer(options, engine, prompts), listener))
        finally:
            engine.shutdown()


@contextmanager
def _folder_of_sockets() -> Iterator[None]:
    """Let vLLM make its sockets in a folder of their own, which is removed: it removes none. A user's own folder is
    kept, and so is vLLM's if another level would make a socket's path too long."""
    fits = len(os.fsencode(tempfile.gettempdir())) + len(f"/vllm-12345678/{uuid.uuid4()}") <= _LONGEST_SOCKET
    if not fits or _VLLM_SOCKETS in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        os.environ[_VLLM_SOCKETS] = folder
        yield


async def _serve(server: RolloutServer, listener: socket.socket) -> None:
    import uvicorn

    from coordexp.engine.connections import bounded_config
    from coordexp.engine.logits_processors import check_processors
    from coordexp.engine.serve_http import openai_routes
    from coordexp.modeling.finite import not_finite

    workers = await server.engine.workers("coordexp_status")
    check_processors(workers, activated_config(os.environ), server.options.closed_names)
    for name in await server.engine.workers("coordexp_broken_weight", timeout_s=server.options.ready_s):
        if name is not None:
            raise not_finite(server.options.model, name)
    app = server.app()
    app.router.routes += await openai_routes(server)
    options = server.options
    logger.info("serving %s at %s:%d (%d devices)", options.model, options.host, options.port, options.world_size)
    config = bounded_config(app, timeout_graceful_shutdown=DRAIN_S)
    await uvicorn.Server(config).serve(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm only if the protocol is given; otherwise each reply is 40 ms late.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # connections are refused until the engine is ready
    except OSError as error:
        raise RolloutError(
            f"{host}:{port}: this address cannot be taken ({error}). If another server runs there, stop it; if the "
            "address is another machine's, set the server's listen_host, or --host"
        ) from error
    return listener
