"""Answers for a set of samples, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from coordexp import distributed
from coordexp.coords import CoordVocab
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.evaluation.answers import ImageAnswer, from_line, to_line
from coordexp.evaluation.detection import Prediction
from coordexp.evaluation.summary import EvaluationOptions, summarise
from coordexp.parsing import parse_rollout
from coordexp.records import ParsedRollout, Rollout, RolloutRequest
from coordexp.rollouts import DatasetSeeds, RolloutBackend, Seeds

ON_COUNTS_ALONE = EvaluationOptions(coco=False)


class Scorer(Protocol):
    """How sure the model was of each object of an answer."""

    def score(self, request: RolloutRequest, rollout: Rollout, parsed: ParsedRollout) -> tuple[float, ...]:
        """One score in 0..1 for each of ``parsed.objects``, in their order."""
        ...


def predict(
    samples: Sequence[Sample],
    backend: RolloutBackend,
    vocab: CoordVocab,
    seeds: Seeds,
    scorer: Scorer | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> list[Prediction]:
    """Generate, parse and, with a ``scorer``, score; results stand in the order of ``samples``. ``on_answer``: told how
    many answers are there; never of the last one, which comes with what this returns.

    Raises:
        AlignmentError: the backend answered another prompt than ours, e.g. to an image of another size.
        RolloutError: as the backend's.
    """
    from coordexp.modeling.inputs import check_prompt  # torch comes with it, and saved answers are read without

    requests = [sample.request for sample in samples]
    if on_answer is None:
        rollouts = backend.generate(requests, seeds)
    else:
        rollouts = backend.generate(requests, seeds, on_answer=lambda n: on_answer(min(n, len(samples) - 1)))
    predictions = []
    for sample, rollout in zip(samples, rollouts, strict=True):
        check_prompt(sample.record.sample_id, sample.request.prompt_token_ids, rollout.prompt_token_ids, vocab.decode)
        parsed = parse_rollout(rollout.response_token_ids, vocab, ended=not rollout.truncated)
        scores = None if scorer is None else scorer.score(sample.request, rollout, parsed)
        predictions.append(Prediction(sample.record, rollout, parsed, scores))
    return predictions


def share_out(positions: Sequence[int], world_size: int, batch_size: int) -> list[list[range]]:
    """For each rank its batches of samples, by their ascending ``positions`` in a data set.

    A batch is a run of neighbours, at most ``batch_size`` of them, so that each keeps the seed of its place; batches
    are dealt in turn. All ranks get equally many, the last perhaps empty: they may share an engine, and ask together.
    """
    size = max(1, min(batch_size, -(-len(positions) // world_size)))  # small sets are for all ranks too
    batches: list[range] = []
    for position in positions:
        last = batches[-1] if batches else range(0)
        if len(last) and position == last.stop and len(last) < size:
            batches[-1] = range(last.start, position + 1)
        else:
            batches.append(range(position, position + 1))
    batches += [range(0)] * (-len(batches) % world_size)
    return [batches[rank::world_size] for rank in range(world_size)]


def evaluate_dataset(
    dataset: RecordDataset,
    backend: RolloutBackend,
    vocab: CoordVocab,
    *,
    batch_size: int,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
    on_answer: Callable[[int, int], None] | None = None,
    options: EvaluationOptions = ON_COUNTS_ALONE,
    scorer: Scorer | None = None,
) -> tuple[dict[str, float], list[Prediction]]:
    """Global metrics on every rank, and this rank's predictions. A collective call.

    Each rank decodes ``batch_size`` samples at a time, so that images are held for one batch only. What is sampled
    depends on ``seed`` and on a sample's place in ``dataset``: not on ranks, batches or the training step. How many of
    how many samples are answered is told to ``on_progress`` before the first batch and behind each, where it may raise,
    and to ``on_answer`` within batches, where it must not.
    """
    batches = share_out(range(len(dataset)), distributed.world_size(), batch_size)[distributed.rank()]
    total = sum(len(batch) for batch in batches)
    predictions: list[Prediction] = []
    if on_progress is not None and total:
        on_progress(0, total)  # a bar knows its length before the first batch, and its ETA after it
    with distributed.raise_on_all_ranks("evaluation"):
        for batch in batches:
            samples = [dataset[index] for index in batch]
            tell = None if on_answer is None else counted_from(len(predictions), total, on_answer)
            predictions += predict(samples, backend, vocab, DatasetSeeds(seed, batch.start), scorer, tell)
            if on_progress is not None:
                on_progress(len(predictions), total)
    answers = gather_answers([item.answer() for item in predictions], batch_size)
    return summarise(answers, options).figures, predictions


def counted_from(done: int, total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    """What tells ``on_progress`` a batch's own count as one of the whole: ``done`` samples came before it."""
    return lambda answers: on_progress(done + answers, total)


def gather_answers(mine: Sequence[ImageAnswer], batch_size: int) -> list[ImageAnswer]:
    """The answers of all ranks, on every rank, in the order of the data set that :func:`evaluate_dataset` shared out
    in batches of ``batch_size``."""
    parts = distributed.gather_json([to_line(answer) for answer in mine])
    shares = share_out(range(sum(map(len, parts))), len(parts), batch_size)
    placed: dict[int, str] = {}
    for share, part in zip(shares, parts, strict=True):
        placed.update(zip(chain.from_iterable(share), part, strict=True))
    return [from_line(placed[position]) for position in sorted(placed)]
