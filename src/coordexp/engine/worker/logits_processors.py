"""Logits processors of vLLM's engine (V1 interface), loaded by vLLM in each engine process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from coordexp.coords import CoordVocab
from coordexp.engine.wire.arguments import (
    ACTIVATION_PATH,
    CLASS_NAMES_KEY,
    REQUEST_KEY,
    activated_config,
    check_fits_guard,
)
from coordexp.errors import RolloutError
from coordexp.rollouts.class_names import START, ClassNames, ScanState
from coordexp.rollouts.hf import mask
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard, Trigger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

_KEPT_RULES = 8  # most lists of class names in memory; each has a sorted copy of the vocabulary
_MAX_TRIGGERS = 65_536  # most triggers in memory; those of a client that disconnected are never fetched
# With asynchronous scheduling, the newest token of an answer is -1 until vLLM has it from the device. vLLM 0.32 writes
# it there before it calls a processor.
_TOO_EARLY = (
    "vLLM called a logits processor before it knew the newest token; install a tested version of vLLM, or set "
    "rollout_matching.vllm.engine_args.async_scheduling: false"
)


class KnownTokensProcessor(LogitsProcessor):
    """Masks every id at or beyond the tokenizer's length. Checkpoints pad their language head to a round number of
    rows; an id of such a row has no text. ``num_sampled`` counts the positions that it masked: one for each token that
    the engine samples, and with drafts one more for each drafted token, accepted or not."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.num_known = len(AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer))
        self.num_sampled = 0

    def is_argmax_invariant(self) -> bool:
        return False  # so that vLLM applies it in greedy decoding too

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, V)
        self.num_sampled += len(logits)
        logits[:, self.num_known :] = -torch.inf
        return logits


@dataclass(slots=True)
class _ClassNamesRow:
    """One request: its answer so far (a list that vLLM extends), how much of it was read, and the state after that."""

    rule: ClassNames
    answer: list[int]
    num_read: int = 0
    state: ScanState | None = START


class RequestClassNamesProcessor(LogitsProcessor):
    """Masks every description outside a request's class names. Must come before the repeat guard."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab = vocab = CoordVocab.from_tokenizer(
            AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        )
        self._rule_of = lru_cache(_KEPT_RULES)(lambda names: ClassNames(names, vocab.pieces, vocab.eos_id))
        self._rows: dict[int, _ClassNamesRow] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # so that vLLM applies it in greedy decoding too

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self.new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, V)
        for index, row in self._rows.items():
            self.mask_rows(logits[index : index + 1], row)
        return logits

    def mask_rows(self, logits_KV: torch.Tensor, row: _ClassNamesRow, draft: Sequence[int] = ()) -> None:
        """Mask the logits after ``row``'s answer, and after each further token of ``draft``, in place."""
        if row.num_read > len(row.answer):  # vLLM took tokens back
            row.num_read, row.state = 0, START
        for token in row.answer[row.num_read :]:
            if token < 0:
                raise RolloutError(_TOO_EARLY)
            row.state = self._after(row, row.state, token)
            row.num_read += 1
        state = row.state
        for k in range(len(draft) + 1):
            if state is None:
                return
            logits_KV[k] = mask(logits_KV[k : k + 1], row.rule.next_tokens(state))[0]
            state = self._after(row, state, draft[k]) if k < len(draft) else None

    def _after(self, row: _ClassNamesRow, state: ScanState | None, token: int) -> ScanState | None:
        return None if state is None or token == self._vocab.eos_id else row.rule.after(state, token)

    def new_row(self, params: SamplingParams, prompt_ids: list[int] | None, answer: list[int]) -> _ClassNamesRow | None:
        names = tuple((params.extra_args or {}).get(CLASS_NAMES_KEY) or ())
        return _ClassNamesRow(self._rule_of(names), answer) if names else None


@dataclass(slots=True)
class _GuardRow:
    """One request: its answer so far (a list that vLLM extends), the guard with what it has read of it, and the
    answer's length from which on the guard could end it."""

    request_id: str | None
    answer: list[int]
    guard: RepeatGuard
    not_before: float = 0


class RepeatTerminateProcessor(LogitsProcessor):
    """Ends answers that repeat themselves: after a trigger, only the end of turn is possible. Configured by the
    environment."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        check_fits_guard(sampling_params)

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        config = activated_config(os.environ)
        if config is None:
            raise RolloutError(
                f"the repeat guard was loaded without its configuration; it is given by {ACTIVATION_PATH}"
            )
        self.config = config
        name = vllm_config.model_config.tokenizer
        tokenizer = AutoTokenizer.from_pretrained(name)
        vocab = CoordVocab.from_tokenizer(tokenizer)
        if tokenizer.eos_token_id != vocab.eos_id:
            raise RolloutError(
                f"{name}: the repeat guard ends answers with <|im_end|> ({vocab.eos_id}), but the engine stops at "
                f"{tokenizer.eos_token!r} ({tokenizer.eos_token_id}); set eos_token of the tokenizer to <|im_end|>"
            )
        self.eos_id = vocab.eos_id
        self._reader = None if config.max_object_keys is None else ObjectKeyReader(vocab.pieces)
        self._rows: dict[int, _GuardRow] = {}
        self._triggers: dict[str, Trigger] = {}

    def is_argmax_invariant(self) -> bool:
        return False  # so that vLLM applies it in greedy decoding too

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self.new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, V)
        self.end(logits, [index for index, row in self._rows.items() if self.ends_now(row)])
        return logits

    def end(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Mask everything but the end of turn in these rows, in place."""
        if rows:
            logits[rows] = -torch.inf
            logits[rows, self.eos_id] = 0.0

    def pop_triggers(self, request_ids: Sequence[str]) -> dict[str, Trigger]:
        """Those of ``request_ids`` (in their ``extra_args``) that this engine ended, each reported once."""
        return {name: self._triggers.pop(name) for name in request_ids if name in self._triggers}

    def new_row(self, params: SamplingParams, prompt_ids: list[int] | None, answer: list[int]) -> _GuardRow:
        request_id = (params.extra_args or {}).get(REQUEST_KEY)
        return _GuardRow(request_id, answer, RepeatGuard(self.config, self._reader))

    def ends_now(self, row: _GuardRow) -> bool:
        """Whether the guard ends the answer now; if so, stores the trigger."""
        if not self.read(row) or row.guard.trigger is None:
            return False
        self.keep_trigger(row, row.guard.trigger)
        return True

    def may_end_within(self, row: _GuardRow, count: int) -> bool:
        """Whether the guard could end the answer within ``count`` further tokens, whatever these are. As long as it
        could not, the answer need not be read."""
        return not row.guard.num_tokens <= len(row.answer) < row.not_before - count

    def read(self, row: _GuardRow) -> bool:
        """Push the answer's new tokens to its guard; False if the answer is over."""
        guard, answer = row.guard, row.answer
        if guard.num_tokens > len(answer):  # vLLM took tokens back
            guard = row.guard = RepeatGuard(self.config, self._reader)
        new = answer[guard.num_tokens :] if guard.num_tokens < len(answer) else []
        is_over = self.eos_id in new  # with async scheduling vLLM computes one more step, and drops it
        if is_over:
            new = new[: new.index(self.eos_id)]
        if min(new, default=0) < 0:
            raise RolloutError(_TOO_EARLY)
        if not is_over:
            guard.extend(new)
            row.not_before = guard.num_tokens + guard.fewest_to_trigger()
        return not is_over

    def keep_trigger(self, row: _GuardRow, trigger: Trigger) -> None:
        if row.request_id is not None:
            if len(self._triggers) >= _MAX_TRIGGERS:
                self._triggers.pop(next(iter(self._triggers)))
            self._triggers[row.request_id] = trigger
