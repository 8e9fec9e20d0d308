"""vLLM's own endpoints for OpenAI clients and Prometheus, in ``coordexp serve``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import GracefulHTTPError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.connector import global_thread_pool
from vllm.utils.argparse_utils import FlexibleArgumentParser

from coordexp.engine.server.app import RolloutServer
from coordexp.engine.wire.arguments import CLASS_NAMES_KEY, REQUEST_KEY
from coordexp.engine.wire.engine_process import MEDIA_CONNECTOR
from coordexp.engine.wire.protocol import RequestRefused, open_image

# vLLM's other routes (scaling, development, LoRA from disk) could change weights without the weight lock.
OPENAI_PATHS = {"/v1/models": "GET", "/v1/chat/completions": "POST", "/v1/completions": "POST", "/metrics": "GET"}


async def openai_routes(server: RolloutServer) -> list[Route]:
    """vLLM's own endpoints for OpenAI clients and Prometheus."""
    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", str(server.options.model)])
    args.allowed_origins = []  # vLLM's default lets every web page read the answers
    engine: Any = LockedEngine(server)
    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    for handler in (app.state.openai_serving_chat, app.state.openai_serving_completion):
        handler.beam_search = _no_beam_search
    app.state.server = SimpleNamespace(should_exit=False)  # vLLM would end the server when its engine dies
    return [Route(path, app, methods=[method]) for path, method in OPENAI_PATHS.items()]


def _no_beam_search(*_: Any, **__: Any) -> Any:
    # vLLM's calls the engine for each token, so a push could come between two, and its text lacks coordinates.
    raise ValueError("use_beam_search is not supported here")  # of which vLLM makes a 400


@MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)
class SentImages(MediaConnector):
    """Opens the images of OpenAI requests as those of ``/infer/``, out of data URLs only. vLLM's own would clip colours
    of 16 bits, take the first picture of an animation, and answer 500 to addresses of files."""

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        if url[:5].lower() != "data:":
            raise ValueError("send images as data URLs; other addresses and files are not opened")
        try:
            return open_image(url)
        except RequestRefused as error:
            raise ValueError(str(error)) from error  # of which vLLM makes a 400

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        return await asyncio.get_running_loop().run_in_executor(global_thread_pool, self.load_from_url, url, media_io)


class LockedEngine:
    """Wraps the engine for vLLM's OpenAI handlers: a push waits for answers, and answers use the pushed adapter."""

    def __init__(self, server: RolloutServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server.engine.llm, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None, **options: Any
    ) -> AsyncIterator[Any]:
        reserved = {REQUEST_KEY, CLASS_NAMES_KEY} & (sampling_params.extra_args or {}).keys()
        if reserved:
            raise ValueError(f"vllm_xargs: {', '.join(sorted(reserved))} cannot be set here")
        sampling_params.skip_special_tokens = False  # coordinate tokens may be special tokens
        outputs: asyncio.Queue[Any] = asyncio.Queue()

        # In a separate task, so that a client that reads its stream slowly does not delay a push.
        async def decode() -> None:
            try:
                async with self._server.lock.answering():
                    async for output in self._server.engine.generate(prompt, sampling_params, request_id, **options):
                        outputs.put_nowait(output)
            finally:
                outputs.put_nowait(None)

        decoding = asyncio.create_task(decode())
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await decoding
        except RequestRefused as error:  # vLLM would make a 500 of it
            raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from error
        finally:
            decoding.cancel()
