"""What every answer of an engine is held to, as logits processors of vLLM's engine (V1 interface): the tokenizer's
vocabulary, and a closed list of class names, which a request brings.

A checkpoint may have more rows in its language head than its tokenizer has tokens: Qwen pads them to a round number,
and nothing ever trained them. An id of such a row writes nothing and no learner can read it: no request may draw it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from coordexp.coords import CoordVocab
from coordexp.engine.arguments import KNOWN_TOKENS_PROCESSOR, NAMES_KEY, NAMES_PROCESSOR
from coordexp.errors import RolloutError
from coordexp.rollouts.allowed_labels import START, AllowedLabels, ScanState
from coordexp.rollouts.hf_processors import mask

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

Processor = TypeVar("Processor", bound=LogitsProcessor)


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
    """Ids that a vLLM worker's answers may contain are below this number; None where nothing holds it to that."""
    processor = processor_of(worker, KnownTokensProcessor)
    return None if processor is None else processor.num_known


def num_sampled_tokens(worker: Any) -> int:
    """How many tokens a vLLM worker has drawn since its start."""
    processor = processor_of(worker, KnownTokensProcessor)
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


def processor_of(worker: Any, kind: type[Processor]) -> Processor | None:
    """The processor of that class that a vLLM worker really applies: what was asked for and then dropped is not
    there."""
    batch = getattr(worker.model_runner, "input_batch", None)
    processors = getattr(getattr(batch, "logitsprocs", None), "all", ())
    return next((one for one in processors if isinstance(one, kind)), None)


_KEPT = 8  # rules of as many lists; each holds the vocabulary's bytes in order


@dataclass(slots=True)
class _Row:
    """One request: its answer so far (a list that vLLM extends), how much of it was read, and where that led."""

    rule: AllowedLabels
    answer: list[int]
    num_read: int = 0
    state: ScanState | None = START


class AllowedLabelsProcessor(LogitsProcessor):
    """Makes every other description impossible, in rows whose request names a list; before the repeat guard."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        from transformers import AutoTokenizer

        self._vocab = CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer))
        self._rules: dict[tuple[str, ...], AllowedLabels] = {}
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """False: so that vLLM applies it in greedy decoding too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Rows came, went and moved."""
        process_dict_updates(self._rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, V)
        """Minus infinity for what may not come next, in rows that have a list."""
        for index, row in self._rows.items():
            state = self._read(row)
            if state is not None:
                logits[index] = mask(logits[index : index + 1], row.rule.next_tokens(state))[0]
        return logits

    def _new_row(self, params: SamplingParams, prompt_ids: list[int] | None, answer: list[int]) -> _Row | None:
        names = tuple((params.extra_args or {}).get(NAMES_KEY) or ())
        if not names:
            return None
        if names not in self._rules:
            if len(self._rules) >= _KEPT:
                self._rules.pop(next(iter(self._rules)))  # rows that still follow it hold it themselves
            self._rules[names] = AllowedLabels(names, self._vocab.pieces, self._vocab.eos_id)
        return _Row(self._rules[names], answer)

    def _read(self, row: _Row) -> ScanState | None:
        if row.num_read > len(row.answer):  # vLLM took tokens back
            row.num_read, row.state = 0, START
        for token in row.answer[row.num_read :]:
            if token < 0:
                raise RolloutError("vLLM asked for a mask before it knew the newest token; start it without async "
                                   "scheduling")  # fmt: skip
            ended = row.state is None or token == self._vocab.eos_id
            row.state = None if ended or row.state is None else row.rule.after(row.state, token)
            row.num_read += 1
        return row.state


def holds_names(worker: Any) -> bool:
    """Whether a vLLM worker really applies the list."""
    return processor_of(worker, AllowedLabelsProcessor) is not None


def check_names(workers: Sequence[Mapping[str, Any]] | Sequence[bool]) -> None:
    """Raises RolloutError where a worker dropped the processor: its descriptions would be anything."""
    if not all(workers):
        raise RolloutError(
            f"an engine dropped the logits processor {NAMES_PROCESSOR}, so its descriptions would not be held to "
            "the list of class names; install a tested version of vLLM, and set no other model runner"
        )
