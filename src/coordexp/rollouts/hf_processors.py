"""Logits processors for transformers' ``generate``: a random stream per sequence, the repeat guard, allowed labels.

``generate`` itself samples a whole batch from one stream, so an answer would change with its batch: with
``decode_batch_size``, with the number of processes, and after a resume. Make new processors for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from coordexp.rollouts.allowed_labels import START, AllowedLabels, NextTokens, ScanState, rows_by_state
from coordexp.rollouts.backend import DecodingOptions
from coordexp.rollouts.repeat_guard import RepeatGuard


class PerSequenceSampler(LogitsProcessor):
    """Samples each row with its own generator and masks all other tokens, so that greedy ``generate`` returns the
    sample. Must be the last processor that changes scores."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        """``seeds``: one per row."""
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    # Named as transformers names them: (B, L) token ids, (B, V) scores.
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probabilities = scores.float().softmax(-1)
        drawn = [
            torch.multinomial(row, 1, generator=stream)
            for row, stream in zip(probabilities, self._streams, strict=True)
        ]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.stack(drawn), 0.0)


def sampling_processors(options: DecodingOptions, seeds: Sequence[int], device: torch.device) -> list[LogitsProcessor]:
    """Processors that make greedy ``generate`` sample, in transformers' order; none for temperature 0."""
    if options.temperature <= 0:
        return []
    processors: list[LogitsProcessor] = []
    if options.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    return [*processors, PerSequenceSampler(seeds, device)]


class FinishedCallback(LogitsProcessor):
    """Changes no score: calls back with the number of rows that have ended, whenever it grows."""

    def __init__(self, eos_id: int, prompt_length: int, on_ended: Callable[[int], None]) -> None:
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._on_ended = on_ended
        self._ended = 0

    # Named as transformers names them: (B, L) token ids, (B, V) scores.
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self._prompt_length:
            ended = int((input_ids[:, -1] == self._eos_id).sum())
            if ended > self._ended:
                self._ended = ended
                self._on_ended(ended)
        return scores


class RepetitionStopProcessor(LogitsProcessor):
    """Forces the end of the turn on the step after the repeat guard triggers.

    A row is one sequence; with beam search ``num_beams`` neighbouring rows are the beams of one. ``prompt_length``
    counts the padded prompt, which the guard does not see.
    """

    def __init__(
        self, new_guard: Callable[[], RepeatGuard], eos_id: int, prompt_length: int, num_beams: int = 1
    ) -> None:
        self._new_guard = new_guard
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._num_beams = num_beams
        self._guard_of_row: list[RepeatGuard | None] = []  # None: its turn is over
        self._guard_of_beam: dict[tuple[int, ...], RepeatGuard] = {}
        self._stopped: set[tuple[int, tuple[int, ...]]] = set()

    # Named as transformers names them: (B, L) token ids, (B, V) scores.
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        guards = self._follow_beams(input_ids) if self._num_beams > 1 else self._follow_rows(input_ids)
        repeating = [row for row, guard in enumerate(guards) if guard is not None and guard.trigger is not None]
        if not repeating:
            return scores
        for row in repeating:
            answer = tuple(input_ids[row, self._prompt_length :].tolist())
            self._stopped.add((row // self._num_beams, answer))
        scores = scores.clone()
        scores[repeating] = -torch.inf
        scores[repeating, self._eos_id] = 0.0
        return scores

    def stopped(self, sequence: int, response: Sequence[int]) -> bool:
        """Whether the guard ended this answer (given without its end token) of that sequence of the batch."""
        return (sequence, tuple(response)) in self._stopped

    def _follow_rows(self, input_ids: torch.Tensor) -> list[RepeatGuard | None]:
        if input_ids.shape[1] == self._prompt_length:
            self._guard_of_row = [self._new_guard() for _ in range(len(input_ids))]
            return self._guard_of_row
        for row, token in enumerate(input_ids[:, -1].tolist()):
            guard = self._guard_of_row[row]
            if guard is None:
                continue  # the row is filled up with padding, which would look like one long run
            if token == self._eos_id:
                self._guard_of_row[row] = None
            else:
                guard.push(token)
        return self._guard_of_row

    def _follow_beams(self, input_ids: torch.Tensor) -> list[RepeatGuard | None]:
        """Beams change rows and split from step to step, so each is identified by its tokens."""
        guards: list[RepeatGuard | None] = []
        next_beams: dict[tuple[int, ...], RepeatGuard] = {}
        for answer in map(tuple, input_ids[:, self._prompt_length :].tolist()):
            if self._eos_id in answer:
                guards.append(None)
                continue
            if answer not in next_beams:
                next_beams[answer] = self._guard_after(answer)
            guards.append(next_beams[answer])
        self._guard_of_beam = next_beams
        return guards

    def _guard_after(self, answer: tuple[int, ...]) -> RepeatGuard:
        if not answer:
            return self._new_guard()
        parent = self._guard_of_beam.get(answer[:-1])
        guard = self._new_guard() if parent is None else parent.fork()
        for token in answer[guard.num_tokens :]:
            guard.push(token)
        return guard


class AllowedLabelsProcessor(LogitsProcessor):
    """Masks tokens that would begin a description outside of the list. Must come before the repeat guard's processor,
    whose end of the turn has priority. Rows are sequences or beams; ``prompt_length`` counts the padded prompt."""

    def __init__(self, rule: AllowedLabels, eos_id: int, prompt_length: int) -> None:
        self._rule = rule
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._state_of: dict[tuple[int, ...], ScanState | None] = {(): START}

    # Named as transformers names them: (B, L) token ids, (B, V) scores.
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answers = [tuple(answer) for answer in input_ids[:, self._prompt_length :].tolist()]
        self._state_of = {answer: self._state(answer) for answer in answers}
        masked = scores.clone()
        for state, rows in rows_by_state([self._state_of[answer] for answer in answers]).items():
            masked[rows] = mask(masked[rows], self._rule.next_tokens(state))
        return masked

    def _state(self, answer: tuple[int, ...]) -> ScanState | None:
        """The scanner's state after ``answer``; None if it has ended and padding follows."""
        if not answer:
            return START
        before = self._state_of[answer[:-1]] if answer[:-1] in self._state_of else self._state(answer[:-1])
        if before is None or answer[-1] == self._eos_id:
            return None
        return self._rule.after(before, answer[-1])


def mask(scores_RV: torch.Tensor, following: NextTokens) -> torch.Tensor:
    """The scores with forbidden tokens at minus infinity."""
    ids = torch.from_numpy(following.ids).to(scores_RV.device)
    if not following.are_allowed:
        return scores_RV.index_fill(1, ids, -torch.inf)
    only = torch.full_like(scores_RV, -torch.inf)
    only[:, ids] = scores_RV[:, ids]
    return only
