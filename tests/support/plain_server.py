"""A ``coordexp serve`` for adapters and full weights, shared by several test files: a boot takes most of a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.rollout_servers import RunningServer, server_config, serving


class Plain(NamedTuple):
    """A server, and the configuration that it was started with."""

    config: dict[str, Any]
    running: RunningServer


class PlainServer:
    """Boots it for the first that asks, and anew where it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._plain: Plain | None = None

    def get(self) -> Plain:
        """It, healthy. Its weights are those of whoever pushed last."""
        if self._plain is None or self._plain.running.process.poll() is not None:
            self._stack.close()
            # Data that are not there: they are the learner's business.
            config = server_config(
                self._folder,
                custom__train_jsonl=str(self._folder / "nowhere.jsonl"),
                rollout_matching__vllm__enable_lora=True,
                rollout_matching__vllm__max_lora_rank=8,
            )
            config["custom"].pop("val_jsonl")
            self._plain = Plain(config, self._stack.enter_context(serving(self._folder, config)))
        return self._plain

    def close(self) -> None:
        self._stack.close()


@contextmanager
def plain_server_in(folder: Path) -> Iterator[PlainServer]:
    """None is booted before it is asked for."""
    plain = PlainServer(folder)
    try:
        yield plain
    finally:
        plain.close()
