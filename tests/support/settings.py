"""Settings with the YAML keys' defaults or short waits; a test names the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordexp.config.rollout import RepeatTerminateConfig, RolloutMatchingConfig
from coordexp.engine.server.options import ServeOptions
from coordexp.engine.trainer.client import ServerClient
from coordexp.rollouts.backend import DecodingOptions, decoding_options
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard, Trigger


def decoding(max_new_tokens: int = 512, **options: Any) -> DecodingOptions:
    """Greedy decoding, but for ``options``: fields of :class:`DecodingOptions`."""
    sampling = {key: options.pop(key) for key in ("temperature", "top_p", "top_k") if key in options}
    section = {"max_new_tokens": max_new_tokens, "decoding": sampling, **options}
    return decoding_options(RolloutMatchingConfig.model_validate(section))


def client_to(url: str, group_port: int = 1, **keys: Any) -> ServerClient:
    """A client without a token, of a server near by."""
    return ServerClient(url, group_port, **{"timeout_s": 20.0, "infer_timeout_s": 120.0, "api_key": None, **keys})


def serve_options_of(host: str, group_port: int, push_wait_s: float, api_key: str | None = None) -> ServeOptions:
    """Options of a server with one engine, which listens where trainers call it."""
    return ServeOptions(
        model=Path("model"), host=host, advertised_host=host, port=0, group_port=group_port, data_parallel_size=1,
        tensor_parallel_size=1, engine={}, push_wait_s=push_wait_s, ready_s=600.0, api_key=api_key,
    )  # fmt: skip


def first_trigger(
    token_ids: Sequence[int], settings: RepeatTerminateConfig, reader: ObjectKeyReader | None = None
) -> Trigger | None:
    """The verdict on a whole answer: where a guarded engine would have ended it, or None."""
    guard = RepeatGuard(settings, reader)
    for token_id in token_ids:
        if guard.push(token_id) is not None:
            break
    return guard.trigger
