"""Seeds of a call to ``swift rollout``. Imports nothing of ms-swift, whose trainers patch transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RequestConfig


def seeded_by_place(config: RequestConfig | None, sizes: Sequence[int]) -> list[RequestConfig | None]:
    """``config`` for each worker, which counts its own requests from 0; ``sizes``: how many each of them gets."""
    if config is None or config.seed is None:
        return [config] * len(sizes)
    return [replace(config, seed=config.seed + sum(sizes[:index])) for index in range(len(sizes))]
