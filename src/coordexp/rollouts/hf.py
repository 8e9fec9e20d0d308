"""Rollouts by transformers' ``generate`` on the trainer's own model: no second engine, no weight copy.

``generate`` itself samples a whole batch from one stream, so an answer would change with its batch: with
``decode_batch_size``, with the number of processes, and after a resume. So it runs greedily, and logits processors
sample from a random stream per sequence. Others apply the repeat guard and the class names. All are new for each
call. Their ``__call__`` has transformers' argument names: (B, L) token ids, (B, V) scores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.coords import CoordVocab
from coordexp.errors import CoordExpError, broken_logits
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.answer_state import AnswerGrammar
from coordexp.rollouts.backend import (
    FIRST_OF_SEED_0,
    DecodingOptions,
    IndexedRollout,
    RolloutRound,
    Seeds,
    collect_in_order,
    response_tokens,
)
from coordexp.rollouts.class_names import START, ClassNames, NextTokens, ScanState
from coordexp.rollouts.hf_drafting import DraftedAnswer, DraftedDecoding, are_broken
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard
from coordexp.sharding import forward_passes, missing_calls, smallest_prompt
from coordexp.transfer import send

# Whether the repeat guard ended the answer of a row of the batch, given without its end token.
Stopped = Callable[[int, Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Request ``index`` of round ``round_idx``, and the seed that it samples by; None for a greedy answer."""

    round_idx: int
    index: int
    request: RolloutRequest
    seed: int | None


class HFBackend:
    """Batched decoding with left padding, at most ``decode_batch_size`` sequences at once.

    Each request has the seed of its own place, as in a colocated engine: its answer does not depend on
    ``decode_batch_size``. The model's train/eval mode and random state stay as they are.
    """

    def __init__(
        self,
        model: Any,
        vocab: CoordVocab,
        options: DecodingOptions,
        decode_batch_size: int,
        image_token_id: int,
        repeat_terminate: RepeatTerminateConfig | None = None,
        class_names: Sequence[str] = (),
        skip_forced_tokens: bool = False,
    ) -> None:
        """``repeat_terminate``: the repeat guard, if enabled. ``class_names``: those that answers may use; empty for
        any. ``skip_forced_tokens``: not possible with beam search."""
        self._model = model
        self._vocab = vocab
        self._options = options
        self._decode_batch_size = decode_batch_size
        self._image_token_id = image_token_id
        self._pad_id = vocab.eos_id
        self._version = 0
        self._seeds: list[int] = []
        self._guard = repeat_terminate if repeat_terminate is not None and repeat_terminate.enabled else None
        self._class_names = ClassNames(class_names, vocab.pieces, vocab.eos_id) if class_names else None
        counts_keys = self._guard is not None and self._guard.max_object_keys is not None
        self._key_reader = ObjectKeyReader(vocab.pieces) if counts_keys else None
        on_gpu = skip_forced_tokens and next(model.parameters()).device.type == "cuda"
        self._grammar = AnswerGrammar(vocab, on_gpu) if skip_forced_tokens else None

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        seeds: Seeds = FIRST_OF_SEED_0,
        on_answer: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        return collect_in_order(self._answers([RolloutRound(tuple(requests), seeds)], on_answer))

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        return self._answers(rounds, None)

    def _answers(
        self, rounds: Sequence[RolloutRound], on_answer: Callable[[int], None] | None
    ) -> Iterator[IndexedRollout]:
        # Batches are filled across micro-steps: a small batch needs as many decoding steps as a full one.
        batches, done = self._batches(rounds), 0
        missing = missing_calls(self._model, len(batches))
        for batch in batches:
            on_ended = None if on_answer is None else lambda ended, done=done: on_answer(done + ended)
            with forward_passes(self._model):
                rollouts = self._generate_batch(batch, on_ended)
            done += len(batch)
            if on_answer is not None:
                on_answer(done)
            for one, rollout in zip(batch, rollouts, strict=True):
                yield IndexedRollout(one.round_idx, one.index, rollout)
        for _ in range(missing):  # within a call, ranks make equally many passes, until all have ended
            prompt = smallest_prompt(self._model)
            no_answers = {} if self._grammar is None else self._drafts(self._grammar, prompt, [], [], None)[0]
            self._call_generate(prompt, max_new_tokens=1, **no_answers)

    def _batches(self, rounds: Sequence[RolloutRound]) -> list[list[_Wanted]]:
        size = self._decode_batch_size
        wanted: list[_Wanted] = []
        for round_idx, one in enumerate(rounds):
            seeds = [one.seeds.seed_of(index) for index in range(len(one.requests))]
            self._seeds += seeds
            wanted += [
                _Wanted(round_idx, index, request, None if one.greedy else seed)
                for index, (request, seed) in enumerate(zip(one.requests, seeds, strict=True))
            ]
        if all(one.requests is rounds[0].requests for one in rounds[1:]):  # several answers to each prompt
            wanted.sort(key=lambda one: one.index)  # then they are in one batch, and may share the prompt's pass
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    def _generate_batch(self, batch: Sequence[_Wanted], on_ended: Callable[[int], None] | None) -> list[Rollout]:
        vocab, requests = self._vocab, [one.request for one in batch]
        # Drafts let several answers to one prompt share its forward pass; ``generate`` itself does not.
        rows = list(range(len(batch))) if self._grammar is None else _rows_of_prompts(requests)
        prompt = self._prompt([requests[rows.index(row)] for row in range(max(rows) + 1)])
        arguments, stopped = self._arguments(prompt, rows, [one.seed for one in batch], on_ended)
        output_BT = self._call_generate(prompt, max_new_tokens=self._options.max_new_tokens, **arguments)
        rollouts = []
        answers = output_BT[:, prompt["input_ids"].shape[1] :].tolist()
        for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            reason = "stop" if vocab.eos_id in answer else "length"  # padding follows an end, so it is cut off too
            tokens = response_tokens(answer, reason, vocab, request.sample_id)
            rollout = Rollout(
                sample_id=request.sample_id,
                prompt_token_ids=request.prompt_token_ids,
                response_token_ids=tokens.token_ids,
                text=vocab.decode(tokens.token_ids),
                truncated=tokens.truncated,
                repeat_terminated=tokens.ended and stopped(row, tokens.token_ids),
                weight_version=self._version,
            )
            rollouts.append(rollout)
        return rollouts

    def _call_generate(self, prompt: Mapping[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
        # transformers reads missing arguments from the checkpoint's generation_config: an n-gram ban or a minimum
        # length would leak into the run.
        was_training = {module: module.training for module in self._model.modules()}
        of_checkpoint, self._model.generation_config = self._model.generation_config, GenerationConfig()
        self._model.eval()
        try:
            with torch.no_grad():
                return self._model.generate(
                    **prompt,
                    **arguments,
                    do_sample=False,  # a processor samples
                    num_beams=self._options.num_beams,
                    num_return_sequences=1,
                    eos_token_id=self._vocab.eos_id,
                    pad_token_id=self._pad_id,
                    use_cache=True,
                )
        finally:
            self._model.generation_config = of_checkpoint
            for module, training in was_training.items():
                module.training = training

    def _prompt(self, requests: Sequence[RolloutRequest]) -> dict[str, torch.Tensor]:
        # The model's arguments.
        device = next(self._model.parameters()).device
        longest = max(len(request.prompt_token_ids) for request in requests)
        ids_BL = torch.full((len(requests), longest), self._pad_id, dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL)
        for row, request in enumerate(requests):
            ids_BL[row, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask_BL[row, longest - len(request.prompt_token_ids) :] = 1
        prompt = {
            "input_ids": ids_BL,
            "attention_mask": mask_BL,
            "mm_token_type_ids": (ids_BL == self._image_token_id).int(),
            "pixel_values": torch.cat([request.model_inputs["pixel_values"] for request in requests]),
            "image_grid_thw": torch.cat([request.model_inputs["image_grid_thw"] for request in requests]),
        }
        return {name: send(tensor, device) for name, tensor in prompt.items()}

    def _processors(
        self, prompt: Mapping[str, torch.Tensor], seeds: Sequence[int | None], guard: LogitsProcessor | None = None
    ) -> list[LogitsProcessor]:
        # For one batch, with ``guard`` where it belongs.
        longest, device = prompt["input_ids"].shape[1], prompt["input_ids"].device
        rule = self._class_names
        names = [] if rule is None else [BatchClassNamesProcessor(rule, self._vocab.eos_id, longest)]
        guards = [] if guard is None else [guard]
        return [*names, *guards, *sampling_processors(self._options, seeds, device)]

    def _arguments(
        self,
        prompt: Mapping[str, torch.Tensor],
        rows: Sequence[int],
        seeds: Sequence[int | None],
        on_ended: Callable[[int], None] | None,
    ) -> tuple[dict[str, Any], Stopped]:
        # How ``generate`` chooses tokens: by drafts, or by processors. ``rows``: each answer's row of ``prompt``.
        options, vocab, penalty = self._options, self._vocab, self._options.repetition_penalty
        if self._grammar is not None:
            return self._drafts(self._grammar, prompt, rows, seeds, on_ended)
        longest, guard = prompt["input_ids"].shape[1], None
        if (settings := self._guard) is not None:
            new_guard = partial(RepeatGuard, settings, self._key_reader)
            guard = RepetitionStopProcessor(new_guard, vocab.eos_id, longest, options.num_beams)
        processors = [SoundPrompt(len(vocab), self._broken), *self._processors(prompt, seeds, guard)]
        if on_ended is not None and options.num_beams == 1:
            processors.append(FinishedCallback(vocab.eos_id, longest, on_ended))
        arguments: dict[str, Any] = {"repetition_penalty": penalty, "logits_processor": processors}
        # Checkpoints may have more embedding rows than the tokenizer has tokens; their ids decode to nothing.
        if unknown := range(len(vocab), self._model.config.text_config.vocab_size):
            arguments["suppress_tokens"] = list(unknown)
        return arguments, lambda row, response: guard is not None and guard.stopped(row, response)

    def _drafts(
        self,
        grammar: AnswerGrammar,
        prompt: Mapping[str, torch.Tensor],
        rows: Sequence[int],
        seeds: Sequence[int | None],
        on_ended: Callable[[int], None] | None,
    ) -> tuple[dict[str, Any], Stopped]:
        # The processors of an answer see that answer alone, as often as it gets a token.
        options, vocab = self._options, self._vocab
        answers: list[DraftedAnswer] = []
        for row, seed in zip(rows, seeds, strict=True):
            processors = self._processors(prompt, [seed])
            if options.repetition_penalty != 1.0:
                processors.insert(0, RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
            guard = None if self._guard is None else RepeatGuard(self._guard, self._key_reader)
            ids_L, most = prompt["input_ids"][row], options.max_new_tokens
            answers.append(DraftedAnswer(grammar.start(), ids_L, vocab.eos_id, most, processors, guard))

        decoding = DraftedDecoding(answers, rows, len(vocab), self._pad_id, self._broken, on_ended)
        return {"custom_generate": decoding}, lambda row, _: answers[row].repeats

    def _broken(self) -> CoordExpError:
        return broken_logits(self._model.name_or_path, self._version)

    @property
    def batch_size(self) -> int:
        return self._decode_batch_size

    def sync_weights(self, version: int) -> None:
        self._version = version
        self._seeds = []

    def release(self) -> None: ...

    def last_report(self) -> Mapping[str, Any]:
        return {
            "backend": "hf",
            "weight_version": self._version,
            "decode_batch_size": self._decode_batch_size,
            "decoding": asdict(self._options),
            "seeds": self._seeds,
        }

    def take_metrics(self) -> Mapping[str, float]:
        return {"rollout/repeat_terminate_active": float(self._guard is not None)}

    def close(self) -> None: ...


def _rows_of_prompts(requests: Sequence[RolloutRequest]) -> list[int]:
    """The place of each request among the different ones: several answers have the same request."""
    row_of: dict[int, int] = {}
    return [row_of.setdefault(id(request), len(row_of)) for request in requests]


class PerSequenceSampler(LogitsProcessor):
    """Samples each row with its own seed and masks all other tokens, so that greedy ``generate`` returns the sample. A
    row without a seed stays greedy. Must be the last processor that changes scores."""

    def __init__(self, seeds: Sequence[int | None], device: torch.device) -> None:
        self._streams = [None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probabilities = scores.float().softmax(-1)
        drawn = [
            row.argmax(-1, keepdim=True) if stream is None else torch.multinomial(row, 1, generator=stream)
            for row, stream in zip(probabilities, self._streams, strict=True)
        ]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.stack(drawn), 0.0)


def sampling_processors(
    options: DecodingOptions, seeds: Sequence[int | None], device: torch.device
) -> list[LogitsProcessor]:
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


class SoundPrompt(LogitsProcessor):
    """Changes no score: raises ``error`` if the logits after the prompts are broken. The host waits for it once, not at
    every token. ``known``: number of the tokenizer's tokens."""

    def __init__(self, known: int, error: Callable[[], CoordExpError]) -> None:
        self._known = known
        self._error = error
        self._looked = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._looked and are_broken(scores[:, : self._known]):
            raise self._error()
        self._looked = True
        return scores


class FinishedCallback(LogitsProcessor):
    """Changes no score: calls back with the number of rows that have ended, whenever it grows."""

    def __init__(self, eos_id: int, prompt_length: int, on_ended: Callable[[int], None]) -> None:
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._on_ended = on_ended
        self._ended = 0

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

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        guards = self._guard_of_row
        if self._num_beams > 1:
            guards = self._follow_beams(input_ids)
        elif input_ids.shape[1] == self._prompt_length:
            guards[:] = [self._new_guard() for _ in range(len(input_ids))]
        else:
            for row, token in enumerate(input_ids[:, -1].tolist()):
                guard = guards[row]
                if token == self._eos_id:  # padding follows, which would look like one long run
                    guards[row] = None
                elif guard is not None:
                    guard.push(token)
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

    def _follow_beams(self, input_ids: torch.Tensor) -> list[RepeatGuard | None]:
        # Beams change rows and split from step to step, so each is identified by its tokens.
        guards: list[RepeatGuard | None] = []
        next_beams: dict[tuple[int, ...], RepeatGuard] = {}
        for answer in map(tuple, input_ids[:, self._prompt_length :].tolist()):
            if self._eos_id in answer:
                guards.append(None)
                continue
            if answer not in next_beams:
                parent = self._guard_of_beam.get(answer[:-1]) if answer else None
                guard = next_beams[answer] = self._new_guard() if parent is None else parent.fork()
                for token in answer[guard.num_tokens :]:
                    guard.push(token)
            guards.append(next_beams[answer])
        self._guard_of_beam = next_beams
        return guards


class BatchClassNamesProcessor(LogitsProcessor):
    """Masks tokens that would begin a description outside of the list. Must precede the repeat guard's processor: the
    guard's end of the turn has priority. Rows are sequences or beams; ``prompt_length`` counts the padded prompt."""

    def __init__(self, rule: ClassNames, eos_id: int, prompt_length: int) -> None:
        self._rule = rule
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._state_of: dict[tuple[int, ...], ScanState | None] = {(): START}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answers = [tuple(answer) for answer in input_ids[:, self._prompt_length :].tolist()]
        self._state_of = {answer: self._state(answer) for answer in answers}
        rows_of: defaultdict[ScanState | None, list[int]] = defaultdict(list)
        for row, answer in enumerate(answers):
            rows_of[self._state_of[answer]].append(row)
        masked = scores.clone()
        for state, rows in rows_of.items():
            if state is not None:
                masked[rows] = mask(masked[rows], self._rule.next_tokens(state))
        return masked

    def _state(self, answer: tuple[int, ...]) -> ScanState | None:
        # The scanner's state after ``answer``; None if it has ended and padding follows.
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
