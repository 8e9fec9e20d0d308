"""Answers for a set of samples, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from typing import Protocol

from coordexp import distributed
from coordexp.coords import CoordVocab
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.evaluation.answers import ImageAnswer, from_line, to_line
from coordexp.evaluation.detection import Prediction
from coordexp.evaluation.summary import EvaluationOptions, summarise
from coordexp.parsing import parse_rollout
from coordexp.records import ParsedRollout, Rollout, RolloutRequest
from coordexp.rollouts import RolloutBackend, SeedContext

ON_COUNTS_ALONE = EvaluationOptions(coco=False)


class Scorer(Protocol):
    """How sure the model was of each object of an answer."""

    def score(self, request: RolloutRequest, rollout: Rollout, parsed: ParsedRollout) -> tuple[float, ...]: ...


def predict(
    samples: Sequence[Sample],
    backend: RolloutBackend,
    vocab: CoordVocab,
    seeds: SeedContext,
    scorer: Scorer | None = None,
) -> list[Prediction]:
    """Generate, parse and, with a ``scorer``, score; results stand in the order of ``samples``."""
    rollouts = backend.generate([sample.request for sample in samples], seeds)
    predictions = []
    for sample, rollout in zip(samples, rollouts, strict=True):
        parsed = parse_rollout(rollout.response_token_ids, vocab, ended=not rollout.truncated)
        scores = None if scorer is None else scorer.score(sample.request, rollout, parsed)
        predictions.append(Prediction(sample.record, rollout, parsed, scores))
    return predictions


def evaluate_dataset(
    dataset: RecordDataset,
    backend: RolloutBackend,
    vocab: CoordVocab,
    *,
    batch_size: int,
    seed: int,
    global_step: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
    options: EvaluationOptions = ON_COUNTS_ALONE,
    scorer: Scorer | None = None,
) -> tuple[dict[str, float], list[Prediction]]:
    """Global metrics on every rank, and this rank's predictions. A collective call.

    Samples are dealt to ranks in turn; each rank decodes ``batch_size`` at a time, so that images are held for one
    batch only. All ranks ask equally often, the last time perhaps for nothing: they may share an engine.
    """
    mine = range(distributed.rank(), len(dataset), distributed.world_size())
    most = range(0, len(dataset), distributed.world_size())
    predictions: list[Prediction] = []
    with distributed.together("evaluation"):
        for round_idx, start in enumerate(range(0, len(most), batch_size)):
            seeds = SeedContext(seed, global_step, round_idx, distributed.rank())
            samples = [dataset[index] for index in mine[start : start + batch_size]]
            predictions += predict(samples, backend, vocab, seeds, scorer)
            if on_progress is not None:
                on_progress(len(predictions), len(mine))
    return summarise(gather_answers([item.answer() for item in predictions]), options).figures, predictions


def gather_answers(mine: Sequence[ImageAnswer]) -> list[ImageAnswer]:
    """The answers of all ranks, on every rank, in the order of the dataset that was dealt in turn."""
    parts = distributed.gather_json([to_line(answer) for answer in mine])
    in_turn = chain.from_iterable(zip_longest(*parts))
    return [from_line(line) for line in in_turn if line is not None]
