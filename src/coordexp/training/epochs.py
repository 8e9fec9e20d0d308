"""A callback that tells the training data its epoch before the loader reads: orders and views depend on it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from coordexp.data.dataset import RecordDataset


class EpochOfData(TrainerCallback):
    """accelerate's loaders tell a data set so themselves only in a run of one process."""

    def __init__(self, dataset: RecordDataset) -> None:
        self._dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the data set which epoch begins: its views and orders follow from that."""
        # 2.0 behind the last step of the second epoch, 2.25 a quarter into the third.
        self._dataset.set_epoch(int(state.epoch or 0))
