"""Records → samples: ordered objects and the encoded prompt, made where the data loader runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from coordexp.config.base import default_of
from coordexp.config.schema import AugmentConfig, CustomConfig
from coordexp.data.augment import LEFT_OUT, draw_view
from coordexp.data.dataset_cache import CachedRecords
from coordexp.data.images import open_rgb
from coordexp.data.jsonl import ObjectOrdering, order_objects
from coordexp.errors import DataError
from coordexp.records import ImageRecord, RolloutRequest

_ORDERING: ObjectOrdering = default_of(CustomConfig, "object_ordering")
_EPOCH = "@epoch"  # of a view's sample id, behind its record's


@dataclass(frozen=True, slots=True)
class Sample:
    """One record, its objects in training order, with its encoded prompt."""

    record: ImageRecord
    request: RolloutRequest


class RecordDataset:
    """A map-style dataset over records for torch's loaders; torch-free, because reading answers needs it too.

    ``ordering: random`` shuffles a record's objects by (seed, epoch, its index), the same on every rank; with
    ``augment`` a sample is a view of its record, drawn by the same three. Outside of training the epoch is 0.
    """

    def __init__(
        self,
        records: Sequence[ImageRecord],
        encode: Callable[..., RolloutRequest],
        ordering: ObjectOrdering = _ORDERING,
        seed: int = 0,
        augment: AugmentConfig | None = None,
    ) -> None:
        """``encode(record)``; with ``augment`` also ``encode(record, image)``, for an image that no file holds."""
        self._ordering: ObjectOrdering = ordering
        self._seed = seed
        self._augment = augment
        self._epoch = 0
        self._encode = encode
        self._places: dict[str, int] = {}
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index, self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Samples are those of this epoch from now on. Call it before a loader's workers start."""
        self._epoch = epoch

    def record(self, index: int) -> ImageRecord:
        """A record as the first epoch orders its objects, not augmented."""
        record = self._records[index]
        return replace(record, objects=order_objects(record.objects, self._ordering, self._shuffle(0, index)))

    def request_of(self, sample_id: str) -> RolloutRequest:
        """The prompt of a sample of any epoch.

        Raises:
            DataError: the dataset does not contain its record.
        """
        name, _, epoch = sample_id.rpartition(_EPOCH) if self._augment is not None else (sample_id, "", "0")
        if isinstance(self._records, CachedRecords):
            index = self._records.index_of(name)
        else:
            self._places = self._places or {record.sample_id: at for at, record in enumerate(self._records)}
            index = self._places.get(name)
        if index is None or not epoch.isdecimal():
            raise DataError(
                f"the checkpoint's carry buffer holds sample {sample_id}, which custom.train_jsonl does not; resume "
                "with the same data and the same data.augment"
            )
        return self._sample(index, int(epoch)).request

    def _sample(self, index: int, epoch: int) -> Sample:
        if self._augment is not None:
            record, image = self.view(index, epoch)
            return Sample(record, self._encode(record, image))
        record = self.record(index)
        if self._ordering == "random" and epoch:
            record = replace(record, objects=order_objects(record.objects, "random", self._shuffle(epoch, index)))
        return Sample(record, self._encode(record))

    def view(self, index: int, epoch: int) -> tuple[ImageRecord, Image.Image]:
        """The augmented view of a record in an epoch: the record with the visible objects, and the image."""
        assert self._augment is not None, "only for augmented datasets"
        record = self.record(index)
        view = draw_view(self._augment, self._seed, epoch, index)
        objects, left_out = view.objects(record.objects, self._augment.min_visible)
        image = view.image(open_rgb(record.image, expected_size=(record.width, record.height)))
        ordered = order_objects(objects, self._ordering, self._shuffle(epoch, index))
        name, metadata = f"{record.sample_id}{_EPOCH}{epoch}", {**record.metadata, LEFT_OUT: left_out}
        return replace(record, sample_id=name, objects=ordered, metadata=metadata), image

    def _shuffle(self, epoch: int, index: int) -> random.Random:
        return random.Random(f"{self._seed}:{index}" if epoch == 0 else f"{self._seed}:{epoch}:{index}")
