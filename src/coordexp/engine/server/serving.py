"""``coordexp serve``: ms-swift's rollout endpoints (``app``) and vLLM's for OpenAI clients (``openai``), on its engine.
This module imports no torch and no vLLM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.server.options import ServeOptions
from coordexp.engine.wire.arguments import ENABLE, activated_config, activation_environment, check_processors
from coordexp.engine.wire.engine_process import DIE_WITH_PARENT, MEDIA_CONNECTOR, complete_environment, set_engine_owner
from coordexp.engine.wire.protocol import PromptBuilder
from coordexp.errors import RolloutError, require
from coordexp.heavy_imports import heavy_imports
from coordexp.temporary import temporary_folder

if TYPE_CHECKING:
    import uvicorn

    from coordexp.checkpoints.folder import Checkpoint
    from coordexp.engine.server.app import RolloutServer

logger = logging.getLogger(__name__)
DRAIN_S = 10
_SOCKETS = "coordexp-serve-"
_VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"
_LONGEST_SOCKET = 107  # bytes of a socket's path in Linux


def prepare_environment(repeat_terminate: RepeatTerminateConfig, *, gpu: bool) -> None:
    """Set the variables that engine processes read, before vLLM is imported. Raises RolloutError if the environment
    already activates another repeat guard than the configuration."""
    complete_environment(gpu=gpu)
    os.environ[DIE_WITH_PARENT] = "1"
    os.environ["VLLM_MEDIA_CONNECTOR"] = MEDIA_CONNECTOR  # of images in OpenAI requests
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
    listener = take_address(options.host, options.port)  # first, so a port in use is reported at once
    require("vllm", "coordexp serve")
    # Nothing else handles signals while the engine starts. SystemExit runs the clean-up that ends it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: sys.exit(128 + signum))
    with heavy_imports():
        from coordexp.checkpoints.fingerprints import fingerprint
        from coordexp.checkpoints.folder import Checkpoint
        from coordexp.engine.server.app import RolloutServer
        from coordexp.engine.server.served_engine import ServedEngine
        from coordexp.modeling.load import load_processor

    checkpoint = Checkpoint.open(options.model)
    if (note := note_without_adapters(checkpoint)) is not None:
        logger.warning(note)
    # Adapters arrive with the trainer's first push, which compares the model below them with its own.
    base = checkpoint.base
    options = replace(options, model=base, fingerprint=fingerprint(base) if options.engine.get("enable_lora") else None)
    prompts = PromptBuilder(load_processor(checkpoint))
    with listener, _folder_of_sockets():
        engine = ServedEngine.start(options, gpu)
        try:
            asyncio.run(_serve(RolloutServer(options, engine, prompts), listener))
        finally:
            engine.shutdown()


def note_without_adapters(checkpoint: Checkpoint) -> str | None:
    """A warning about a run's folder with adapters, which an engine does not load; None for a plain model."""
    if checkpoint.base == checkpoint.path:
        return None
    return (
        f"{checkpoint.path} has adapters, which arrive with a trainer's first push; until then answers are those of "
        f"{checkpoint.base}, without them. To serve the whole model, name a merged one (coordexp model merge)"
    )


@contextmanager
def _folder_of_sockets() -> Iterator[None]:
    """Let vLLM make its sockets in a folder of their own, which is removed, by the next server if this one is killed:
    vLLM removes none. A user's own folder is kept, and so is vLLM's if another level would make a socket's path too
    long."""
    fits = len(os.fsencode(tempfile.gettempdir())) + len(f"/{_SOCKETS}12345678/{uuid.uuid4()}") <= _LONGEST_SOCKET
    if not fits or _VLLM_SOCKETS in os.environ:
        yield
        return
    with temporary_folder(_SOCKETS) as folder:
        os.environ[_VLLM_SOCKETS] = str(folder)
        yield


async def _serve(server: RolloutServer, listener: socket.socket) -> None:
    from coordexp.engine.server.admission import bounded_config
    from coordexp.engine.server.openai import openai_routes
    from coordexp.modeling.finite import not_finite

    workers = await server.engine.workers("coordexp_status")
    check_processors(workers, activated_config(os.environ), server.options.takes_class_names)
    for name in await server.engine.workers("coordexp_broken_weight", timeout_s=server.options.ready_s):
        if name is not None:
            raise not_finite(server.options.model, name)
    app = server.app()
    app.router.routes += await openai_routes(server)
    options = server.options
    logger.info("serving %s at %s:%d (%d devices)", options.model, options.host, options.port, options.world_size)
    config = bounded_config(app, timeout_graceful_shutdown=DRAIN_S)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections then hold no port
    await serve_to_the_end(config, listener)


async def serve_to_the_end(config: uvicorn.Config, listener: socket.socket) -> None:
    """Serve until a signal, and leave the application's lifespan also after a second Ctrl-C: uvicorn cancels it then,
    and logs that as a traceback."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            if self.force_exit:
                await self.lifespan.shutdown()

    await Server(config).serve(sockets=[listener])


def take_address(host: str, port: int) -> socket.socket:
    """A socket that holds an address from now on, and listens later. Raises RolloutError if it cannot be taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm only if the protocol is given; otherwise each reply is 40 ms late.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # connections are refused until the engine is ready
        # Two sockets with this option may have one port until one of them listens, here minutes later.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        raise RolloutError(
            f"{host}:{port}: this address cannot be taken ({error}). If another server runs there, stop it; if the "
            "address is another machine's, set the server's listen_host, or --host"
        ) from error
    return listener
