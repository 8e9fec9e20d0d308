"""Records → samples: ordered objects and the encoded prompt, made where the data loader runs; and augmented views.

A view shows a window of the image at the image's own size, so a sample keeps its number of tokens. A view depends on
(seed, epoch, index) only, so workers, ranks and a resumed run see the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from PIL import Image, ImageEnhance

from coordexp.config.base import default_of
from coordexp.config.schema import AugmentConfig, CustomConfig
from coordexp.data.images import open_rgb
from coordexp.data.joined import index_of
from coordexp.data.jsonl import ObjectOrdering, order_objects
from coordexp.data.polygons import canonical_ring, clipped_shape
from coordexp.errors import DataError
from coordexp.records import NUM_BINS, GTObject, ImageRecord, RolloutRequest

_ORDERING: ObjectOrdering = default_of(CustomConfig, "object_ordering")
_EPOCH, _REPEAT = "@epoch", "."  # of a view's sample id, after its record's: s:1@epoch2.1 is the first repeat
LEFT_OUT = "augment_left_out"  # key of a view's metadata: the number of objects of which too little is left
MIN_VISIBLE = 0.3  # share of its area that an object needs in view
_LAST = NUM_BINS - 1
_GREY = (114, 114, 114)  # beyond the image's edge
_WHOLE = (0.0, 0.0, 1.0, 1.0)  # window of a view that shows all of its image


@dataclass(frozen=True, slots=True)
class Sample:
    """One record, its objects in training order, with its encoded prompt."""

    record: ImageRecord
    request: RolloutRequest


@dataclass(eq=False)
class RecordDataset:
    """A map-style dataset over records for torch's loaders; torch-free, because reading answers needs it too.

    ``encode(record)`` returns the prompt; with ``augment`` also ``encode(record, image)``, for an image that is in no
    file. ``ordering: random`` shuffles a record's objects by (seed, epoch, its index), the same on every rank; with
    ``augment`` a sample is a view of its record, drawn by the same three. Outside of training the epoch is 0.
    Indices from ``len(records)`` on are an epoch's repeats: index k is record ``k % len(records)`` again, in an order
    and a view of its own.
    """

    records: Sequence[ImageRecord]
    encode: Callable[..., RolloutRequest]
    ordering: ObjectOrdering = _ORDERING
    seed: int = 0
    augment: AugmentConfig | None = None
    _epoch: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Sample:
        return self._sample(index, self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Samples are those of this epoch from now on. Call it before a loader's workers start."""
        self._epoch = epoch

    def record(self, index: int) -> ImageRecord:
        """A record as the first epoch orders its objects, not augmented."""
        record = self.records[index % len(self.records)]
        return replace(record, objects=order_objects(record.objects, self.ordering, self._shuffle(0, index)))

    def request_of(self, sample_id: str) -> RolloutRequest:
        """The prompt of a sample of any epoch. Raises DataError if the dataset does not contain its record."""
        name, _, drawn = sample_id.rpartition(_EPOCH) if self.augment is not None else (sample_id, "", "0")
        epoch, _, repeat = drawn.partition(_REPEAT)
        index = index_of(self.records, name)
        if index is None or not epoch.isdecimal() or not (repeat or "0").isdecimal():
            raise DataError(
                f"the checkpoint's carry buffer holds sample {sample_id}, which custom.train_jsonl does not; resume "
                "with the same data and the same data.augment"
            )
        return self._sample(index + int(repeat or 0) * len(self.records), int(epoch)).request

    def _sample(self, index: int, epoch: int) -> Sample:
        if self.augment is not None:
            record, image = self.view(index, epoch)
            return Sample(record, self.encode(record, image))
        record = self.record(index)
        if self.ordering == "random" and (epoch or index >= len(self.records)):
            record = replace(record, objects=order_objects(record.objects, "random", self._shuffle(epoch, index)))
        return Sample(record, self.encode(record))

    def view(self, index: int, epoch: int) -> tuple[ImageRecord, Image.Image]:
        """The augmented view of a record in an epoch: the record with the visible objects, and the image."""
        assert self.augment is not None, "only for augmented datasets"
        record = self.record(index)
        view = draw_view(self.augment, self.seed, epoch, index)
        objects, left_out = view.objects(record.objects, MIN_VISIBLE)
        image = view.image(open_rgb(record.image, expected_size=(record.width, record.height)))
        ordered = order_objects(objects, self.ordering, self._shuffle(epoch, index))
        repeat = f"{_REPEAT}{index // len(self.records)}" if index >= len(self.records) else ""
        name, metadata = f"{record.sample_id}{_EPOCH}{epoch}{repeat}", {**record.metadata, LEFT_OUT: left_out}
        return replace(record, sample_id=name, objects=ordered, metadata=metadata), image

    def _shuffle(self, epoch: int, index: int) -> random.Random:
        return random.Random(f"{self.seed}:{index}" if epoch == 0 else f"{self.seed}:{epoch}:{index}")


@dataclass(frozen=True, slots=True)
class View:
    """One way to look at an image. ``window``: left, top, right, bottom in shares of its sides; grey
    outside 0..1. ``brightness``, ``contrast``, ``saturation``: factors, 1 changes nothing."""

    window: tuple[float, float, float, float] = _WHOLE
    mirrored: bool = False
    upside_down: bool = False
    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0

    def image(self, image: Image.Image) -> Image.Image:
        """The view of an RGB image; of the same size."""
        width, height = image.size
        shown = image
        if self.window != _WHOLE:
            left, top, right, bottom = self.window
            # An affine map reads few pixels per output pixel, so it would skip some where the view shrinks the image.
            share = max(right - left, bottom - top)
            if share > 1:
                reduced = max(1, round(width / share)), max(1, round(height / share))
                shown = image.resize(reduced, Image.Resampling.BICUBIC)
            x_scale, y_scale = shown.width / width, shown.height / height
            data = (
                *((right - left) * x_scale, 0, left * width * x_scale),
                *(0, (bottom - top) * y_scale, top * height * y_scale),
            )
            shown = shown.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.BICUBIC, fillcolor=_GREY)
        if self.mirrored:
            shown = shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.upside_down:
            shown = shown.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        for enhance, factor in (
            (ImageEnhance.Brightness, self.brightness),
            (ImageEnhance.Contrast, self.contrast),
            (ImageEnhance.Color, self.saturation),
        ):
            if factor != 1.0:
                shown = enhance(shown).enhance(factor)
        return shown

    def objects(self, objects: Sequence[GTObject], min_visible: float) -> tuple[list[GTObject], int]:
        """The objects as the view shows them, and how many are left out: less than ``min_visible`` of their area is in
        the window, or nothing of it on the grid."""
        visible = [seen for obj in objects if (seen := self._seen(obj, min_visible)) is not None]
        return visible, len(objects) - len(visible)

    def _seen(self, obj: GTObject, min_visible: float) -> GTObject | None:
        left, top, right, bottom = self.window
        points: list[float] = []
        for x, y in zip(obj.bins[0::2], obj.bins[1::2], strict=True):
            u, v = (x / _LAST - left) / (right - left), (y / _LAST - top) / (bottom - top)
            points += (1 - u if self.mirrored else u, 1 - v if self.upside_down else v)
        if obj.kind == "bbox_2d":  # a mirrored one has its corners exchanged
            (x1, x2), (y1, y2) = sorted(points[0::2]), sorted(points[1::2])
            points = [x1, y1, x2, y1, x2, y2, x1, y2]
        inside, share = clipped_shape("poly", points, _WHOLE)
        if not inside or share < min_visible:
            return None
        bins = tuple(round(v * _LAST) for v in inside)
        if obj.kind == "bbox_2d":
            return replace(obj, bins=(min(bins[0::2]), min(bins[1::2]), max(bins[0::2]), max(bins[1::2])))
        bins = canonical_ring(bins)
        return None if len(bins) < 6 else replace(obj, bins=bins)


def draw_view(config: AugmentConfig, seed: int, epoch: int, index: int) -> View:
    """The view of sample ``index`` in an epoch. Every number is always drawn, so that switching one part on changes
    none of the others."""
    rng = random.Random(f"augment:{seed}:{epoch}:{index}")
    mirrored, upside_down = rng.random() < config.horizontal_flip, rng.random() < config.vertical_flip
    scale = config.scale[0] * (config.scale[1] / config.scale[0]) ** rng.random()  # as likely twice as half
    width, height = (config.crop + (1 - config.crop) * rng.random() for _ in range(2))
    width, height = width / scale, height / scale
    left, top = ((1 - side) * rng.random() for side in (width, height))
    brightness, contrast, saturation = (1 + config.colour * (2 * rng.random() - 1) for _ in range(3))
    return View((left, top, left + width, top + height), mirrored, upside_down, brightness, contrast, saturation)
