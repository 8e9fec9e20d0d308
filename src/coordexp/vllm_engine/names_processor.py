"""A closed list of class names as a logits processor of vLLM's engine (V1 interface); a request brings its own list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from coordexp.coords import CoordVocab
from coordexp.errors import RolloutError
from coordexp.rollouts.closed_names import START, ClosedNames, Place
from coordexp.rollouts.hf_names import mask
from coordexp.vllm_engine.arguments import NAMES_KEY, NAMES_PROCESSOR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

_KEPT = 8  # rules of as many lists; each holds the vocabulary's bytes in order


@dataclass(slots=True)
class _Row:
    """One request: its answer so far (a list that vLLM extends), how much of it was read, and where that led."""

    rule: ClosedNames
    answer: list[int]
    num_read: int = 0
    place: Place | None = START


class ClosedNamesProcessor(LogitsProcessor):
    """Makes every other description impossible, in rows whose request names a list; before the repeat guard."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        from transformers import AutoTokenizer

        self._vocab = CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer))
        self._rules: dict[tuple[str, ...], ClosedNames] = {}
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
            place = self._read(row)
            if place is not None:
                logits[index] = mask(logits[index : index + 1], row.rule.next_tokens(place))[0]
        return logits

    def _new_row(self, params: SamplingParams, prompt_ids: list[int] | None, answer: list[int]) -> _Row | None:
        names = tuple((params.extra_args or {}).get(NAMES_KEY) or ())
        if not names:
            return None
        if names not in self._rules:
            if len(self._rules) >= _KEPT:
                self._rules.pop(next(iter(self._rules)))  # rows that still follow it hold it themselves
            self._rules[names] = ClosedNames(names, self._vocab.pieces, self._vocab.eos_id)
        return _Row(self._rules[names], answer)

    def _read(self, row: _Row) -> Place | None:
        if row.num_read > len(row.answer):  # vLLM took tokens back
            row.num_read, row.place = 0, START
        for token in row.answer[row.num_read :]:
            if token < 0:
                raise RolloutError("vLLM asked for a mask before it knew the newest token; start it without async "
                                   "scheduling")  # fmt: skip
            ended = row.place is None or token == self._vocab.eos_id
            row.place = None if ended or row.place is None else row.rule.after(row.place, token)
            row.num_read += 1
        return row.place


def holds_names(worker: Any) -> bool:
    """Whether a vLLM worker really applies the list: what was asked for and then dropped is not there."""
    batch = getattr(worker.model_runner, "input_batch", None)
    processors = getattr(getattr(batch, "logitsprocs", None), "all", ())
    return any(isinstance(one, ClosedNamesProcessor) for one in processors)


def check_names(workers: Sequence[Mapping[str, Any]] | Sequence[bool]) -> None:
    """Raises RolloutError where a worker dropped the processor: its descriptions would be anything."""
    if not all(workers):
        raise RolloutError(
            f"an engine dropped the logits processor {NAMES_PROCESSOR}, so its descriptions would not be held to "
            "the list of class names; install a tested version of vLLM, and set no other model runner"
        )
