"""The repeat guard as a logits processor of vLLM's engine (V1 interface): it guards every request of a server.

vLLM loads :class:`RepeatTerminateProcessor` in each engine process and tells it which requests stand in which rows. A
row whose guard has a verdict may only end; all other rows are left alone. Which requests that was is asked for
afterwards, by the request ids that the server wrote into ``SamplingParams.extra_args``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates

from coordexp.coords import CoordVocab
from coordexp.engine.guard_activation import ACTIVATION_PATH, REQUEST_KEY, activated_config
from coordexp.engine.logits_processors import processor_of
from coordexp.errors import RolloutError
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard, Trigger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate

_MAX_UNASKED = 65_536  # requests whose client went away are never asked for
_NOT_SAMPLED_YET = -1  # vLLM's placeholder for a token that is still on its way from the device


@dataclass(slots=True)
class _Row:
    """One request: its answer so far (a list that vLLM extends) and how much of it the guard has seen."""

    request_id: str | None
    answer: list[int]
    guard: RepeatGuard


class RepeatTerminateProcessor(LogitsProcessor):
    """Ends answers that repeat themselves. Built by vLLM, configured by the process's environment."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that could not be ended: the guard's only means is the end token."""
        if sampling_params.ignore_eos:
            raise ValueError("ignore_eos and the repeat guard exclude each other; leave ignore_eos out of the request")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        config = activated_config(os.environ)
        if config is None:
            raise RolloutError(
                f"the repeat guard was loaded without its configuration; it is given by {ACTIVATION_PATH}"
            )
        self.config = config
        vocab = _vocab_of(vllm_config)
        self._eos_id = vocab.eos_id
        self._reader = None if config.max_object_keys is None else ObjectKeyReader(vocab.pieces)
        self._rows: dict[int, _Row] = {}
        self._triggers: dict[str, Trigger] = {}

    def is_argmax_invariant(self) -> bool:
        """False: it may change which token is the most likely."""
        return False  # so that vLLM applies it in greedy decoding too

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow vLLM's batch: rows come, go and move."""
        process_dict_updates(self._rows, batch_update, self._new_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:  # (rows, V)
        """Let the end of the turn be the only token of each row that has a verdict; (rows, V), in place."""
        repeating = [index for index, row in self._rows.items() if self._has_verdict(row)]
        if repeating:
            logits[repeating] = -torch.inf
            logits[repeating, self._eos_id] = 0.0
        return logits

    def pop_triggers(self, request_ids: Sequence[str]) -> dict[str, Trigger]:
        """Those of ``request_ids`` that this engine ended, each reported once."""
        return {name: self._triggers.pop(name) for name in request_ids if name in self._triggers}

    def _new_row(self, params: SamplingParams, prompt_ids: list[int] | None, answer: list[int]) -> _Row:
        request_id = (params.extra_args or {}).get(REQUEST_KEY)
        return _Row(request_id, answer, RepeatGuard(self.config, self._reader))

    def _has_verdict(self, row: _Row) -> bool:
        guard, answer = row.guard, row.answer
        if guard.num_tokens > len(answer):  # vLLM took tokens back
            guard = row.guard = RepeatGuard(self.config, self._reader)
        for token in answer[guard.num_tokens :] if guard.num_tokens < len(answer) else ():
            if token == _NOT_SAMPLED_YET:
                raise RolloutError(
                    "vLLM asked for a verdict before it knew the newest token; start the server without asynchronous "
                    "scheduling"
                )
            if token == self._eos_id:
                return False  # over: with async scheduling vLLM computes one more step, and drops it
            guard.push(token)
        if guard.trigger is None:
            return False
        if row.request_id is not None:
            if len(self._triggers) >= _MAX_UNASKED:
                self._triggers.pop(next(iter(self._triggers)))
            self._triggers[row.request_id] = guard.trigger
        return True


def guard_of_worker(worker: Any) -> RepeatTerminateProcessor | None:
    """The guard that a vLLM worker really applies, or None.

    Raises:
        RolloutError: the worker runs vLLM's second model runner, which takes no processor of this interface.
    """
    if getattr(getattr(worker.model_runner, "input_batch", None), "logitsprocs", None) is None:
        runner = type(worker.model_runner)
        raise RolloutError(
            f"the worker's model runner is {runner.__module__}.{runner.__name__}, which takes no V1 logits processor; "
            "start the server with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return processor_of(worker, RepeatTerminateProcessor)


def guard_report(worker: Any) -> dict[str, Any]:
    """What a worker guards against, for a learner to compare with its own configuration; JSON can hold it."""
    guard = guard_of_worker(worker) if activated_config(os.environ) is not None else None
    return {"active": guard is not None, "config": None if guard is None else guard.config.model_dump()}


def _vocab_of(vllm_config: VllmConfig) -> CoordVocab:
    from transformers import AutoTokenizer

    name = vllm_config.model_config.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(name)
    vocab = CoordVocab.from_tokenizer(tokenizer)
    if tokenizer.eos_token_id != vocab.eos_id:
        raise RolloutError(
            f"{name}: the repeat guard ends answers with <|im_end|> ({vocab.eos_id}), but the engine stops at "
            f"{tokenizer.eos_token!r} ({tokenizer.eos_token_id}); set eos_token of the tokenizer to <|im_end|>"
        )
    return vocab
