"""How a model's training images were resized and how its bins relate to pixels, so that inference does the same.

The converters write both rules into each line of a dataset (``metadata.prepared`` and ``metadata.bin_rule``), training
writes them into the checkpoint (:data:`PREPARATION`), and inference applies them. Coordinates are thousandths of a
side, so a prediction is valid for the original and for the resized copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from PIL import Image

from coordexp.data.dataset_cache import PREPARED
from coordexp.data.images import ResizeRule
from coordexp.data.joined import distinct_preparations, pixel_areas
from coordexp.errors import CheckpointError, DataError
from coordexp.records import BIN_RULE, BinRule, ImageRecord

PREPARATION = "image_preparation.json"
_TELLING = 2.0  # twice or half the area is still close to training


@dataclass(frozen=True, slots=True)
class ImagePreparation:
    """A checkpoint's record of its training images: their resize rule (None: not resized), the smallest and largest
    area in pixels (None: unknown), and the rule of its bins."""

    resize: ResizeRule | None = None
    seen_pixels: tuple[int, int] | None = None
    bin_rule: BinRule = "pixel_centres"

    def __call__(self, image: Image.Image) -> Image.Image:
        return image if self.resize is None else self.resize.resize(image)

    def changes(self, width: int, height: int) -> bool:
        return self.resize is not None and self.resize.size(width, height) != (width, height)

    def is_unlike_training(self, width: int, height: int) -> bool:
        """Whether the area of an image of this size, after resizing, is far from all training images'."""
        if self.seen_pixels is None:
            return False
        shown_width, shown_height = (width, height) if self.resize is None else self.resize.size(width, height)
        least, most = self.seen_pixels
        return not least / _TELLING <= shown_width * shown_height <= most * _TELLING


NO_RESIZE = ImagePreparation()


def preparation_of(records: Sequence[ImageRecord]) -> ImagePreparation:
    """The preparation to store with a model trained on ``records``. Its resize rule is the one that all share, or None;
    its bin rule ``pixel_edges`` if some record has that. Raises DataError for a record whose ``metadata.prepared`` is
    not a rule."""
    rules: set[ResizeRule | None] = set()
    bin_rules: set[BinRule] = set()
    for record in distinct_preparations(records):
        bin_rules.add(record.bin_rule)
        written = record.metadata.get(PREPARED)
        try:
            rules.add(None if written is None else _read_rule(written))
        except (TypeError, ValueError, DataError) as error:
            raise DataError(
                f"{record.sample_id}: metadata.{PREPARED} is {written!r}: {error}; write them as converters do, or "
                "remove the key"
            ) from error
    bin_rule: BinRule = "pixel_edges" if "pixel_edges" in bin_rules else "pixel_centres"
    return ImagePreparation(rules.pop() if len(rules) == 1 else None, pixel_areas(records), bin_rule)


def read_preparation(folder: str | Path) -> ImagePreparation:
    """The preparation of the checkpoint in ``folder``; :data:`NO_RESIZE` if it has none. Raises CheckpointError."""
    path = Path(folder) / PREPARATION
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        rule, seen = fields["resize"], fields["seen_pixels"]
        least_and_most = None if seen is None else (int(seen[0]), int(seen[1]))
        bin_rule = fields.get(BIN_RULE, NO_RESIZE.bin_rule)  # older checkpoints do not have it
        if bin_rule not in get_args(BinRule):
            raise ValueError(f"{BIN_RULE} is {bin_rule!r}")
        return ImagePreparation(None if rule is None else _read_rule(rule), least_and_most, bin_rule)
    except FileNotFoundError:
        return NO_RESIZE
    except (OSError, KeyError, IndexError, TypeError, ValueError, DataError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); restore the checkpoint's files") from error


def write_preparation(preparation: ImagePreparation, folder: str | Path) -> None:
    """Write :data:`PREPARATION` into ``folder``; without a preparation remove the file of an earlier run."""
    path = Path(folder) / PREPARATION
    if preparation == NO_RESIZE:
        path.unlink(missing_ok=True)
    else:
        path.write_text(json.dumps({"schema_version": 1, **asdict(preparation)}, indent=2) + "\n", encoding="utf-8")


def _read_rule(written: Mapping[str, Any]) -> ResizeRule:
    if set(written) != {"factor", "min_pixels", "max_pixels"} or any(type(v) is not int for v in written.values()):
        raise ValueError("expected the whole numbers factor, min_pixels and max_pixels")
    return ResizeRule(**written)
