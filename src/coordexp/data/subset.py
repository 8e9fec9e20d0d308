"""Parts of a dataset: a split that keeps each image on one side, and a random sample. Same seed, same parts."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from coordexp.data.shards import image_bytes
from coordexp.data.write import write_jsonl
from coordexp.errors import DataError
from coordexp.records import ImageRecord


def split_records(records: Sequence[ImageRecord], shares: Sequence[float], seed: int = 0) -> list[list[ImageRecord]]:
    """Parts of about ``shares`` (which sum to 1) of the images, each in the order of the dataset.

    Records of one image stay together, copies of its file too: no part is tested on what another was trained on.

    Raises:
        DataError: shares that are no shares, or too few images for every part to get one.
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
        end = min(max(end, start + 1), len(images) - (len(shares) - 1 - k))  # nobody goes empty-handed
        parts.append([records[i] for i in sorted(i for image in images[start:end] for i in groups[image])])
        start = end
    return parts


def _content(image: Path) -> str:
    """Equal for files of equal bytes; an image that is not there is only itself."""
    try:
        return hashlib.sha256(image_bytes(image)).hexdigest()
    except DataError:
        return str(image)


def sample_records(records: Sequence[ImageRecord], count: int, seed: int = 0) -> list[ImageRecord]:
    """``count`` records drawn without replacement, in the order of the dataset.

    Raises:
        DataError: there are not so many.
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
