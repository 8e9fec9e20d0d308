"""The input of each optimizer step on this rank: samples, in an order that depends on seed, epoch and step alone, and,
in two-channel training, the channel."""

from __future__ import annotations

import fcntl
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.utils.data import DataLoader

from coordexp import distributed
from coordexp.config.objective import Channel
from coordexp.data.dataset import RecordDataset, Sample
from coordexp.data.epochs import EpochPlan
from coordexp.out_of_memory import phase

MicroBatches = list[list[Sample]]


@dataclass(eq=False)
class StepBatches:
    """Reads the micro-batches of each optimizer step in order. :meth:`peek` reads one step ahead.

    An epoch's order is a permutation seeded by ``seed + epoch``, of each record once or of the samples that ``plan``
    names. It is padded with its own beginning so that every rank has the same number of batches; rank r of W takes
    batches r, r + W, … Reading does not use the global random state, so a resumed run reads the same samples as an
    uninterrupted one.

    ``batch_size``: samples of a micro-batch. ``accumulation_steps``: micro-batches of an optimizer step; the last step
    of an epoch may have fewer.
    """

    dataset: RecordDataset
    _: KW_ONLY
    batch_size: int
    accumulation_steps: int
    seed: int
    num_workers: int
    plan: EpochPlan | None = None

    def __post_init__(self) -> None:
        self.samples_per_epoch = len(self.dataset) if self.plan is None else self.plan.size
        batches = math.ceil(self.samples_per_epoch / self.batch_size)
        self.batches_per_epoch = math.ceil(batches / distributed.world_size())
        self.steps_per_epoch = max(1, math.ceil(self.batches_per_epoch / self.accumulation_steps))
        self.start(0)

    def start(self, step: int) -> None:
        """Continue at step ``step``, counted from 0: the next :meth:`take` returns its batches."""
        self._next_step = step
        self._loader: Iterator[Any] | None = None
        self._ahead: MicroBatches | None = None
        self._failure: Exception | None = None

    def close(self) -> None:
        """End the loader processes. They remove their sockets; at the end of the program they would be killed."""
        self._loader = self._ahead = None

    def take(self) -> MicroBatches:
        """The micro-batches of the next step. A collective call. Raises the error of reading them, now or in
        :meth:`peek`, on all ranks."""
        if self._failure is not None:
            raise self._failure
        if self._ahead is None:
            return self._read()
        taken, self._ahead = self._ahead, None
        return taken

    def peek(self) -> MicroBatches | None:
        """Read the next step's micro-batches ahead; the next :meth:`take` returns them. None if reading fails:
        :meth:`take` then raises the error, in the step that needs the samples. A collective call."""
        if self._ahead is None and self._failure is None:
            try:
                self._ahead = self._read()
            except Exception as error:  # not swallowed: the next take() raises it
                self._failure = error
        return self._ahead

    def epoch_after(self, steps: int) -> float:
        """Convert ``steps`` finished steps to epochs."""
        epoch, steps_in_epoch = divmod(steps, self.steps_per_epoch)
        return epoch + min(1.0, steps_in_epoch * self.accumulation_steps / self.batches_per_epoch)

    def samples_before(self, step: int) -> int:
        """Samples of all ranks in the first ``step`` steps, with those that fill up an epoch for several ranks."""
        epochs, place = divmod(step, self.steps_per_epoch)
        ranks, full = distributed.world_size(), self.batch_size * distributed.world_size()
        per_epoch = self.samples_per_epoch if ranks == 1 else self.batches_per_epoch * full
        return epochs * per_epoch + min(place * self.accumulation_steps * full, per_epoch)

    def _read(self) -> MicroBatches:
        where = f"reading the samples of step {self._next_step + 1}"
        with phase("reading", where), distributed.raise_on_all_ranks(where):
            epoch, place = divmod(self._next_step, self.steps_per_epoch)
            first = place * self.accumulation_steps
            if self._loader is None or place == 0:
                self._loader = self._open_epoch(epoch, first)
            count = min(self.accumulation_steps, self.batches_per_epoch - first)
            batches = [[_owning_memory(sample) for sample in next(self._loader)] for _ in range(count)]
        self._next_step += 1
        return batches

    def _open_epoch(self, epoch: int, first_batch: int) -> Iterator[list[Sample]]:
        self.dataset.set_epoch(epoch)  # before a loader's workers start: views and orders depend on it
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.samples_per_epoch, generator=generator).tolist()
        if self.plan is not None:
            places = self.plan.places(epoch)
            order = [places[at] for at in order]
        ranks, size = distributed.world_size(), self.batch_size
        if ranks > 1:
            wanted = self.batches_per_epoch * ranks * size
            order = (order * math.ceil(wanted / len(order)))[:wanted]
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        loader = DataLoader(
            self.dataset,  # pyright: ignore[reportArgumentType]
            batch_sampler=batches[distributed.rank() :: ranks][first_batch:],
            num_workers=self.num_workers,
            collate_fn=list,
            generator=torch.Generator(),  # starting workers would otherwise draw from torch's global random state
            worker_init_fn=_begin_loader_process,
        )
        return iter(loader)


def _begin_loader_process(worker: int) -> None:
    # Ctrl-C and batch systems signal the whole group, and the current step still needs its data. Workers end with
    # their parent all the same.
    os.setpgrp()
    # Release the parent's sockets and the files that it writes, such as logs and the run's lock. Copies would keep a
    # connection or a listener open after the parent has closed it, or has died.
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        if descriptor <= 2 or descriptor == nothing:
            continue
        try:
            mode = os.fstat(descriptor).st_mode
            is_written = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        except OSError:  # the listing's own, closed by now
            continue
        if stat.S_ISSOCK(mode) or (stat.S_ISREG(mode) and is_written):
            os.dup2(nothing, descriptor)  # not closed: an object of the parent may still close this number
    os.close(nothing)


def _owning_memory(sample: Sample) -> Sample:
    """Copy tensors shared with a loader process: each keeps a file open, and hundreds of segments may wait."""
    inputs = {
        name: value.clone() if value.is_shared() else value for name, value in sample.request.model_inputs.items()
    }
    return replace(sample, request=replace(sample.request, model_inputs=inputs))


@dataclass(frozen=True, slots=True)
class ChannelSchedule:
    """Which steps of a two-channel run are Channel-A and which Channel-B; ``b_ratio`` is exact.

    * **Channel-A** reads the ground truth and needs no rollout. Its segments may wait in a carry buffer, also through
      Channel-B steps: they come from ground truth and do not depend on the weights.
    * **Channel-B** takes every sample of its step through rollout, match and target, and trains on all of them in that
      step, in as many packed rows as they need. Nothing is carried: the next Channel-B step has other weights.
    """

    b_ratio: Fraction

    @classmethod
    def from_ratio(cls, b_ratio: float) -> ChannelSchedule:
        """The ratio as it was typed in YAML: the shortest decimal that reads back as the same float. Raises ValueError
        outside of [0, 1].

        The float itself would lose steps: ``100 * 0.29`` is 28.999999999999996. A ratio without a finite decimal is the
        decimal that was typed: 0.333 is 333 steps of 1000.
        """
        ratio = Fraction(repr(float(b_ratio)))
        if not 0 <= ratio <= 1:
            raise ValueError(f"b_ratio {b_ratio} is not between 0 (Channel-A only) and 1")
        return cls(ratio)

    def channel(self, step: int) -> Channel:
        """The channel of optimizer step ``step``, counted from 0."""
        return "B" if self.b_steps_before(step + 1) > self.b_steps_before(step) else "A"

    def b_steps_before(self, step: int) -> int:
        """The number of Channel-B steps among 0 … step − 1: ⌊step · b⌋, computed in integers."""
        return step * self.b_ratio.numerator // self.b_ratio.denominator

    def realised(self, step: int) -> float:
        """The share of Channel-B among the steps 0 … step."""
        return self.b_steps_before(step + 1) / (step + 1)
