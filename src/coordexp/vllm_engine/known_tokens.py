"""Keeps a server's answers within the tokenizer's vocabulary: a logits processor of vLLM's engine (V1 interface).

A checkpoint may have more rows in its language head than its tokenizer has tokens: Qwen pads them to a round number,
and nothing ever trained them. An id of such a row writes nothing and no learner can read it: no request may draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from coordexp.errors import RolloutError
from coordexp.vllm_engine.arguments import KNOWN_TOKENS_PROCESSOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


class KnownTokensProcessor(LogitsProcessor):
    """Makes every id at or beyond the tokenizer's length impossible, for all requests at once. Every token that the
    engine draws comes by here: ``num_sampled`` counts them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        from transformers import AutoTokenizer

        self.num_known = len(AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer))
        self.num_sampled = 0

    def is_argmax_invariant(self) -> bool:
        """False: it may change which token is the most likely."""
        return False  # so that vLLM applies it in greedy decoding too

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """All rows are alike."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, V)
        """Forbid ids that the tokenizer does not know, which pad the head; (rows, V), in place."""
        self.num_sampled += len(logits)
        logits[:, self.num_known :] = -torch.inf
        return logits


def num_known_tokens(worker: Any) -> int | None:
    """Ids that a vLLM worker's answers may contain are below this number; None where nothing holds it to that: what was
    asked for and then dropped is not there."""
    processor = _processor_of(worker)
    return None if processor is None else processor.num_known


def num_sampled_tokens(worker: Any) -> int:
    """How many tokens a vLLM worker has drawn since its start."""
    processor = _processor_of(worker)
    return 0 if processor is None else processor.num_sampled


def check_known_tokens(workers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse workers that may answer with ids beyond the tokenizer's vocabulary.

    Args:
        workers: the ``workers`` of a server's ``/status/``.

    Raises:
        RolloutError
    """
    loose = [number for number, status in enumerate(workers) if status["num_known_tokens"] is None]
    if loose:
        raise RolloutError(
            f"workers {loose} dropped the logits processor {KNOWN_TOKENS_PROCESSOR}, so they could answer with ids "
            "that no tokenizer knows; install tested versions of vLLM and ms-swift, and set no other model runner"
        )


def _processor_of(worker: Any) -> KnownTokensProcessor | None:
    batch = getattr(worker.model_runner, "input_batch", None)
    processors = getattr(getattr(batch, "logitsprocs", None), "all", ())
    return next((one for one in processors if isinstance(one, KnownTokensProcessor)), None)
