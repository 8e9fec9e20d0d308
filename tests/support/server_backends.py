"""A server backend without weights, against fake servers over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.engine.trainer.push import PushReport
from coordexp.engine.trainer.server_backend import ServerBackend
from coordexp.modeling.inputs import build_messages
from coordexp.records import RolloutRequest
from coordexp.rollouts.backend import TrainerParts, decoding_options
from coordexp.weight_sync import WeightVersion
from support.config_samples import set_key, stage2
from support.fake_servers import FakeRolloutServer, numbered_image
from support.qwen_tokenizer import qwen_vocab


class PretendSync:
    """Pushes no weights. ``reasons``: why pushes fall back, None where one does not; ``failure``: raised by each."""

    def __init__(self, *reasons: str | None, failure: Exception | None = None) -> None:
        self._reasons = iter(reasons)
        self._failure = failure
        self.fallbacks: list[str] = []

    def push(self, version: int) -> PushReport:
        if self._failure is not None:
            raise self._failure
        reason = next(self._reasons, None)
        self.fallbacks += [] if reason is None else [f"version {version}: {reason}"]
        return PushReport(WeightVersion(version, "this"), "full", 100, 0.5, fallback=reason)

    def close(self) -> None: ...


def section(urls: Sequence[str], **keys: Any) -> RolloutMatchingConfig:
    """The resolved section for these servers; two sequences on each device."""
    entries = [{"base_url": url, "group_port": 40000 + index} for index, url in enumerate(urls)]
    config = stage2(
        rollout_backend="vllm",
        decode_batch_size=2,
        vllm={"mode": "server", "tensor_parallel_size": 1, "server": {"servers": entries, "timeout_s": 1.0}},
    )
    for key, value in keys.items():
        config = set_key(config, "rollout_matching." + key.replace("__", "."), value)
    return RolloutMatchingConfig.model_validate(config["rollout_matching"])


@contextmanager
def backend_of(
    fakes: Sequence[FakeRolloutServer], sync: PretendSync | None = None, vocab: Any = None, **keys: Any
) -> Iterator[ServerBackend]:
    config = section([fake.url for fake in fakes], **keys)
    unused: Any = None
    trainer = TrainerParts(unused, vocab or qwen_vocab(), 0, unused, Path("model"), unused)
    backend: Any = ServerBackend(config, trainer, decoding_options(config))
    backend._pusher = sync or PretendSync()
    try:
        yield backend
    finally:
        backend.close()


def requests_(count: int, first: int = 0) -> tuple[RolloutRequest, ...]:
    return tuple(
        RolloutRequest(f"s{i}", numbered_image(i), build_messages(numbered_image(i), "p", None), (1, 2))
        for i in range(first, first + count)
    )


def answers(body: dict[str, Any]) -> tuple[int, Any]:
    """One answer per request: its image's number as the only token."""
    items = []
    for request in body["infer_requests"]:
        choice = {"message": {"content": ""}, "finish_reason": "length", "token_ids": [number_of(request)]}
        item: dict[str, Any] = {"response": {"choices": [choice], "prompt_token_ids": [1, 2]}}
        if "uuid" in request:  # sent to servers that mark their answers
            item["coordexp"] = {"uuid": request["uuid"], "weight_version": 0, "trainer_id": "this"}
        items.append(item)
    return 200, items


def number_of(request: dict[str, Any]) -> int:
    return int(Path(request["images"][0]).stem)


def numbers(call: dict[str, Any]) -> list[int]:
    return [number_of(request) for request in call["infer_requests"]]
