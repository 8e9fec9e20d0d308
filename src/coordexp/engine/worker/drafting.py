"""Decoding that skips forced tokens: vLLM's speculative decoding with drafts from the answer's grammar.

:class:`AnswerDrafter` proposes the tokens that come next; the model verifies all of them in one forward pass, so
answers equal those of ordinary decoding. vLLM does not support logits processors together with drafts, so
:func:`install` applies ours to every drafted position, before vLLM's model runner samples. vLLM imports this module in
each engine process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import AutoTokenizer
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from coordexp.coords import CoordVocab
from coordexp.engine.wire.arguments import DRAFTER, activated_config
from coordexp.engine.worker.logits_processors import (
    KnownTokensProcessor,
    RepeatTerminateProcessor,
    RequestClassNamesProcessor,
)
from coordexp.rollouts.answer_state import AnswerGrammar, AnswerState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Processor = TypeVar("Processor", bound=LogitsProcessor)
# Tokens of all drafts of a step. Their logits take 0.8 GB with Qwen's vocabulary, and vLLM reserves no memory for them.
# Above a few hundred tokens per step, a GPU also needs time for each further one.
MOST_DRAFTED = 512
TURN_START = "<|im_start|>"
_HEADER = "assistant\n"


class AnswerDrafter:
    """A custom proposer of vLLM (``speculative_config``)."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        tokenizer: Any = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        vocab = CoordVocab.from_tokenizer(tokenizer)
        self._grammar = AnswerGrammar(vocab, on_gpu=not current_platform.is_cpu())
        # Larger steps would run without a CUDA graph. None are captured on CPUs and with enforce_eager.
        self._captured = max(vllm_config.compilation_config.cudagraph_capture_sizes or (), default=None)
        self._limit = vllm_config.speculative_config.num_speculative_tokens  # pyright: ignore[reportOptionalMemberAccess]
        self._max_len = vllm_config.model_config.max_model_len
        self._turn_start = tokenizer.convert_tokens_to_ids(TURN_START)
        self._header = np.array(vocab.encode(_HEADER))
        self._rows: dict[int, _TrackedAnswer] = {}

    def load_model(self, *_: Any, **__: Any) -> None:
        """Required by vLLM; there is nothing to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts of all rows of the batch, in total at most ``MOST_DRAFTED`` tokens, and no more than fit with a token
        of each row into the largest CUDA graph. A row that has not sampled a token yet, because its prompt is being
        processed, gets an empty draft."""
        drafts: list[list[int]] = []
        for row, (sampled, length) in enumerate(zip(sampled_token_ids, num_tokens_no_spec.tolist(), strict=False)):
            room = min(self._limit, self._max_len - length - 1)
            if not len(sampled) or room <= 0:
                drafts.append([])
                continue
            state = self._state(row, token_ids_cpu[row], length)
            drafts.append(list(state.draft(room)) if state is not None else [])
        most = MOST_DRAFTED if self._captured is None else max(0, min(MOST_DRAFTED, self._captured - len(drafts)))
        if sum(map(len, drafts)) > most:
            return [draft[: most // len(drafts)] for draft in drafts]
        return drafts

    def _state(self, row: int, ids: np.ndarray, length: int) -> AnswerState | None:
        # Requests may move to other rows, so compare this row's answer with the one that its state has read, as bytes,
        # which is fastest. Equal answers have equal states, so it does not matter whose state it was.
        tracked = self._rows.get(row)
        written = b"" if tracked is None else ids[tracked.begin : length].tobytes()
        if tracked is None or not tracked.read or not written.startswith(tracked.read):
            starts = np.flatnonzero(ids[:length] == self._turn_start)
            begin = int(starts[-1]) + 1 + len(self._header) if len(starts) else length + 1
            if begin > length or not np.array_equal(ids[begin - len(self._header) : begin], self._header):
                return None
            tracked = self._rows[row] = _TrackedAnswer(begin, begin, b"", self._grammar.start())
            written = ids[begin:length].tobytes()
        tracked.state.extend(ids[tracked.end : length].tolist())
        tracked.read, tracked.end = written, length
        return tracked.state


@dataclass(slots=True)
class _TrackedAnswer:
    """The answer of one row as far as it was read, as bytes, with the state after that. It begins at column ``begin``
    of the batch's tokens and was read to ``end``."""

    begin: int
    end: int
    read: bytes
    state: AnswerState


class _MaskedRow(NamedTuple):
    """One request: its answer (a list that vLLM extends), and its rows of both processors, which read that list."""

    answer: list[int]
    class_names: Any
    guard: Any


class DraftedMasks:
    """Our logits processors, for batches in which each request has the logits of several positions."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.known_tokens = KnownTokensProcessor(vllm_config, device, False)
        self.class_names = RequestClassNamesProcessor(vllm_config, device, False)
        guarded = activated_config(os.environ) is not None
        self.guard = RepeatTerminateProcessor(vllm_config, device, False) if guarded else None
        self.processors = [one for one in (self.known_tokens, self.class_names, self.guard) if one is not None]
        self._rows: dict[str, _MaskedRow] = {}  # of the requests of the last batch

    def sample(self, runner: Any, logits: torch.Tensor, metadata: Any, sample: Any) -> Any:
        """Mask ``logits`` in place (one row per position), and sample by ``sample(logits, metadata)``."""
        batch, before, guards = runner.input_batch, self._rows, self.guard
        self.known_tokens.apply(logits)
        self._rows = {}
        ends = []  # (request, position in its draft, trigger, row)
        first = 0
        for index, name in enumerate(batch.req_ids):
            count = 0 if metadata is None else metadata.num_draft_tokens[index]
            request, row = runner.requests[name], before.get(name)
            # vLLM may replace a request's list of tokens, as when it resumes a preempted one; its rows then start over.
            if row is None or row.answer is not request.output_token_ids:
                row = self._new_row(request)
            self._rows[name] = row
            guarded = guards is not None and guards.may_end_within(row.guard, count)
            if guarded or row.class_names is not None:
                draft = list(takewhile(lambda token: token >= 0, batch.spec_token_ids[index][:count]))  # padded with -1
                if row.class_names is not None:
                    self.class_names.mask_rows(logits[first : first + count + 1], row.class_names, draft)
                if guards is not None and guarded and (end := self._end_of(row.guard, draft)) is not None:
                    guards.end(logits, [first + end[0]])
                    ends.append((index, *end, row.guard))
            first += count + 1
        output = sample(logits, metadata)
        for index, position, trigger, guard in ends:
            assert self.guard is not None
            # Report the trigger only if the draft was accepted up to here and the answer had not ended before.
            taken = output.sampled_token_ids[index, : position + 1].tolist()
            if len(taken) == position + 1 and taken[-1] == self.guard.eos_id and self.guard.eos_id not in taken[:-1]:
                self.guard.keep_trigger(guard, trigger)
        return output

    def _new_row(self, request: Any) -> _MaskedRow:
        params, answer = request.sampling_params, request.output_token_ids
        guard = None if self.guard is None else self.guard.new_row(params, None, answer)
        return _MaskedRow(answer, self.class_names.new_row(params, None, answer), guard)

    def _end_of(self, row: Any, draft: Sequence[int]) -> tuple[int, Any] | None:
        # The first position at which the guard ends the answer, if the draft up to there is accepted; its trigger.
        assert self.guard is not None
        if not self.guard.read(row) or len(draft) < row.guard.fewest_to_trigger():
            return None
        guard = row.guard.fork()
        for position in range(len(draft) + 1):
            if guard.trigger is not None:
                return position, guard.trigger
            if position < len(draft):
                guard.push(draft[position])
        return None


def masks_of(runner: Any) -> DraftedMasks | None:
    """The masks that vLLM's model runner applies to drafted positions; None if its engine does not use our drafter."""
    speculative = getattr(getattr(runner, "vllm_config", None), "speculative_config", None)
    if speculative is None or speculative.model != DRAFTER or not getattr(type(runner)._sample, "is_masked", False):
        return None
    if getattr(runner, "coordexp_masks", None) is None:
        runner.coordexp_masks = DraftedMasks(runner.vllm_config, runner.device)
    return runner.coordexp_masks


def processor_of(worker: Any, kind: type[Processor]) -> Processor | None:
    """The processor of that class that a vLLM worker applies; None if vLLM dropped it."""
    runner = worker.model_runner
    drafted = masks_of(runner)
    batch = getattr(runner, "input_batch", None)
    processors = getattr(getattr(batch, "logitsprocs", None), "all", ()) if drafted is None else drafted.processors
    return next((one for one in processors if isinstance(one, kind)), None)


def guard_report(worker: Any) -> dict[str, Any]:
    """The guard that a worker applies, JSON-serialisable, for the trainer to compare with its configuration."""
    guard = processor_of(worker, RepeatTerminateProcessor)
    return {"active": guard is not None, "config": None if guard is None else guard.config.model_dump()}


def install() -> None:
    """Make every model runner with our drafter apply our masks."""
    unmasked = GPUModelRunner._sample
    if getattr(unmasked, "is_masked", False):
        return

    @wraps(unmasked)
    def masked(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        masks = masks_of(self)
        if logits is None or masks is None:
            return unmasked(self, logits, spec_decode_metadata)
        return masks.sample(self, logits, spec_decode_metadata, lambda *args: unmasked(self, *args))

    masked.is_masked = True  # pyright: ignore[reportAttributeAccessIssue]
    GPUModelRunner._sample = masked  # pyright: ignore[reportAttributeAccessIssue]
