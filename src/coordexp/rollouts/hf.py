"""Rollouts by transformers' ``generate`` on the learner's own model: no second engine, no weight copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from coordexp.config.rollout import RepeatTerminateConfig
from coordexp.coords import CoordVocab
from coordexp.records import Rollout, RolloutRequest
from coordexp.rollouts.allowed_labels import AllowedLabels
from coordexp.rollouts.backend import DecodingOptions, IndexedRollout, RolloutRound, Seeds, response_tokens
from coordexp.rollouts.hf_processors import (
    AllowedLabelsProcessor,
    FinishedCallback,
    RepetitionStopProcessor,
    sampling_processors,
)
from coordexp.rollouts.repeat_guard import ObjectKeyReader, RepeatGuard


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Request ``index`` of round ``round_idx``, and the seed that it samples by."""

    round_idx: int
    index: int
    request: RolloutRequest
    seed: int


class HFBackend:
    """Batched decoding with left padding, at most ``decode_batch_size`` sequences at once.

    Request i of a call samples with the call's seed + i, as on servers: its answer depends on its seed, not on its
    batch. The model's train/eval mode, random state and caches are restored afterwards.
    """

    def __init__(
        self,
        model: Any,
        vocab: CoordVocab,
        options: DecodingOptions,
        decode_batch_size: int,
        image_token_id: int,
        repeat_terminate: RepeatTerminateConfig | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """``repeat_terminate``: the repeat guard, if enabled. ``names``: allowed descriptions; empty for any."""
        self._model = model
        self._vocab = vocab
        self._options = options
        self._decode_batch_size = decode_batch_size
        self._image_token_id = image_token_id
        self._pad_id = vocab.eos_id
        self._version = 0
        self._seeds: list[int] = []
        self._guard = repeat_terminate if repeat_terminate is not None and repeat_terminate.enabled else None
        self._names = AllowedLabels(names, vocab.pieces, vocab.eos_id) if names else None
        counts_keys = self._guard is not None and self._guard.max_object_keys is not None
        self._key_reader = ObjectKeyReader(vocab.pieces) if counts_keys else None

    def generate(
        self, requests: Sequence[RolloutRequest], seeds: Seeds, on_answer: Callable[[int], None] | None = None
    ) -> list[Rollout]:
        """One round, as :meth:`generate_window` answers it, in the order of the requests."""
        rollouts: list[Rollout] = []
        for batch in self._batches([RolloutRound(tuple(requests), seeds)]):
            before = len(rollouts)
            on_ended = None if on_answer is None else lambda ended, before=before: on_answer(before + ended)
            rollouts += self._generate_batch(batch, on_ended)
            if on_ended is not None:
                on_ended(len(batch))
        return rollouts

    def generate_window(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        """Batches of ``decode_batch_size`` are filled across micro-steps: a small batch takes as many decoding steps as
        a full one."""
        for batch in self._batches(rounds):
            for one, rollout in zip(batch, self._generate_batch(batch, None), strict=True):
                yield IndexedRollout(one.round_idx, one.index, rollout)

    def _batches(self, rounds: Sequence[RolloutRound]) -> list[list[_Wanted]]:
        # A request's seed comes from its place in its micro-step, cut into chunks of ``decode_batch_size``: the seed of
        # its chunk's first request plus its place in the chunk. So it does not depend on the batch it is decoded in.
        size = self._decode_batch_size
        wanted: list[_Wanted] = []
        for round_idx, one in enumerate(rounds):
            firsts = {start: one.seeds.seed_of(start) for start in range(0, len(one.requests), size)}
            self._seeds += firsts.values()
            wanted += [
                _Wanted(round_idx, index, request, firsts[index // size * size] + index % size)
                for index, request in enumerate(one.requests)
            ]
        return [wanted[start : start + size] for start in range(0, len(wanted), size)]

    def _generate_batch(self, batch: Sequence[_Wanted], on_ended: Callable[[int], None] | None) -> list[Rollout]:
        with _evaluating(self._model), torch.no_grad():  # not around the loop: callers run between two batches
            return self._generate_chunk([one.request for one in batch], [one.seed for one in batch], on_ended)

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

    def _generate_chunk(
        self, requests: Sequence[RolloutRequest], seeds: Sequence[int], on_ended: Callable[[int], None] | None
    ) -> list[Rollout]:
        device = next(self._model.parameters()).device
        longest = max(len(request.prompt_token_ids) for request in requests)
        ids_BL = torch.full((len(requests), longest), self._pad_id, dtype=torch.int64)
        mask_BL = torch.zeros_like(ids_BL)
        for row, request in enumerate(requests):
            ids_BL[row, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask_BL[row, longest - len(request.prompt_token_ids) :] = 1
        pixels = torch.cat([request.model_inputs["pixel_values"] for request in requests])
        grids = torch.cat([request.model_inputs["image_grid_thw"] for request in requests])
        guard = self._repeat_stop(longest)
        processors = [
            *([] if self._names is None else [AllowedLabelsProcessor(self._names, self._vocab.eos_id, longest)]),
            *([] if guard is None else [guard]),
            *sampling_processors(self._options, list(seeds), device),
            *(
                []
                if on_ended is None or self._options.num_beams > 1
                else [FinishedCallback(self._vocab.eos_id, longest, on_ended)]
            ),
        ]
        with _own_generation_config(self._model):
            output_BT = self._model.generate(
                input_ids=ids_BL.to(device),
                attention_mask=mask_BL.to(device),
                mm_token_type_ids=(ids_BL == self._image_token_id).int().to(device),
                pixel_values=pixels.to(device, self._model.dtype),
                image_grid_thw=grids.to(device),
                **self._generation_arguments(),
                **({"logits_processor": processors} if processors else {}),
            )
        answers = output_BT[:, longest:].tolist()
        return [
            self._rollout(request, row, answer, guard)
            for row, (request, answer) in enumerate(zip(requests, answers, strict=True))
        ]

    def _repeat_stop(self, prompt_length: int) -> RepetitionStopProcessor | None:
        settings = self._guard
        if settings is None:
            return None
        return RepetitionStopProcessor(
            lambda: RepeatGuard(settings, self._key_reader), self._vocab.eos_id, prompt_length, self._options.num_beams
        )

    def _generation_arguments(self) -> dict[str, Any]:
        options = self._options
        arguments: dict[str, Any] = {
            "max_new_tokens": options.max_new_tokens,
            "do_sample": False,  # a processor samples; see hf_processors
            "num_beams": options.num_beams,
            "num_return_sequences": 1,
            "repetition_penalty": options.repetition_penalty,
            "eos_token_id": self._vocab.eos_id,
            "pad_token_id": self._pad_id,
            "use_cache": True,
        }
        # Checkpoints may have more embedding rows than the tokenizer has tokens; their ids decode to nothing.
        if unknown := range(len(self._vocab), self._model.config.text_config.vocab_size):
            arguments["suppress_tokens"] = list(unknown)
        return arguments

    def _rollout(
        self, request: RolloutRequest, row: int, answer: list[int], guard: RepetitionStopProcessor | None
    ) -> Rollout:
        reason = "stop" if self._vocab.eos_id in answer else "length"  # padding follows an end, so it is cut off too
        tokens = response_tokens(answer, reason, self._vocab, request.sample_id)
        return Rollout(
            sample_id=request.sample_id,
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=tokens.token_ids,
            text=self._vocab.decode(tokens.token_ids),
            truncated=tokens.truncated,
            repeat_terminated=tokens.ended and guard is not None and guard.stopped(row, tokens.token_ids),
            weight_version=self._version,
        )


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was_training.items():
            module.training = training


@contextmanager
def _own_generation_config(model: Any) -> Iterator[None]:
    # transformers takes missing arguments from the checkpoint's generation_config: an n-gram ban or a minimum length
    # would leak into the run.
    from transformers import GenerationConfig

    of_checkpoint = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = of_checkpoint
