"""How often an epoch has each record: weights of files, and repeats of the images with rare classes.

The *factor* of a record is the number of its samples per epoch on average: the weight of its file times its repeat
factor. An epoch has every record ``floor(factor)`` times; the fractions decide which records it has once more.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from coordexp.data.joined import JoinedRecords, descs_by_record, parts_of
from coordexp.records import ImageRecord

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, fill the unit interval evenly
_DIGITS = 6  # to which the sum of fractions is exact
_RAREST = 5  # classes named in the log


class _Fractions:
    # A file's records with a fraction. Their fractions are laid end to end on a line with ticks at a distance of 1; a
    # record is drawn if a tick is in its interval. Each epoch moves the ticks. `size`: records drawn per epoch.

    def __init__(self, records_F: np.ndarray, fractions_F: np.ndarray) -> None:
        self.records_F = records_F
        self._ends_F = np.cumsum(fractions_F)
        total = max(round(float(self._ends_F[-1]), _DIGITS), 10**-_DIGITS)
        self._ends_F *= total / self._ends_F[-1]
        self.size = math.ceil(total)
        # If all fractions are equal, an epoch moves the ticks by one interval, from the middle of one record's to the
        # middle of the next. So every record is drawn once before any is drawn twice.
        same = float(fractions_F[0]) if (fractions_F == fractions_F[0]).all() else None
        self._first, self._step = (0.0, _GOLDEN) if same is None else (same / 2, same)

    def drawn(self, epoch: int) -> np.ndarray:
        ticks_F = np.floor(self._ends_F + (self._first + epoch * self._step) % 1.0).astype(np.int64)
        drawn_F = np.diff(ticks_F, prepend=0)
        if drawn_F.sum() < self.size:  # a sum that is not whole gives one record more or less
            left = np.flatnonzero(drawn_F == 0)
            drawn_F[left[epoch % len(left)]] = 1
        return drawn_F


class EpochPlan:
    """The records of each epoch, as a function of the factors, the seed and the epoch alone.

    ``size``: the number of samples, the same in every epoch; ``sizes``: those of each file.
    """

    def __init__(self, factors_N: np.ndarray, lengths: Sequence[int], seed: int) -> None:
        """``factors_N``: the factor of each record, above 0. ``lengths``: the number of records of each file. A file's
        records of an epoch add up to the sum of its factors, rounded up."""
        assert len(factors_N) == sum(lengths) and factors_N.min() > 0, "one factor above 0 for each record"
        self.factors_N = factors_N
        self._whole_N = np.floor(factors_N).astype(np.int64)
        self._files = []
        self.sizes: list[int] = []
        start = 0
        for length in lengths:
            order = list(range(start, start + length))  # shuffled, because neighbours in a file are often similar
            random.Random(f"epochs:{seed}:{start}").shuffle(order)
            fractions_L = (factors_N - self._whole_N)[order]
            self.sizes.append(int(self._whole_N[order].sum()))
            if (fractions_L > 0).any():
                self._files.append(_Fractions(np.array(order)[fractions_L > 0], fractions_L[fractions_L > 0]))
                self.sizes[-1] += self._files[-1].size
            start += length
        self.size = sum(self.sizes)

    def counts(self, epoch: int) -> np.ndarray:
        """How often the epoch has each record: its factor rounded down or up."""
        counts_N = self._whole_N.copy()
        for file in self._files:
            counts_N[file.records_F] += file.drawn(epoch)
        return counts_N

    def places(self, epoch: int) -> list[int]:
        """The samples of an epoch, not yet shuffled: record k, and ``k + n · len(factors)`` for its n-th repeat."""
        counts_N = self.counts(epoch)
        rounds = [np.flatnonzero(counts_N > n) + n * len(counts_N) for n in range(int(counts_N.max()))]
        return np.concatenate(rounds).tolist()


def plan_epochs(records: Sequence[ImageRecord], repeat_threshold: float | None, seed: int) -> EpochPlan | None:
    """The plan of a training dataset; None if an epoch has each record once."""
    weights_N = _weights(records)
    if repeat_threshold is not None:
        weights_N = weights_N * _repeat_factors(records, class_factors(records, repeat_threshold))
    if (weights_N == 1).all():
        return None
    return EpochPlan(weights_N, [len(part) for part in parts_of(records)], seed)


def class_factors(records: Sequence[ImageRecord], threshold: float) -> dict[str, float]:
    """The repeat factor of each class as in LVIS: ``max(1, sqrt(threshold / f))``, ``f`` being the share of images with
    the class. Images count by the weight of their file."""
    weights_N = _weights(records)
    sums: defaultdict[str, float] = defaultdict(float)
    for weight, descs in zip(weights_N.tolist(), descs_by_record(records), strict=True):
        for desc in descs:
            sums[desc] += weight
    total = float(weights_N.sum())
    return {desc: max(1.0, math.sqrt(threshold * total / weight)) for desc, weight in sums.items()}


def describe_epoch(records: Sequence[ImageRecord], plan: EpochPlan, repeat_threshold: float | None) -> Iterator[str]:
    """Lines for the log that describe an epoch."""
    yield f"an epoch has {plan.size:,} samples of {len(records):,} records"
    if isinstance(records, JoinedRecords):
        for name, part, samples in zip(records.names, records.parts, plan.sizes, strict=True):
            yield f"  {name}: {len(part.records):,} records, weight {part.weight:g}: {samples:,} samples"
    if repeat_threshold is not None:
        factors = class_factors(records, repeat_threshold)
        rare = sorted((desc for desc in factors if factors[desc] > 1), key=lambda desc: (-factors[desc], desc))
        repeated_N = plan.factors_N / _weights(records)
        named = ", ".join(f"{desc} x {factors[desc]:.2f}" for desc in rare[:_RAREST])
        further = f" and {len(rare) - _RAREST} more" if len(rare) > _RAREST else ""
        yield (
            f"  repeat_threshold {repeat_threshold:g}: {int((repeated_N > 1).sum()):,} records with {len(rare)} rare "
            f"classes are repeated{f' ({named}{further})' if rare else ''}"
        )


def _weights(records: Sequence[ImageRecord]) -> np.ndarray:
    if not isinstance(records, JoinedRecords):
        return np.ones(len(records))
    return np.concatenate([np.full(len(part.records), part.weight) for part in records.parts])


def _repeat_factors(records: Sequence[ImageRecord], factors: dict[str, float]) -> np.ndarray:
    found = (max((factors[desc] for desc in descs), default=1.0) for descs in descs_by_record(records))
    return np.fromiter(found, float, len(records))
