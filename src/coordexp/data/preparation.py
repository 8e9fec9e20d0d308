"""How a model's training images were resized, so that inference does the same.

The converters write the rule into each line of a dataset (``metadata.prepared``), training writes it into the
checkpoint's card, and inference applies it. Coordinates are thousandths of a side, so a prediction is valid for the
original and for the resized copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from PIL import Image

from coordexp.data.dataset_cache import PREPARED
from coordexp.data.images import ResizeRule
from coordexp.data.joined import distinct_preparations, pixel_areas
from coordexp.errors import DataError
from coordexp.records import ImageRecord

_TELLING = 2.0  # twice or half the area is still close to training

Side = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]  # of an image, in pixels, in a file


@dataclass(frozen=True, slots=True)
class OriginalImage:
    """The user's image that a converter prepared another one from: its file, as the source names it, and its size in
    pixels. Sizes of objects are measured in its pixels."""

    file: str
    width: Side
    height: Side


def original_image(record: ImageRecord) -> OriginalImage | None:
    """None if the record's image is the user's own."""
    try:
        return msgspec.convert(record.metadata.get("source"), OriginalImage)  # a converter's note
    except msgspec.ValidationError:
        return None  # metadata of the user's own


@dataclass(frozen=True, slots=True)
class ImagePreparation:
    """A checkpoint's record of its training images: their resize rule (None: not resized), and the smallest and
    largest area in pixels (None: unknown)."""

    resize: ResizeRule | None = None
    seen_pixels: tuple[int, int] | None = None

    def __call__(self, image: Image.Image) -> Image.Image:
        return image if self.resize is None else self.resize.resize(image)

    def changes(self, width: int, height: int) -> bool:
        return self.resize is not None and self.resize.prepared_size(width, height) != (width, height)

    def is_unlike_training(self, width: int, height: int) -> bool:
        """Whether the area of an image of this size, after resizing, is far from all training images'."""
        if self.seen_pixels is None:
            return False
        shown = (width, height) if self.resize is None else self.resize.prepared_size(width, height)
        least, most = self.seen_pixels
        return not least / _TELLING <= shown[0] * shown[1] <= most * _TELLING


NO_RESIZE = ImagePreparation()


def preparation_of(records: Sequence[ImageRecord]) -> ImagePreparation:
    """The preparation to store with a model trained on ``records``. Its resize rule is the one that all share, or None.
    Raises DataError for a record whose ``metadata.prepared`` is not a rule."""
    rules = _rules_of(records)
    return ImagePreparation(rules.pop() if len(rules) == 1 else None, pixel_areas(records))


def several_rules_note(records: Sequence[ImageRecord]) -> str | None:
    """A sentence if training images were resized by several rules, or only a part of them by one: the model's card has
    no rule then."""
    rules = _rules_of(records)
    if len(rules) < 2:
        return None
    shown = sorted(
        "none" if rule is None else f"factor {rule.factor}, {rule.min_pixels} to {rule.max_pixels} pixels"
        for rule in rules
    )
    return (
        f"images were resized by {len(rules)} rules (metadata.{PREPARED}: {'; '.join(shown)}), so the checkpoint has "
        "none, and predict, evaluate and Detector will take images as they are; convert all data with the same options"
    )


def _rules_of(records: Sequence[ImageRecord]) -> set[ResizeRule | None]:
    rules: set[ResizeRule | None] = set()
    for record in distinct_preparations(records):
        try:
            rules.add(resize_rule_of(record))
        except DataError as error:
            raise DataError(f"{record.sample_id}: {error}") from error
    return rules


def resize_rule_of(record: ImageRecord) -> ResizeRule | None:
    """The rule by which the record's image was resized; None if it was not. Raises DataError if its
    ``metadata.prepared`` is not a rule."""
    written = record.metadata.get(PREPARED)
    if written is None:
        return None
    try:
        whole = isinstance(written, dict) and all(type(value) is int for value in written.values())
        if not whole or written.keys() != {"factor", "min_pixels", "max_pixels"}:
            raise DataError("expected the whole numbers factor, min_pixels and max_pixels")
        return ResizeRule(**written)
    except DataError as error:
        raise DataError(
            f"metadata.{PREPARED} is {written!r}: {error}; write them as converters do, or remove the key"
        ) from error


def unprepared_note(preparation: ImagePreparation, validation: Sequence[ImageRecord]) -> str | None:
    """A sentence if the rule of the training images, whose ``preparation`` is given, resizes validation images:
    evaluations while training take them as they are, and ``coordexp evaluate`` resizes them."""
    if preparation.resize is None:
        return None
    others = sum(preparation.changes(record.width, record.height) for record in validation)
    if not others:
        return None
    return (
        f"{others} of {len(validation)} images would be resized by the rule of the training images "
        f"(metadata.{PREPARED}), so figures while training differ from those of coordexp evaluate; convert both "
        "with the same options, or, if they were, with --min-pixels and --max-pixels further apart"
    )
