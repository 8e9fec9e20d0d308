"""What the data loader is told and asked: the epoch that begins, and raw windows, read one step before they are trained
on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from coordexp.data.dataset import RecordDataset, Sample


class EpochOfData(TrainerCallback):
    """accelerate's loaders tell a data set so themselves only in a run of one process."""

    def __init__(self, dataset: RecordDataset) -> None:
        self._dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the data set which epoch begins: its views and orders follow from that."""
        # 2.0 behind the last step of the second epoch, 2.25 a quarter into the third.
        self._dataset.set_epoch(int(state.epoch or 0))


RawWindow = list[list[Sample]]


class WindowReader:
    """Goes through the epochs of a run one window ahead of its trainer, which starts each epoch a step too late.

    Nothing that it reads moves torch's random state, so a run that is resumed between two epochs, and begins the second
    one itself, draws as one that went through.
    """

    def __init__(
        self, read: Callable[[Iterator[Any], int], RawWindow], begin_epoch_of: Callable[[int], Iterator[Any]]
    ) -> None:
        """``read(batches, n)``: the next n batches, fewer at an epoch's end. ``begin_epoch_of(step)``: the batches of
        the epoch whose first window is that of the step after ``step`` finished ones."""
        self._read = read
        self._begin_epoch_of = begin_epoch_of
        self._batches: Iterator[Any] | None = None
        self._next: RawWindow | None = None
        self._failure: Exception | None = None

    def take(self, batches: Iterator[Any], num_batches: int) -> RawWindow:
        """The next window: the one that was read ahead, or the first of ``batches``.

        Raises: what reading it ahead raised.
        """
        if self._failure is not None:
            raise self._failure
        if self._next is None:
            self._batches = batches
            with torch.random.fork_rng(devices=[]):
                return self._read(batches, num_batches)
        window, self._next = self._next, None
        return window

    def look_ahead(self, step: int, num_batches: int) -> RawWindow:
        """The window of the step after ``step`` finished ones, which :meth:`take` gives next."""
        assert self._batches is not None and self._next is None, "take each window before the next is looked at"
        with torch.random.fork_rng(devices=[]):
            window = self._read(self._batches, num_batches)
            if not window:
                self._batches = self._begin_epoch_of(step)
                window = self._read(self._batches, num_batches)
        self._next = window
        return window

    def fail(self, failure: Exception) -> None:
        """The next :meth:`take` raises ``failure``: it belongs to the step whose samples could not be read."""
        self._failure = failure
