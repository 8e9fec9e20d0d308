"""Answers for a set of samples, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from coordexp import distributed
from coordexp.coords import CoordVocab
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.evaluation.detection import Prediction, detection_counts, detection_metrics
from coordexp.parsing import parse_rollout
from coordexp.rollouts import RolloutBackend, SeedContext


def predict(
    samples: Sequence[Sample], backend: RolloutBackend, vocab: CoordVocab, seeds: SeedContext
) -> list[Prediction]:
    """Generate and parse; results stand in the order of ``samples``."""
    rollouts = backend.generate([sample.request for sample in samples], seeds)
    return [
        Prediction(
            sample.record, rollout, parse_rollout(rollout.response_token_ids, vocab, ended=not rollout.truncated)
        )
        for sample, rollout in zip(samples, rollouts, strict=True)
    ]


def evaluate_dataset(
    dataset: RecordDataset,
    backend: RolloutBackend,
    vocab: CoordVocab,
    *,
    batch_size: int,
    seed: int,
    global_step: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, float], list[Prediction]]:
    """Global metrics on every rank, and this rank's predictions. A collective call.

    Samples are dealt to ranks in turn; each rank decodes ``batch_size`` at a time, so that images are held for one
    batch only.
    """
    mine = range(distributed.rank(), len(dataset), distributed.world_size())
    predictions: list[Prediction] = []
    for round_idx, indices in enumerate(_batches(mine, batch_size)):
        seeds = SeedContext(seed, global_step, round_idx, distributed.rank())
        predictions += predict([dataset[index] for index in indices], backend, vocab, seeds)
        if on_progress is not None:
            on_progress(len(predictions), len(mine))
    total: Counter[str] = Counter()
    for part in distributed.gather_json(dict(detection_counts(predictions))):
        total.update(part)
    return detection_metrics(total), predictions


def _batches(indices: range, size: int) -> Iterator[range]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
