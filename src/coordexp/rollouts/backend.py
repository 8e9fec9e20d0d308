"""The interface of rollout backends, the parts of the training process that they use, seeds that depend only on the
position in the run, and the cut of an engine's tokens at the end of the answer. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from coordexp.config.rollout import RolloutMatchingConfig
from coordexp.coords import CoordVocab
from coordexp.data.preparation import NO_RESIZE, ImagePreparation
from coordexp.errors import RolloutError
from coordexp.records import Rollout, RolloutRequest

if TYPE_CHECKING:
    from torch import Tensor

MAX_SEED = 2**31 - 1


def request_seed(training_seed: int, global_step: int, micro_step_idx: int, rank: int, req_idx: int) -> int:
    """Seed of one generation call, in 1 … 2^31 - 1 (servers read 0 as "no seed").

    ``micro_step_idx`` counts from 0 within the step; ``req_idx``: the call's first request among the rank's.
    """
    return 1 + _stable_hash(f"{training_seed}:{global_step}:{micro_step_idx}:{rank}:{req_idx}") % MAX_SEED


def _stable_hash(text: str) -> int:
    # Python's own hash() of strings changes from process to process.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Seeds(Protocol):
    """Seeds of a round of requests. ``micro_step_idx`` names the round in reports."""

    @property
    def micro_step_idx(self) -> int: ...

    def seed_of(self, req_idx: int) -> int:
        """Seed of the call that begins with request ``req_idx`` of its round; request i of the call has it plus i."""
        ...


@dataclass(frozen=True, slots=True)
class SeedContext:
    """Position of a round of rollouts in the run; with a request's index it determines the call's seed."""

    training_seed: int
    global_step: int
    micro_step_idx: int
    rank: int

    def seed_of(self, req_idx: int) -> int:
        return request_seed(self.training_seed, self.global_step, self.micro_step_idx, self.rank, req_idx)


@dataclass(frozen=True, slots=True)
class DatasetSeeds:
    """Seeds of answers outside of training steps. Request i is sample ``first`` + i (< 2^30) of its dataset. Its seed
    (1 … 2^31 - 1) depends only on the run's seed, that index and ``answer`` (which of several answers of the sample);
    not on batches, ranks or resuming."""

    training_seed: int
    first: int
    micro_step_idx: int = 0
    answer: int = 0

    def seed_of(self, req_idx: int) -> int:
        # Servers give request i of a call the call's seed plus i, so consecutive samples need consecutive seeds.
        further = f":{self.answer}" if self.answer else ""
        return 1 + _stable_hash(f"data set:{self.training_seed}{further}") % 2**30 + self.first + req_idx


FIRST_OF_SEED_0 = DatasetSeeds(training_seed=0, first=0)


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """How answers are decoded. ``temperature`` 0 is greedy; ``top_k`` −1 keeps every token; ``num_beams`` > 1 is beam
    search, of which the best beam alone is returned."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    num_beams: int
    repetition_penalty: float


def decoding_options(config: RolloutMatchingConfig) -> DecodingOptions:
    """The decoding part of the section, as values."""
    return DecodingOptions(
        max_new_tokens=config.max_new_tokens,
        num_beams=config.num_beams,
        repetition_penalty=config.repetition_penalty,
        **config.decoding.model_dump(exclude={"skip_forced_tokens"}),  # backends get it separately
    )


@dataclass(frozen=True, slots=True)
class RolloutRound:
    """The requests of one micro-step, in the data loader's order, with their seeds. ``greedy``: decode these greedily
    even if the backend samples."""

    requests: tuple[RolloutRequest, ...]
    seeds: Seeds
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class IndexedRollout:
    """The rollout of request ``index`` of round ``round_idx``."""

    round_idx: int
    index: int
    rollout: Rollout


class RolloutBackend(Protocol):
    """Answers prompts without gradient. Answers depend only on requests, seeds and weights, not on timing.

    Under torchrun every rank has its own backend for its own requests. ``sync_weights`` and ``generate_rounds`` are
    collective: every rank calls them, even without requests. Both may raise RolloutError, as ``generate`` does: the
    engine failed, returned something that cannot be trained on, or (on every rank) did not get the weights.
    """

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        seeds: Seeds = FIRST_OF_SEED_0,
        on_answer: Callable[[int], None] | None = None,
    ) -> list[Rollout]:
        """One answer per request, in their order. ``seeds`` matter only if the backend samples. ``on_answer`` is called
        with the number of finished answers as it grows; it must not raise."""
        return collect_in_order(self.generate_rounds([RolloutRound(tuple(requests), seeds)]), on_answer)

    def generate_rounds(self, rounds: Sequence[RolloutRound]) -> Iterator[IndexedRollout]:
        """Each answer of an optimizer step exactly once, in any order, as soon as it is finished.
        ``decode_batch_size`` bounds the requests in flight."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of requests that keeps every rollout device of this rank at ``decode_batch_size`` sequences; the same
        on every rank."""
        ...

    def sync_weights(self, version: int) -> None:
        """Use the current training weights, as version ``version``, for the next answers."""
        ...

    def release(self) -> None:
        """Free resources until the next :meth:`sync_weights`; no answers until then."""
        ...

    def last_report(self) -> Mapping[str, Any]:
        """Seeds, caps, weights and decoding of the last round, as JSON values."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """Counters and seconds since the last call, by metric name."""
        ...

    def close(self) -> None:
        """Release the engine; safe to call twice."""
        ...


@contextmanager
def rollout_session(backend: RolloutBackend, version: int) -> Iterator[None]:
    """Inside the context ``backend`` answers with the current training weights, which must not change meanwhile.
    Entering and leaving are collective."""
    backend.sync_weights(version)
    try:
        yield
    finally:
        backend.release()


def collect_in_order(
    answers: Iterator[IndexedRollout], on_answer: Callable[[int], None] | None = None
) -> list[Rollout]:
    """Rollouts of one round in the order of its requests."""
    rollout_of: dict[int, Rollout] = {}
    for answer in answers:
        rollout_of[answer.index] = answer.rollout
        if on_answer is not None:
            on_answer(len(rollout_of))
    return [rollout_of[index] for index in sorted(rollout_of)]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A LoRA adapter as an engine loads it.

    ``tensors`` under PEFT's file names, ``config`` the fields of its ``adapter_config.json``; ``base``: the
    folder of the model that it is put on; ``changed``: plain weights outside the adapter that training changes too,
    under the checkpoint's names; ``outside_llm``: the adapter also reaches the vision tower or the aligner.
    """

    config: Mapping[str, Any]
    tensors: tuple[tuple[str, Tensor], ...]
    base: Path
    changed: tuple[tuple[str, Tensor], ...] = ()
    outside_llm: bool = False


class WeightSource(Protocol):
    """The training weights in the form that engines take."""

    @property
    def collective(self) -> bool:
        """Whether all ranks must iterate :meth:`full` to the end together, because each has only a part."""
        ...

    def full(self) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """Merged weights under the plain checkpoint's names; the training weights stay as they are."""
        ...

    def adapter(self) -> AdapterWeights | None:
        """The adapter alone; None if there is none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TrainerParts:
    """Parts of the training process that backends use.

    ``model``: the bare model, no DDP wrapper. ``checkpoint``: a plain folder with the configuration, tokenizer and
    processor for an engine. ``open_image``: opens and prepares an image (``preparation`` is a part of that), for
    engines that open images themselves. ``offload``: inside its context, the trainer's state is off the device, which
    a colocated engine then uses.
    """

    model: Any
    vocab: CoordVocab
    image_token_id: int
    weights: WeightSource
    checkpoint: Path
    open_image: Callable[[Path], Any]
    offload: Callable[[], AbstractContextManager[None]] = nullcontext
    preparation: ImagePreparation = NO_RESIZE


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """``token_ids``: before the end of the turn. ``ended``: the end token was among those returned. ``truncated``: the
    answer ran out of tokens."""

    token_ids: tuple[int, ...]
    ended: bool
    truncated: bool


def response_tokens(
    generated: Sequence[int], finish_reason: str | None, vocab: CoordVocab, where: str
) -> ResponseTokens:
    """Cut ``generated``, token ids as the engine returned them, at its first end of turn.

    Without an end token, the engine's finish reason decides: ``length`` means truncated, and ``stop`` means that the
    engine does not return the end token. Raises RolloutError, which names the request as ``where``, if an id is outside
    the tokenizer's vocabulary, or the engine ended the answer for another reason.
    """
    if unknown := [token for token in generated if not 0 <= token < len(vocab)]:
        raise RolloutError(
            f"{where}: token id {unknown[0]} is unknown: the tokenizer has 0 to {len(vocab) - 1}; the "
            "model's head has rows without a token, and this server samples them; use coordexp serve or the CoordExp "
            "plugin, which do not"
        )
    if finish_reason not in ("stop", "length"):
        raise RolloutError(f"{where}: the answer ended with {finish_reason!r} instead of 'stop' or 'length'")
    ids = tuple(generated)
    ended = vocab.eos_id in ids
    return ResponseTokens(
        ids[: ids.index(vocab.eos_id)] if ended else ids, ended, truncated=not ended and finish_reason == "length"
    )
