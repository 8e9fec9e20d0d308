"""Datasets made from others: a split that keeps each image on one side, a random sample, annotations left out at
random for experiments on incomplete sets, and shards. A seed gives the same dataset every time."""

from __future__ import annotations

import difflib
import glob
import hashlib
import io
import os
import random
import tarfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from coordexp.data.class_list import as_written
from coordexp.data.completed import without_completed
from coordexp.data.files import check_new_file, whole_binary_file
from coordexp.data.images import image_bytes
from coordexp.data.jsonl import clean_desc, line_of, write_jsonl
from coordexp.data.preparation import original_image
from coordexp.data.shards import SHARD_SUFFIX
from coordexp.data.tiles import packed_tile, photograph_of
from coordexp.errors import DataError
from coordexp.geometry import aabb, to_pixel
from coordexp.records import GTObject, ImageRecord

ObjectSize = Literal["small", "medium", "large"]
SIZES: tuple[ObjectSize, ...] = ("small", "medium", "large")
IMAGE_LABELS = "image_labels"  # key of a record's metadata: names of classes in lists, as Open Images' converter writes
_SMALL, _LARGE = 32.0**2, 96.0**2  # COCO's limits, in pixels


@dataclass(frozen=True, slots=True)
class DropRates:
    """The probability with which an annotation is kept: its class's, else its size's, else ``keep``. Raises DataError
    for one outside of 0..1, or none below 1. ``allow_empty``: an image may lose all annotations. Otherwise the one that
    was nearest to being kept stays."""

    keep: float = 1.0
    per_class: Mapping[str, float] = field(default_factory=dict)
    per_size: Mapping[ObjectSize, float] = field(default_factory=dict)
    allow_empty: bool = False

    def __post_init__(self) -> None:
        # Pairs: a class may be called "keep" or "small".
        rates = [("keep", self.keep), *self.per_class.items(), *self.per_size.items()]
        for name, rate in rates:
            if not 0.0 <= rate <= 1.0:
                raise DataError(f"{name}={rate:g} is not a probability; give a number from 0 to 1")
        if min(rate for _, rate in rates) == 1.0:
            raise DataError("every annotation would be kept; give --keep, --per-class or --per-size below 1")

    def probability(self, obj: GTObject, record: ImageRecord) -> float:
        if obj.desc in self.per_class:
            return self.per_class[obj.desc]
        return self.per_size.get(object_size(obj, record), self.keep)


@dataclass(frozen=True, slots=True)
class DropCounts:
    """``[kept, of]`` annotations by class and by size; ``spared``: images that kept their last annotation against the
    draw; ``emptied``: images that lost all."""

    images: int
    spared: int
    emptied: int
    classes: dict[str, list[int]]
    sizes: dict[str, list[int]]

    def to_json(self) -> dict[str, Any]:
        kept, total = (sum(pair[at] for pair in self.classes.values()) for at in (0, 1))
        return {"images": self.images, "kept": kept, "dropped": total - kept, **asdict(self)}


def object_size(obj: GTObject, record: ImageRecord) -> ObjectSize:
    """By the area of the bounding box in pixels of the user's image: small below 32², large above 96²."""
    x1, y1, x2, y2 = aabb(obj)
    image = original_image(record) or record
    area = to_pixel(x2 - x1, image.width) * to_pixel(y2 - y1, image.height)
    return "small" if area < _SMALL else "large" if area > _LARGE else "medium"


def drop_annotations(
    records: Sequence[ImageRecord], rates: DropRates, seed: int
) -> tuple[list[ImageRecord], DropCounts]:
    """The records with fewer annotations, in the same order.

    Each draw depends on ``seed``, the record's sample id and the object's place in it only. A higher probability keeps
    every annotation that a lower one keeps, except those that were spared by rates that differ. Raises DataError for a
    class that no record has, or a soft object, which is not an annotation.
    """
    known = {obj.desc for record in records for obj in record.objects}
    unknown = sorted(rates.per_class.keys() - known)
    if unknown:
        shown = ", ".join(sorted(known)[:20])
        raise DataError(f"no object is called {', '.join(map(repr, unknown))}; the dataset has: {shown}")
    left: list[ImageRecord] = []
    spared = emptied = 0
    for record in records:
        if any(obj.soft is not None for obj in record.objects):
            detail = "contains soft objects; drop annotations first, then complete what is left"
            raise DataError(f"{record.sample_id}: {detail}")
        rng = random.Random(f"drop:{seed}:{record.sample_id}")
        over = [rng.random() - rates.probability(obj, record) for obj in record.objects]
        kept = [i for i, beyond in enumerate(over) if beyond < 0]
        if over and not kept:
            if rates.allow_empty:
                emptied += 1
            else:
                spared += 1
                kept = [over.index(min(over))]
        left.append(replace(record, objects=tuple(record.objects[i] for i in kept)))
    kept_descs, descs = (Counter(obj.desc for record in part for obj in record.objects) for part in (left, records))
    kept_sizes, sizes = (
        Counter(object_size(obj, record) for record in part for obj in record.objects) for part in (left, records)
    )
    by_class = {name: [kept_descs[name], count] for name, count in sorted(descs.items())}
    by_size = {name: [kept_sizes[name], sizes[name]] for name in SIZES}
    return left, DropCounts(len(records), spared, emptied, by_class, by_size)


def without_soft(records: Sequence[ImageRecord]) -> tuple[list[ImageRecord], int]:
    """The records with their annotations alone, and how many soft objects went."""
    left = [without_completed(record) for record in records]
    return left, sum(len(r.objects) for r in records) - sum(len(r.objects) for r in left)


def read_renames(texts: Sequence[str]) -> dict[str, str]:
    """New names by old ones, as datasets contain them, of texts ``OLD=NEW``. Raises DataError for other texts, and for
    an old name that is given twice."""
    renames: dict[str, str] = {}
    for text in texts:
        if "=" not in text:
            raise DataError(f"{text!r}: expected OLD=NEW")
        old, new = map(as_written, text.split("=", 1))
        if old in renames:
            raise DataError(f"{old!r} is renamed twice; keep one")
        renames[old] = new
    return renames


def rename_classes(
    records: Sequence[ImageRecord], renames: Mapping[str, str]
) -> tuple[list[ImageRecord], Counter[str]]:
    """Records whose objects have the new names, and the number of renamed objects by old name. All names change at
    once, so two can be exchanged; a name that exists already is joined. Raises DataError for a name that neither
    objects nor labels of images have, and for one that is not allowed."""
    known = Counter(obj.desc for record in records for obj in record.objects)
    known.update({name: 0 for record in records for names in _image_labels(record).values() for name in names})
    for old, new in renames.items():
        if old not in known:
            near = difflib.get_close_matches(old, known, 1, 0.5)
            raise DataError(f"no object is called {old!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        try:
            if not new.strip() or clean_desc(new) != new:
                raise ValueError("it is empty, or has spaces around it or characters of another form")
        except ValueError as error:
            raise DataError(f"{old}={new}: the new name cannot be used: {error}") from error
    olds: defaultdict[str, set[str]] = defaultdict(set)  # by new name
    for old in known:
        olds[renames.get(old, old)].add(old)
    renamed = []
    for record in records:
        objects = tuple(replace(obj, desc=renames.get(obj.desc, obj.desc)) for obj in record.objects)
        metadata = dict(record.metadata)
        if labels := _image_labels(record):
            new = {key: list(dict.fromkeys(renames.get(name, name) for name in labels[key])) for key in labels}
            if "absent" in new:  # a joined class is absent if people looked for all of its parts, and saw none
                new["absent"] = [name for name in new["absent"] if olds[name] <= set(labels["absent"])]
            metadata[IMAGE_LABELS] = {**metadata[IMAGE_LABELS], **new}
        renamed.append(replace(record, objects=objects, metadata=metadata))
    return renamed, Counter({old: known[old] for old in renames})


def _image_labels(record: ImageRecord) -> dict[str, list[str]]:
    """The lists of classes that people saw in the image (``present``), or did not (``absent``). Empty without any, and
    for metadata of the user's own."""
    labels = record.metadata.get(IMAGE_LABELS)
    if not isinstance(labels, dict):
        return {}
    lists = {key: names for key, names in labels.items() if isinstance(names, list)}
    return lists if all(isinstance(name, str) for names in lists.values() for name in names) else {}


def split_records(records: Sequence[ImageRecord], shares: Sequence[float], seed: int) -> list[list[ImageRecord]]:
    """Parts of about ``shares`` (which sum to 1) of the images, each in the order of the dataset.

    Records of one image stay together, copies of its file and tiles of a photograph, with the photograph, too: no part
    is tested on what another was trained on. Raises DataError for invalid shares, or fewer images than parts.
    """
    if len(shares) < 2 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise DataError(f"shares are {list(shares)}; expected at least two positive numbers that sum to 1")
    content_of: dict[str, str] = {}
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        # Tiles of a photograph overlap each other, and the photograph itself may be among the records too.
        path = photograph_of(record) or str(record.image)
        if path not in content_of:
            try:
                content_of[path] = hashlib.sha256(image_bytes(Path(path))).hexdigest()
            except DataError:  # without a file: compare by path
                content_of[path] = path
        groups[content_of[path]].append(index)
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


def sample_records(records: Sequence[ImageRecord], count: int, seed: int) -> list[ImageRecord]:
    """``count`` records drawn without replacement, in the order of the dataset. Raises DataError for other counts."""
    if not 1 <= count <= len(records):
        raise DataError(f"cannot draw {count} of {len(records)} records")
    chosen = sorted(random.Random(f"sample:{seed}").sample(range(len(records)), count))
    return [records[i] for i in chosen]


def pack(
    records: Sequence[ImageRecord], out: Path, shard_bytes: int, progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Write ``records`` to the JSONL ``out`` and their images, byte for byte, into tar files next to it. Returns the
    number of records and of shards.

    ``out``'s stem names the shards, of about ``shard_bytes`` each: ``set-00000.tar`` holds ``00000000.jpg`` and
    ``00000000.json``, the record's own line, for each of its records, so WebDataset reads it without the JSONL. The
    JSONL appears last, after all shards. ``progress(done, total)`` counts packed records. Raises DataError if ``out``
    or a shard exists, an image cannot be read, or a record cannot be written.
    """
    # All digits: set-1-00000.tar is a shard of set-1.jsonl.
    for path in (out, *out.parent.glob(f"{glob.escape(out.stem)}-{'[0-9]' * 5}{SHARD_SUFFIX}")):
        check_new_file(path, fix="name another file, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def packed_records() -> Iterator[ImageRecord]:
        number = 0
        while number < len(records):
            shard = out.with_name(f"{out.stem}-{len(written):05d}{SHARD_SUFFIX}")
            packed: list[ImageRecord] = []
            with (
                whole_binary_file(shard) as file,
                tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
            ):
                while number < len(records) and (not packed or tar.offset < shard_bytes):
                    record = packed_tile(records[number], out)
                    if progress is not None:
                        progress(number, len(records))
                    name = f"{number:08d}{record.image.suffix.lower()}"
                    alone = replace(record, image=Path(os.path.abspath(out.parent), name))
                    line = line_of(alone, out, number + 1).encode()
                    for member, data in ((name, image_bytes(record.image)), (f"{number:08d}.json", line)):
                        info = tarfile.TarInfo(member)  # without time and owner, so that equal sets make equal shards
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
                    packed.append(replace(record, image=Path(os.path.abspath(shard), name)))
                    number += 1
            written.append(shard)
            yield from packed

    try:
        count = write_jsonl(packed_records(), out)
    except BaseException:  # Ctrl-C too: shards without their JSONL are of no use
        for shard in written:
            shard.unlink(missing_ok=True)
        raise
    return count, len(written)
