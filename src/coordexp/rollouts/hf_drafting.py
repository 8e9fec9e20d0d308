"""Decoding with transformers' model that skips forced tokens: a forward pass reads a draft of an answer's next tokens.

Each pass reads an answer's last token and a draft of those that follow (:mod:`coordexp.rollouts.answer_state`). The
next tokens are then chosen one after the other from the pass's logits, as ordinary decoding chooses them, up to and
including the first that differs from the draft. So answers, samples of a seed included, are those of ordinary decoding
up to rounding in the logits: the draft decides only how many tokens a pass yields.

The answers of a batch advance by different numbers of tokens, so each has a length of its own in the cache.

B sequences, S tokens of the padded prompt, T positions of a pass, L columns of the cache, H key heads, D dimensions of
a head, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from coordexp.errors import CoordExpError
from coordexp.rollouts.answer_state import AnswerState
from coordexp.rollouts.repeat_guard import RepeatGuard
from coordexp.sharding import any_rank_continues, is_sharded

MOST_PER_ANSWER = 32  # tokens of one answer
# Positions of a pass, of all answers: their logits take 0.3 GB in float32 with Qwen's vocabulary.
MOST_POSITIONS = 512
_SPARE = 128  # columns by which the cache grows


def are_broken(logits_V: torch.Tensor) -> bool:
    """Whether logits (…, V) are NaN, infinite or, after an overflow within the model, all the same. The host waits."""
    lowest, highest = logits_V.aminmax(dim=-1)  # NaN in both, if there is one
    width = highest.float() - lowest.float()
    return not bool(((width > 0) & width.isfinite()).all())


class DraftedAnswer:
    """One sequence of a batch: its tokens so far, and the draft that the next pass reads.

    ``processors`` change the scores of the next token, with this sequence alone as their batch; the most likely token
    is then taken. ``guard`` is called before them, and reads the host's tokens: for the device's, the host would wait.
    ``prompt_ids``: (S,), padded, for processors. ``tokens`` includes the end of the turn.
    """

    def __init__(
        self,
        state: AnswerState,
        prompt_ids: torch.Tensor,
        eos_id: int,
        max_new_tokens: int,
        processors: Sequence[LogitsProcessor] = (),
        guard: RepeatGuard | None = None,
    ) -> None:
        self.tokens: list[int] = []
        self.draft: tuple[int, ...] = ()
        self.ended = False
        self._state = state
        self._eos_id = eos_id
        self._max_new_tokens = max_new_tokens
        self._processors = processors
        self._guard = guard
        self._prompt_length = len(prompt_ids)
        self._ids = torch.cat([prompt_ids, prompt_ids.new_empty(max_new_tokens)]) if processors else prompt_ids

    def read(self, logits_TV: torch.Tensor, most_likely: Sequence[int]) -> None:
        """Choose tokens from a pass over the last token and the draft, until one differs from the draft."""
        for at, drafted in enumerate((*self.draft, None)):
            if self._guard is not None and self._guard.trigger is not None:
                token = self._eos_id
            else:
                token = self._choose(logits_TV[at]) if self._processors else most_likely[at]
            if self._processors:
                self._ids[self._prompt_length + len(self.tokens)] = token
            self.tokens.append(token)
            self._state.push(token)
            self.ended = token == self._eos_id or len(self.tokens) == self._max_new_tokens
            if self._guard is not None and not self.ended:
                self._guard.push(token)
            if self.ended or token != drafted:
                return

    def propose(self, limit: int) -> None:
        """Draft the next tokens, at most ``limit``."""
        # The token after the draft is chosen too.
        self.draft = self._state.draft(max(0, min(limit, self._max_new_tokens - len(self.tokens) - 1)))

    def _choose(self, logits_V: torch.Tensor) -> int:
        scores_1V = logits_V.float()[None]
        ids_1L = self._ids[None, : self._prompt_length + len(self.tokens)]
        for processor in self._processors:
            scores_1V = processor(ids_1L, scores_1V)  # pyright: ignore[reportArgumentType]
        return int(scores_1V.argmax())


class DraftedDecoding:
    """``custom_generate`` of transformers' ``generate``: decodes ``answers`` to their ends.

    ``generate`` prepares the prompts' pass; of its processors and stopping criteria none is used. ``prompt_rows``: each
    answer's prompt, so several answers share one. ``known``: number of the tokenizer's tokens; rows of the head beyond
    are never chosen. ``broken``: the error for broken logits. ``on_ended`` is called with the number of
    ended answers whenever it grows. If FSDP shards the model, all ranks must call it, and make equally many passes;
    without answers one only takes part in the others'.
    """

    def __init__(
        self,
        answers: Sequence[DraftedAnswer],
        prompt_rows: Sequence[int],
        known: int,
        pad_id: int,
        broken: Callable[[], CoordExpError],
        on_ended: Callable[[int], None] | None = None,
    ) -> None:
        self._answers = answers
        self._broken = broken
        self._prompt_rows = list(prompt_rows)
        self._known = known
        self._pad_id = pad_id
        self._on_ended = on_ended

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **prepared: Any,
    ) -> torch.Tensor:
        """``prepared``: further arguments of the model. Returns each answer after its prompt, padded: (B, L)."""
        outputs = model(input_ids=input_ids, **prepared)
        mask_BS = prepared["attention_mask"]  # None without padding
        visible_BS = torch.ones_like(input_ids, dtype=torch.bool) if mask_BS is None else mask_BS.bool()
        self._decode(model, outputs, visible_BS, prepared["position_ids"][1:])
        longest = max((len(answer.tokens) for answer in self._answers), default=0)
        answers_BT = input_ids.new_full((len(self._answers), longest), self._pad_id)
        for row, answer in zip(answers_BT, self._answers, strict=True):
            row[: len(answer.tokens)] = torch.tensor(answer.tokens)
        return torch.cat([input_ids[self._prompt_rows], answers_BT], dim=1)

    def _decode(self, model: Any, outputs: Any, visible_BS: torch.Tensor, positions_3BS: torch.Tensor) -> None:
        cache = RaggedCache(outputs.past_key_values, visible_BS)
        cache.take(self._prompt_rows)
        # The position of each answer's first token, and the logits for it.
        first_B = positions_3BS.amax((0, 2))[self._prompt_rows] + 1
        logits_BTV = outputs.logits[self._prompt_rows]
        num_prompt, device, running = visible_BS.shape[1], visible_BS.device, list(self._answers)
        sharded = is_sharded(model)  # here, as it visits every module
        if are_broken(logits_BTV[..., : self._known]):
            raise self._broken()
        while True:
            logits_BTV[..., self._known :] = -torch.inf
            for answer, logits_TV, best in zip(running, logits_BTV, logits_BTV.argmax(-1).tolist(), strict=True):
                answer.read(logits_TV, best)
            rows = [row for row, answer in enumerate(running) if not answer.ended]
            if len(rows) < len(running):
                if self._on_ended is not None:
                    self._on_ended(len(self._answers) - len(rows))
                running = [running[row] for row in rows]
                cache.take(rows)
                first_B = first_B[rows]
            if not running:
                break
            any_rank_continues(True, sharded=sharded)  # for ranks whose answers have ended
            for answer in running:
                answer.propose(min(MOST_PER_ANSWER, MOST_POSITIONS // len(running) - 1))
            width = 1 + max(len(answer.draft) for answer in running)
            # Fill shorter drafts up with any token: nothing sees it, because it is later than all that is read.
            tokens = [[one.tokens[-1], *one.draft, *[0] * (width - 1 - len(one.draft))] for one in running]
            done = [len(answer.tokens) - 1 for answer in running]  # tokens of each answer in the cache
            steps_BT = torch.tensor(done, device=device)[:, None] + torch.arange(width, device=device)
            logits_BTV = model(
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=cache.open([num_prompt + one for one in done], width),
                position_ids=(first_B[:, None] + steps_BT).expand(3, -1, -1),
                past_key_values=cache,
                use_cache=True,
            ).logits
        token_11, position_311 = visible_BS.new_zeros(1, 1, dtype=torch.int64), positions_3BS.new_zeros(3, 1, 1)
        while any_rank_continues(False, sharded=sharded):  # a pass like theirs: without an image
            model(input_ids=token_11, position_ids=position_311, use_cache=False)


class RaggedCache:
    """Keys and values of sequences that have different lengths. Columns beyond a sequence's length are overwritten.

    Not a transformers' Cache, which counts one length for all: the model calls nothing but :meth:`update`, because it
    gets positions and a whole mask.
    """

    def __init__(self, prompts: Any, visible_BS: torch.Tensor) -> None:
        """``prompts``: transformers' cache after a pass over padded prompts. ``visible_BS``: False at the padding."""
        self._layers: list[list[torch.Tensor]] = [
            [layer.keys, layer.values] for layer in prompts.layers
        ]  # (B, H, L, D)
        self._visible_BL = visible_BS
        self._used = visible_BS.shape[1]
        self._columns_BT = torch.empty(0, 0, dtype=torch.int64)

    def open(self, lengths: Sequence[int], width: int) -> torch.Tensor:
        """Prepare for a pass over ``width`` tokens of each sequence, after its first ``lengths`` columns. Returns the
        mask of the pass: (B, 1, T, L), True at columns that a token sees."""
        visible_BL, device = self._visible_BL, self._visible_BL.device
        self._used = max(lengths) + width
        if (missing := self._used - visible_BL.shape[1]) > 0:
            grown = visible_BL.new_ones(len(visible_BL), missing + _SPARE)
            visible_BL = self._visible_BL = torch.cat([visible_BL, grown], dim=1)
        self._columns_BT = torch.tensor(lengths, device=device)[:, None] + torch.arange(width, device=device)
        earlier_BTL = torch.arange(self._used, device=device) <= self._columns_BT[:, :, None]
        return (visible_BL[:, None, : self._used] & earlier_BTL)[:, None]

    def update(
        self, key_BHTD: torch.Tensor, value_BHTD: torch.Tensor, layer: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values; all of them up to the longest sequence."""
        held, rows_B1 = self._layers[layer], torch.arange(len(key_BHTD), device=key_BHTD.device)[:, None]
        for k, new_BHTD in enumerate((key_BHTD, value_BHTD)):
            batch, heads, columns, dim = held[k].shape
            if (missing := self._visible_BL.shape[1] - columns) > 0:
                held[k] = torch.cat([held[k], held[k].new_zeros(batch, heads, missing, dim)], dim=2)
            # Under autocast keys leave the rotation in float32 and values in bfloat16; the prompt's decide.
            held[k][rows_B1, :, self._columns_BT] = new_BHTD.transpose(1, 2).to(held[k].dtype)
        return held[0][:, :, : self._used], held[1][:, :, : self._used]

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these sequences, in this order; one that is named twice is copied."""
        if list(rows) == list(range(len(self._visible_BL))):
            return
        self._visible_BL = self._visible_BL[rows]
        self._layers = [[keys[rows], values[rows]] for keys, values in self._layers]
