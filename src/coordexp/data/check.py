"""Contents and problems of a dataset. Every line is checked, even if others are broken."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordexp.data.files import cache_folder
from coordexp.data.images import image_exists, open_rgb, read_header, shape_problem, size_problem
from coordexp.data.jsonl import NO_RECORDS, LineFault, RefusedLine, numbered_lines, parse_line
from coordexp.data.polygons import shape_area
from coordexp.data.shards import image_bytes, image_stat
from coordexp.errors import DataError
from coordexp.records import NUM_BINS, ImageRecord

Progress = Callable[[int, int], None]
CountTokens = Callable[[ImageRecord], int]

DENSITY_EDGES = (0, 1, 2, 3, 5, 10, 20, 50, 100)


class Finding(StrEnum):
    """Kinds of findings. Training refuses a dataset with errors; the others are warnings."""

    # errors
    SCHEMA = "schema"  # an invalid line
    XYWH_LOOKING = "xywh_looking"  # right of its left edge, unless its last two values are width and height
    OUT_OF_RANGE = "out_of_range"  # values beyond 0..999: pixels, most often
    MISSING_IMAGE = "missing_image"
    UNREADABLE_IMAGE = "unreadable_image"
    SIZE_MISMATCH = "size_mismatch"
    EXTREME_SHAPE = "extreme_shape"  # more than 200 times as long as wide, which vision processors refuse
    TOO_LONG = "too_long"  # prompt and answer exceed global_max_length
    ROUND_TRIP = "round_trip"  # objects → text → tokens → objects gives others
    # worth a look
    DEGENERATE = "degenerate"  # a shape without area on the norm1000 grid
    DUPLICATE_OBJECT = "duplicate_object"  # same description and shape twice in an image
    DUPLICATE_IMAGE = "duplicate_image"  # one image file in several records, or the same bytes in several files
    EMPTY_IMAGE = "empty_image"
    LEFT_OUT = "left_out"  # by the conversion, according to its report


ERRORS = frozenset({
    Finding.SCHEMA, Finding.XYWH_LOOKING, Finding.OUT_OF_RANGE, Finding.MISSING_IMAGE, Finding.UNREADABLE_IMAGE,
    Finding.SIZE_MISMATCH, Finding.EXTREME_SHAPE, Finding.TOO_LONG, Finding.ROUND_TRIP,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding and its place: ``file.jsonl:line``, or what the conversion's report names."""

    finding: Finding
    where: str
    detail: str


@dataclass
class DatasetCheck:
    """Everything found, and what the sound records hold."""

    path: Path
    lines: int = 0
    records: list[ImageRecord] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    token_lengths: list[int] = field(default_factory=list)
    max_tokens: int | None = None

    def add(self, finding: Finding, where: str, detail: str) -> None:
        self.problems.append(Problem(finding, where, detail))

    @property
    def errors(self) -> int:
        return sum(problem.finding in ERRORS for problem in self.problems)

    def counts(self) -> Counter[Finding]:
        return Counter(problem.finding for problem in self.problems)

    def classes(self) -> Counter[str]:
        """Objects of the sound records by description."""
        return Counter(obj.desc for record in self.records for obj in record.objects)

    def kinds(self) -> Counter[str]:
        """Objects of the sound records by geometry."""
        return Counter(obj.kind for record in self.records for obj in record.objects)

    def soft_objects(self) -> int:
        return sum(obj.soft is not None for record in self.records for obj in record.objects)

    def densities(self) -> dict[str, int]:
        """Images by their number of objects."""
        return histogram([len(record.objects) for record in self.records], DENSITY_EDGES)

    def to_json(self) -> dict[str, Any]:
        lengths = sorted(self.token_lengths)
        return {
            "path": str(self.path),
            "lines": self.lines,
            "images": len(self.records),
            "objects": sum(len(record.objects) for record in self.records),
            "soft_objects": self.soft_objects(),
            "errors": self.errors,
            "findings": {finding.value: count for finding, count in sorted(self.counts().items())},
            "classes": dict(self.classes().most_common()),
            "kinds": dict(self.kinds()),
            "density": self.densities(),
            "tokens": None if not lengths else {
                "min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1], "limit": self.max_tokens,
            },
            "found": [asdict(problem) for problem in self.problems],
        }  # fmt: skip


def check_jsonl(
    path: str | Path,
    *,
    limit: int | None = None,
    count_tokens: CountTokens | None = None,
    max_tokens: int | None = None,
    deep: bool = False,
    progress: Progress | None = None,
) -> DatasetCheck:
    """Check a dataset line by line.

    Args:
        limit: look at the first ``limit`` lines only.
        deep: decode every image too, instead of reading its header alone. Later checks skip sound images
            whose files have not changed (:class:`ImageCheckCache`).
        count_tokens: tokens of a record's prompt and answer; with it, those above ``max_tokens`` are found.

    Raises:
        DataError: no such file, or no line in it.
    """
    path = Path(path)
    check = DatasetCheck(path, max_tokens=max_tokens)
    lines = list(numbered_lines(path, limit))
    if not lines:
        raise DataError(NO_RECORDS, path=path)
    digests: defaultdict[bytes, list[str]] = defaultdict(list)
    paths: defaultdict[Path, list[str]] = defaultdict(list)
    with open_image_check_cache() as cache:
        for done, (number, text) in enumerate(lines, start=1):
            check.lines += 1
            try:
                record = parse_line(text, path=path, line=number)
            except RefusedLine as error:
                _add_refused(check, f"{path.name}:{number}", text, error)
                continue
            check.records.append(record)
            first = record.image not in paths
            paths[record.image].append(record.sample_id)
            image = _check_image(check, record, cache, deep and first)
            if image is not None and first:
                digests[image.sha256].append(record.sample_id)
            _check_objects(check, record)
            if count_tokens is not None:
                _check_length(check, record, count_tokens)
            if progress is not None:
                progress(done, len(lines))
    for kind, groups in (("in", paths), ("with the same bytes in", digests)):
        for name, records in groups.items():
            if len(records) > 1:
                detail = f"{name.name if isinstance(name, Path) else 'images'} {kind} {', '.join(records)}"
                check.add(Finding.DUPLICATE_IMAGE, records[-1], detail)
    _add_left_out(check)
    return check


def _add_refused(check: DatasetCheck, where: str, text: bytes, error: RefusedLine) -> None:
    """Add the finding for an invalid line, by its likeliest cause."""
    boxes = [box for box in _raw_boxes(text) if len(box) == 4]
    inverted = [box for box in boxes if box[2] < box[0] or box[3] < box[1]]
    fit_as_xywh = all(box[0] + box[2] <= NUM_BINS and box[1] + box[3] <= NUM_BINS for box in inverted)
    if error.fault is LineFault.INVERTED_BOX and fit_as_xywh:
        detail = (
            f"{error.reason}; {len(inverted)} of {len(boxes)} boxes of the line are, all of which fit as x, y, w, h"
        )
        check.add(Finding.XYWH_LOOKING, where, detail)
    elif error.fault is LineFault.BEYOND_BINS:
        check.add(Finding.OUT_OF_RANGE, where, error.reason)
    else:
        check.add(Finding.SCHEMA, where, error.reason)


def _raw_boxes(text: bytes) -> list[list[int]]:
    """Every list of integers under ``bbox_2d`` of a line that may be no record."""
    try:
        objects = json.loads(text)["objects"]
        boxes = [obj.get("bbox_2d") for obj in objects]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [box for box in boxes if isinstance(box, list) and all(type(value) is int for value in box)]


def _check_image(check: DatasetCheck, record: ImageRecord, cache: ImageCheckCache, deep: bool) -> CheckedImage | None:
    """The record's image; None where it cannot be read."""
    key = cache.key(record.image)
    image = cache.find(key)
    if image is None or (deep and not image.decoded):
        try:
            if not image_exists(record.image):
                check.add(Finding.MISSING_IMAGE, record.sample_id, f"no file {record.image}")
                return None
            size = open_rgb(record.image).size if deep else read_header(record.image).size
        except DataError as error:
            check.add(Finding.UNREADABLE_IMAGE, record.sample_id, str(error))
            return None
        image = CheckedImage(*size, hashlib.sha256(image_bytes(record.image)).digest(), deep)
        cache.add(key, image)
    size = image.width, image.height
    if problem := shape_problem(*size):
        check.add(Finding.EXTREME_SHAPE, record.sample_id, f"{record.image}: {problem}")
    if size != (record.width, record.height):
        check.add(Finding.SIZE_MISMATCH, record.sample_id, size_problem((record.width, record.height), size))
    return image


def _check_objects(check: DatasetCheck, record: ImageRecord) -> None:
    if not record.objects:
        check.add(Finding.EMPTY_IMAGE, record.sample_id, "no objects")
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    for index, obj in enumerate(record.objects):
        shown = f"objects[{index}] {obj.desc!r} {obj.kind} {list(obj.bins)}"
        if shape_area(obj.kind, obj.bins) == 0:
            check.add(Finding.DEGENERATE, record.sample_id, shown)
        identity = obj.desc, obj.kind, obj.bins
        if identity in seen:
            check.add(Finding.DUPLICATE_OBJECT, record.sample_id, shown)
        seen.add(identity)


def _check_length(check: DatasetCheck, record: ImageRecord, count_tokens: CountTokens) -> None:
    length = count_tokens(record)
    check.token_lengths.append(length)
    if check.max_tokens is not None and length > check.max_tokens:
        detail = f"{length} tokens of prompt and answer, global_max_length is {check.max_tokens}"
        check.add(Finding.TOO_LONG, record.sample_id, detail)


def _add_left_out(check: DatasetCheck) -> None:
    """Add what the conversion left out; only its report lists that."""
    report = check.path.with_name(f"{check.path.stem}.conversion_report.json")
    if not report.is_file():
        return
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
        reasons = content["skipped_objects"].keys() | content["skipped_images"].keys()
        problems = [problem for problem in content["problems"] if problem["reason"] in reasons]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"no conversion report: {error!r}; remove the file or convert again", path=report) from error
    for problem in problems:
        index = problem["object_index"]
        where = str(problem["file"]) if index is None else f"{problem['file']} object {index}"
        check.add(Finding.LEFT_OUT, where, f"{problem['reason']}: {problem['detail']}")


def histogram(values: Sequence[int], edges: Sequence[int]) -> dict[str, int]:
    """Counts by range, from each edge to the next; the last is open. Ranges without any value are left out."""
    counts: dict[str, int] = {}
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        inside = sum(1 for value in values if value >= low and (high is None or value < high))
        if inside:
            name = f"{low}+" if high is None else f"{low}" if high == low + 1 else f"{low}-{high - 1}"
            counts[name] = inside
    return counts


_TABLE = """CREATE TABLE IF NOT EXISTS images (
    path BLOB PRIMARY KEY, pillow TEXT, size INTEGER, mtime_ns INTEGER,
    width INTEGER, height INTEGER, sha256 BLOB, decoded INTEGER
) WITHOUT ROWID"""
Key = tuple[bytes, str, int, int]
"""An image's absolute path, Pillow's version, and size and modification time of the file or of the shard it is in."""


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """A sound image: its upright size in pixels, its file's SHA-256, and whether all of its pixels were decoded."""

    width: int
    height: int
    sha256: bytes
    decoded: bool


class ImageCheckCache:
    """Look up and store sound images. Take an image's key before you read it."""

    def __init__(self, rows: sqlite3.Connection) -> None:
        self._rows = rows
        self._pillow = version("pillow")

    def key(self, image: Path) -> Key | None:
        """The key of an image's entry; None if there is no such file."""
        try:
            seen = image_stat(os.fsencode(image))
        except (OSError, ValueError):  # the check that opens the image says why
            return None
        return os.fsencode(os.path.abspath(image)), self._pillow, seen.st_size, seen.st_mtime_ns

    def find(self, key: Key | None) -> CheckedImage | None:
        """The entry of this key."""
        if key is None:
            return None
        unchanged = "path = ? AND pillow = ? AND size = ? AND mtime_ns = ?"
        found = self._rows.execute(f"SELECT width, height, sha256, decoded FROM images WHERE {unchanged}", key)
        row = found.fetchone()
        return None if row is None else CheckedImage(row[0], row[1], row[2], bool(row[3]))

    def add(self, key: Key | None, image: CheckedImage) -> None:
        """Store an entry; it replaces an older one of the same path."""
        if key is not None:
            self._rows.execute("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*key, *astuple(image)))


@contextmanager
def open_image_check_cache() -> Iterator[ImageCheckCache]:
    """The user's own store, which several checks may use at once.

    Raises:
        DataError: it cannot be read or written.
    """
    path = cache_folder() / "checked_images.sqlite"
    try:
        # Each entry is stored at once; without waiting for the disk that takes microseconds.
        with closing(sqlite3.connect(path, timeout=30.0, isolation_level=None)) as rows:
            rows.execute("PRAGMA journal_mode = TRUNCATE")
            rows.execute("PRAGMA synchronous = OFF")
            rows.execute(_TABLE)
            yield ImageCheckCache(rows)
    except sqlite3.Error as error:
        raise DataError(f"cannot be used ({error}); delete the file and start again", path=path) from error
