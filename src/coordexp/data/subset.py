"""Smaller datasets, of one seed the same: a split that keeps each image on one side, a random sample, and annotations
taken away at random, as an annotator leaves them out, for experiments on incomplete sets."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coordexp.data.record_line import write_jsonl
from coordexp.data.shards import image_bytes
from coordexp.errors import DataError
from coordexp.geometry import aabb, to_pixel
from coordexp.records import GTObject, ImageRecord

ObjectSize = Literal["small", "medium", "large"]
SIZES: tuple[ObjectSize, ...] = ("small", "medium", "large")
_SMALL, _LARGE = 32.0**2, 96.0**2  # COCO's limits, in pixels


@dataclass(frozen=True, slots=True)
class DropRates:
    """The probability with which an annotation is kept: its class's, else its size's, else ``keep``.

    ``allow_empty``: an image may lose all annotations. Otherwise the one that was nearest to being kept stays.

    Raises:
        DataError: a probability outside of 0..1, or none below 1.
    """

    keep: float = 1.0
    per_class: Mapping[str, float] = field(default_factory=dict)
    per_size: Mapping[ObjectSize, float] = field(default_factory=dict)
    allow_empty: bool = False

    def __post_init__(self) -> None:
        rates = {"keep": self.keep, **self.per_class, **self.per_size}
        for name, rate in rates.items():
            if not 0.0 <= rate <= 1.0:
                raise DataError(f"{name}={rate:g} is not a probability; give a number from 0 to 1")
        if min(rates.values()) == 1.0:
            raise DataError("every annotation would be kept; give --keep, --per-class or --per-size below 1")

    def probability(self, obj: GTObject, record: ImageRecord) -> float:
        """The probability of keeping one annotation."""
        if obj.desc in self.per_class:
            return self.per_class[obj.desc]
        return self.per_size.get(object_size(obj, record), self.keep)


@dataclass(frozen=True, slots=True)
class DropCounts:
    """Annotations before and after, by class and by size; ``spared``: number of images that kept their last annotation
    against the draw; ``emptied``: number of images that lost all."""

    images: int
    before: Counter[str]
    after: Counter[str]
    sizes_before: Counter[str]
    sizes_after: Counter[str]
    spared: int
    emptied: int

    def to_json(self) -> dict[str, Any]:
        """The counts for machines: ``[kept, of]`` by class and by size."""
        return {
            "images": self.images,
            "kept": self.after.total(),
            "dropped": self.before.total() - self.after.total(),
            "spared": self.spared,
            "emptied": self.emptied,
            "classes": {name: [self.after[name], count] for name, count in sorted(self.before.items())},
            "sizes": {name: [self.sizes_after[name], self.sizes_before[name]] for name in SIZES},
        }


def object_size(obj: GTObject, record: ImageRecord) -> ObjectSize:
    """By the area of the bounding box in pixels: small below 32², large above 96²."""
    x1, y1, x2, y2 = aabb(obj)
    area = to_pixel(x2 - x1, record.width) * to_pixel(y2 - y1, record.height)
    return "small" if area < _SMALL else "large" if area > _LARGE else "medium"


def drop_annotations(
    records: Sequence[ImageRecord], rates: DropRates, seed: int
) -> tuple[list[ImageRecord], DropCounts]:
    """The records with fewer annotations, in the same order.

    Each draw depends on ``seed``, the record's sample id and the object's place in it, and on nothing else. A higher
    probability keeps every annotation that a lower one keeps.

    Raises:
        DataError: a class that no record has, or a soft object, which is not an annotation.
    """
    known = {obj.desc for record in records for obj in record.objects}
    unknown = sorted(rates.per_class.keys() - known)
    if unknown:
        shown = ", ".join(sorted(known)[:20])
        raise DataError(f"no object is called {', '.join(map(repr, unknown))}; the dataset holds: {shown}")
    left: list[ImageRecord] = []
    spared = emptied = 0
    for record in records:
        kept, against_the_draw = _kept(record, rates, seed)
        spared += against_the_draw
        emptied += bool(record.objects) and not kept
        left.append(replace(record, objects=tuple(record.objects[i] for i in kept)))
    classes, sizes = (_by_class(records), _by_class(left)), (_by_size(records), _by_size(left))
    return left, DropCounts(len(records), *classes, *sizes, spared, emptied)


def without_soft(records: Sequence[ImageRecord]) -> tuple[list[ImageRecord], int]:
    """The records with their annotations alone, and how many soft objects went."""
    left = [replace(r, objects=tuple(obj for obj in r.objects if obj.soft is None)) for r in records]
    return left, sum(len(r.objects) for r in records) - sum(len(r.objects) for r in left)


def _kept(record: ImageRecord, rates: DropRates, seed: int) -> tuple[list[int], bool]:
    """Indices of the objects that stay, and whether the last one was spared."""
    if any(obj.soft is not None for obj in record.objects):
        raise DataError(f"{record.sample_id}: holds soft objects; drop annotations first, then complete what is left")
    rng = random.Random(f"drop:{seed}:{record.sample_id}")
    over = [rng.random() - rates.probability(obj, record) for obj in record.objects]
    kept = [i for i, beyond in enumerate(over) if beyond < 0]
    if kept or not over or rates.allow_empty:
        return kept, False
    return [over.index(min(over))], True


def _by_class(records: Sequence[ImageRecord]) -> Counter[str]:
    return Counter(obj.desc for record in records for obj in record.objects)


def _by_size(records: Sequence[ImageRecord]) -> Counter[str]:
    return Counter(object_size(obj, record) for record in records for obj in record.objects)


def split_records(records: Sequence[ImageRecord], shares: Sequence[float], seed: int) -> list[list[ImageRecord]]:
    """Parts of about ``shares`` (which sum to 1) of the images, each in the order of the dataset.

    Records of one image stay together, copies of its file too: no part is tested on what another was trained on.

    Raises:
        DataError: invalid shares, or fewer images than parts.
    """
    if len(shares) < 2 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise DataError(f"shares are {list(shares)}; expected at least two positive numbers that sum to 1")
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        groups[_content(record.image)].append(index)
    images = list(groups)
    if len(images) < len(shares):
        raise DataError(f"{len(images)} images cannot be split into {len(shares)} parts")
    random.Random(f"split:{seed}").shuffle(images)
    ends = [round(sum(shares[: k + 1]) * len(images)) for k in range(len(shares))]
    parts, start = [], 0
    for k, end in enumerate(ends):
        end = min(max(end, start + 1), len(images) - (len(shares) - 1 - k))  # each part gets an image
        parts.append([records[i] for i in sorted(i for image in images[start:end] for i in groups[image])])
        start = end
    return parts


def _content(image: Path) -> str:
    """Equal for files of equal bytes; an image that is not there is only itself."""
    try:
        return hashlib.sha256(image_bytes(image)).hexdigest()
    except DataError:
        return str(image)


def sample_records(records: Sequence[ImageRecord], count: int, seed: int) -> list[ImageRecord]:
    """``count`` records drawn without replacement, in the order of the dataset.

    Raises:
        DataError: ``count`` is larger than the dataset, or below 1.
    """
    if not 1 <= count <= len(records):
        raise DataError(f"cannot draw {count} of {len(records)} records")
    chosen = sorted(random.Random(f"sample:{seed}").sample(range(len(records)), count))
    return [records[i] for i in chosen]


def write_part(records: Sequence[ImageRecord], path: Path) -> Path:
    """Write a part; its images stay where they are.

    Raises:
        DataError: the file exists.
    """
    if path.exists():
        raise DataError("exists already; name another file", path=path)
    write_jsonl(records, path)
    return path
