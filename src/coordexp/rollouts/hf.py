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
from typing import Any, Generic, TypeVar

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

State = TypeVar("State")


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
        self._new_guard: Callable[[], RepeatGuard] | None = None
        if repeat_terminate is not None and repeat_terminate.enabled:
            reader = None if repeat_terminate.max_object_keys is None else ObjectKeyReader(vocab.pieces)
            self._new_guard = partial(RepeatGuard, repeat_terminate, reader)
        self._class_names = ClassNames(class_names, vocab.pieces, vocab.eos_id) if class_names else None
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
            no_answers = {} if self._grammar is None else self._drafts(self._grammar, prompt, [], [], None)
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
        seeds = [one.seed for one in batch]
        if self._grammar is None:
            arguments = self._processed(prompt, seeds)
        else:
            arguments = self._drafts(self._grammar, prompt, rows, seeds, on_ended)
        output_BT = self._call_generate(prompt, max_new_tokens=self._options.max_new_tokens, **arguments)
        rollouts = []
        answers = output_BT[:, prompt["input_ids"].shape[1] :].tolist()
        for request, answer in zip(requests, answers, strict=True):
            reason = "stop" if vocab.eos_id in answer else "length"  # padding follows an end, so it is cut off too
            tokens = response_tokens(answer, reason, vocab, request.sample_id)
            # An answer that triggers the guard is ended there, so one that did was ended by it.
            guard = None if self._new_guard is None else self._new_guard()
            repeats = tokens.ended and guard is not None and guard.extend(tokens.token_ids) is not None
            rollout = Rollout(
                sample_id=request.sample_id,
                prompt_token_ids=request.prompt_token_ids,
                response_token_ids=tokens.token_ids,
                text=vocab.decode(tokens.token_ids),
                truncated=tokens.truncated,
                repeat_terminated=repeats,
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
        self, prompt: Mapping[str, torch.Tensor], seeds: Sequence[int | None], guards: Sequence[LogitsProcessor] = ()
    ) -> list[LogitsProcessor]:
        # For one batch, with ``guards`` where they belong.
        longest, device = prompt["input_ids"].shape[1], prompt["input_ids"].device
        rule = self._class_names
        names = [] if rule is None else [BatchClassNamesProcessor(rule, self._vocab.eos_id, longest)]
        return [*names, *guards, *sampling_processors(self._options, seeds, device)]

    def _processed(self, prompt: Mapping[str, torch.Tensor], seeds: Sequence[int | None]) -> dict[str, Any]:
        # ``generate`` chooses tokens by processors.
        vocab, longest = self._vocab, prompt["input_ids"].shape[1]
        guards = [] if self._new_guard is None else [RepetitionStopProcessor(self._new_guard, vocab.eos_id, longest)]
        arguments: dict[str, Any] = {
            "repetition_penalty": self._options.repetition_penalty,
            "logits_processor": [SoundPrompt(len(vocab), self._broken), *self._processors(prompt, seeds, guards)],
        }
        # Checkpoints may have more embedding rows than the tokenizer has tokens; their ids decode to nothing.
        if unknown := range(len(vocab), self._model.config.text_config.vocab_size):
            arguments["suppress_tokens"] = list(unknown)
        return arguments

    def _drafts(
        self,
        grammar: AnswerGrammar,
        prompt: Mapping[str, torch.Tensor],
        rows: Sequence[int],
        seeds: Sequence[int | None],
        on_ended: Callable[[int], None] | None,
    ) -> dict[str, Any]:
        # ``generate`` chooses tokens by drafts. The processors of an answer see that answer alone, as often as it gets
        # a token. ``rows``: each answer's row of ``prompt``.
        options, vocab = self._options, self._vocab
        answers: list[DraftedAnswer] = []
        for row, seed in zip(rows, seeds, strict=True):
            processors = self._processors(prompt, [seed])
            if options.repetition_penalty != 1.0:
                processors.insert(0, RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
            guard = None if self._new_guard is None else self._new_guard()
            ids_L, most = prompt["input_ids"][row], options.max_new_tokens
            answers.append(DraftedAnswer(grammar.start(), ids_L, vocab.eos_id, most, processors, guard))
        decoding = DraftedDecoding(answers, rows, len(vocab), self._pad_id, self._broken, on_ended)
        return {"custom_generate": decoding}

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
        return {"rollout/repeat_terminate_active": float(self._new_guard is not None)}

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


class AnswerStates(Generic[State]):
    """A state for each answer of a batch, carried on from token to token. Rows of the batch are sequences or beams,
    which change rows and split from step to step: where rows changed, an answer is identified by its tokens.
    ``prompt_length`` counts the padded prompt, which is not read."""

    def __init__(
        self, start: State, after: Callable[[State, int], State | None], eos_id: int, prompt_length: int
    ) -> None:
        """``after``: a state and the next token → a new state."""
        self._start, self._after = start, after
        self._eos_id = eos_id
        self._prompt_length = prompt_length
        self._answers = torch.empty(0)
        self._states: list[State | None] = []

    def __call__(self, input_ids: torch.Tensor) -> list[State | None]:
        """The state of each row; None if its turn is over and padding follows."""
        answers = input_ids[:, self._prompt_length :].clone()  # the caller may write into its own
        states: list[State | None] = [self._start] * len(answers)
        if answers.shape[1]:
            before = answers[:, :-1]
            states = self._states if torch.equal(before, self._answers) else self._moved(before)
            tokens = answers[:, -1].tolist()
            states = [self._next(state, token) for state, token in zip(states, tokens, strict=True)]
        self._answers, self._states = answers, states
        return states

    def _moved(self, answers: torch.Tensor) -> list[State | None]:
        # The states of answers that the last call had in other rows.
        known = dict(zip(map(tuple, self._answers.tolist()), self._states, strict=True))
        return [known[answer] for answer in map(tuple, answers.tolist())]

    def _next(self, state: State | None, token: int) -> State | None:
        return None if state is None or token == self._eos_id else self._after(state, token)


class RepetitionStopProcessor(LogitsProcessor):
    """Forces the end of the turn on the step after the repeat guard triggers."""

    def __init__(self, new_guard: Callable[[], RepeatGuard], eos_id: int, prompt_length: int) -> None:
        def after(guard: RepeatGuard, token: int) -> RepeatGuard:
            longer = guard.fork()
            longer.push(token)
            return longer

        self._eos_id = eos_id
        self._guards = AnswerStates(new_guard(), after, eos_id, prompt_length)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        guards = self._guards(input_ids)
        repeating = [row for row, guard in enumerate(guards) if guard is not None and guard.trigger is not None]
        if not repeating:
            return scores
        scores = scores.clone()
        scores[repeating] = -torch.inf
        scores[repeating, self._eos_id] = 0.0
        return scores


class BatchClassNamesProcessor(LogitsProcessor):
    """Masks tokens that would begin a description outside of the list. Must precede the repeat guard's processor: the
    guard's end of the turn has priority."""

    def __init__(self, rule: ClassNames, eos_id: int, prompt_length: int) -> None:
        self._rule = rule
        self._states = AnswerStates(START, rule.after, eos_id, prompt_length)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows_of: defaultdict[ScanState, list[int]] = defaultdict(list)
        for row, state in enumerate(self._states(input_ids)):
            if state is not None:
                rows_of[state].append(row)
        masked = scores.clone()
        for state, rows in rows_of.items():
            masked[rows] = mask(masked[rows], self._rule.next_tokens(state))
        return masked


def mask(scores_RV: torch.Tensor, following: NextTokens) -> torch.Tensor:
    """The scores with forbidden tokens at minus infinity."""
    ids = torch.from_numpy(following.ids).to(scores_RV.device)
    if not following.are_allowed:
        return scores_RV.index_fill(1, ids, -torch.inf)
    only = torch.full_like(scores_RV, -torch.inf)
    only[:, ids] = scores_RV[:, ids]
    return only
