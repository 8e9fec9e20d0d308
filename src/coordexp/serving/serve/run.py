"""``coordexp serve``: vLLM engines behind ms-swift's rollout endpoints, from start to a clean end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any, NoReturn

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.engine.engine_process import DIE_WITH_PARENT, complete_environment, set_engine_owner
from coordexp.engine.guard_activation import ENABLE, activated_config, activation_environment
from coordexp.errors import RolloutError, require
from coordexp.serving.serve.options import ServeOptions

logger = logging.getLogger(__name__)
DRAIN_S = 10


def prepare_environment(repeat_terminate: RepeatTerminateConfig, *, gpu: bool) -> None:
    """Set what engine processes read, before vLLM is imported.

    The guard is switched on by the configuration alone; a launcher that has set its variables must agree with it.

    Raises:
        RolloutError: the variables ask for another guard than the configuration.
    """
    complete_environment(gpu=gpu)
    os.environ[DIE_WITH_PARENT] = "1"
    set_engine_owner()
    if ENABLE not in os.environ:
        os.environ.update(activation_environment(repeat_terminate))
    active = activated_config(os.environ)
    wanted = repeat_terminate if repeat_terminate.enabled else None
    if active != wanted:
        raise RolloutError(
            f"{ENABLE} asks for the guard {active}, rollout_matching.repeat_terminate for {wanted}: "
            "unset the variables, or make them agree"
        )


def run_server(options: ServeOptions, *, gpu: bool) -> None:
    """Serve until SIGTERM or SIGINT. Blocks.

    Raises:
        RolloutError: the port is taken, or the engine does not start as the configuration wants it.
    """
    listener = _listener(options.host, options.port)  # first: a taken port shows before vLLM is imported
    require("vllm", "coordexp serve")
    # While engines start, nobody else handles signals, and asyncio would keep Ctrl-C back until then: leave through the
    # exits that end them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    with listener:
        asyncio.run(_serve(options, gpu, listener))


async def _serve(options: ServeOptions, gpu: bool, listener: socket.socket) -> None:
    import uvicorn

    from coordexp.checkpoints.folder import Checkpoint
    from coordexp.modeling.load import load_processor
    from coordexp.serving.serve.app import build_app
    from coordexp.serving.serve.engines import EngineGroup
    from coordexp.serving.serve.requests import PromptBuilder
    from coordexp.serving.serve.service import RolloutServer

    checkpoint = Checkpoint.open(options.model)
    options = replace(options, model=checkpoint.base)  # adapters arrive with the learner's first push
    prompts = PromptBuilder(load_processor(checkpoint), options.max_images)
    engines = EngineGroup.start(options, gpu)
    try:
        await engines.check_answers()
        app = build_app(RolloutServer(options, engines, prompts))
        config: Any = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=DRAIN_S)
        logger.info("serving %s at %s:%d (%d devices)", options.model, options.host, options.port, options.world_size)
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        engines.shutdown()


def _listener(host: str, port: int) -> socket.socket:
    """Take the port before the engines start; connections are refused until they are ready."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named: without, each answer is 40 ms late.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError as error:
        raise RolloutError(
            f"{host}:{port}: this address cannot be taken ({error}); another server may run there, or it is another "
            "machine's: write where to listen into the server's listen_host, or as --host"
        ) from error
    return listener


def _leave(signum: int, _: object) -> NoReturn:
    sys.exit(128 + signum)
