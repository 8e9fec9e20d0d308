"""Records → samples: ordered objects and the encoded prompt, made where the data loader runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from coordexp.data.jsonl import order_objects
from coordexp.records import ImageRecord, RolloutRequest


@dataclass(frozen=True, slots=True)
class Sample:
    """One record, its objects in training order, with its encoded prompt."""

    record: ImageRecord
    request: RolloutRequest


class RecordDataset:
    """A map-style dataset over records, as torch's loaders take one; reading answers needs it, and no torch.

    ``ordering: random`` shuffles a record's objects by (seed, its index): the same in every epoch and on every rank.
    """

    def __init__(
        self,
        records: Sequence[ImageRecord],
        encode: Callable[[ImageRecord], RolloutRequest],
        ordering: Literal["sorted", "random", "file"] = "sorted",
        seed: int = 0,
    ) -> None:
        self.records = tuple(
            replace(record, objects=order_objects(record.objects, ordering, random.Random(f"{seed}:{index}")))
            for index, record in enumerate(records)
        )
        self._encode = encode

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        record = self.records[index]
        return Sample(record, self._encode(record))
