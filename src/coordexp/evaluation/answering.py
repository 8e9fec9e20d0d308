"""Answers for a set of samples, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from coordexp import distributed
from coordexp.coords import CoordVocab
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.evaluation.answers import ImageAnswer, from_line, make_answer, to_line
from coordexp.parsing import parse_rollout
from coordexp.rollouts import DatasetSeeds, RolloutBackend, Seeds

if TYPE_CHECKING:
    from coordexp.modeling.scores import TokenScorer


def answer_samples(
    samples: Sequence[Sample],
    backend: RolloutBackend,
    vocab: CoordVocab,
    seeds: Seeds,
    scorer: TokenScorer | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> list[ImageAnswer]:
    """Generate, parse and, with a ``scorer``, score, in the order of ``samples``.

    ``on_answer`` is called with the number of answers so far, except for the last one, which is finished when this
    returns.

    Raises:
        AlignmentError: the backend answered another prompt than ours, e.g. to an image of another size.
        RolloutError: as the backend's.
    """
    from coordexp.modeling.inputs import check_prompt  # imports torch, which saved answers do without

    before_last = None if on_answer is None else lambda n: on_answer(min(n, len(samples) - 1))
    rollouts = backend.generate([sample.request for sample in samples], seeds, on_answer=before_last)
    answers = []
    for sample, rollout in zip(samples, rollouts, strict=True):
        check_prompt(sample.record.sample_id, sample.request.prompt_token_ids, rollout.prompt_token_ids, vocab.decode)
        parsed = parse_rollout(rollout.response_token_ids, vocab, ended=not rollout.truncated)
        scores = None if scorer is None else scorer.score(sample.request, rollout, parsed)
        answers.append(make_answer(sample.record, rollout, parsed, scores))
    return answers


def share_out(positions: Sequence[int], world_size: int, batch_size: int) -> list[list[range]]:
    """The batches of each rank, from samples' ascending ``positions`` in a dataset.

    A batch is a run of at most ``batch_size`` neighbours, so that each sample keeps the seed of its position; batches
    are dealt in turn. All ranks get the same number, the last one perhaps empty: ranks may share an engine and have to
    call it together.
    """
    size = max(1, min(batch_size, -(-len(positions) // world_size)))  # a small set is spread over all ranks too
    batches: list[range] = []
    for position in positions:
        last = batches[-1] if batches else range(0)
        if len(last) and position == last.stop and len(last) < size:
            batches[-1] = range(last.start, position + 1)
        else:
            batches.append(range(position, position + 1))
    batches += [range(0)] * (-len(batches) % world_size)
    return [batches[rank::world_size] for rank in range(world_size)]


def answer_batches(
    dataset: RecordDataset,
    positions: Sequence[int],
    backend: RolloutBackend,
    vocab: CoordVocab,
    *,
    seed: int,
    scorer: TokenScorer | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    on_answer: Callable[[int, int], None] | None = None,
) -> Iterator[list[ImageAnswer]]:
    """This rank's answers for ``positions`` of ``dataset``, batch by batch: only one batch's images are in memory.

    Sampling depends on ``seed`` and a sample's position, not on ranks, batches or the training step. Both callbacks get
    (samples answered, samples of this rank): ``on_progress`` before the first batch and after each was consumed, where
    it may raise; ``on_answer`` within batches, where it must not.
    """
    batches = share_out(positions, distributed.world_size(), backend.batch_size)[distributed.rank()]
    done, total = 0, sum(len(batch) for batch in batches)
    if on_progress is not None and total:
        on_progress(0, total)  # a bar knows its length before the first batch, and its ETA after it
    for batch in batches:
        samples = [dataset[index] for index in batch]
        within = None if on_answer is None else lambda n, done=done: on_answer(done + n, total)
        yield answer_samples(samples, backend, vocab, DatasetSeeds(seed, batch.start), scorer, within)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, total)


def answer_dataset(
    dataset: RecordDataset, backend: RolloutBackend, vocab: CoordVocab, **options: Any
) -> list[ImageAnswer]:
    """The answers of all ranks, on every rank, in the order of ``dataset``. A collective call; ``options`` as for
    :func:`answer_batches`."""
    positions = range(len(dataset))
    with distributed.raise_on_all_ranks("evaluation"):
        batches = list(answer_batches(dataset, positions, backend, vocab, **options))
    parts = distributed.gather_json([to_line(answer) for answer in chain.from_iterable(batches)])
    placed: dict[int, str] = {}
    for share, part in zip(share_out(positions, len(parts), backend.batch_size), parts, strict=True):
        placed.update(zip(chain.from_iterable(share), part, strict=True))
    return [from_line(placed[position]) for position in positions]
