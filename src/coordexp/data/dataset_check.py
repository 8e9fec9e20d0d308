"""Contents and problems of a dataset. Every line is checked, even if others are broken."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from coordexp.data.find_images import REPORT_SUFFIX
from coordexp.data.images import (
    image_bytes,
    image_exists,
    image_num_bytes,
    open_rgb,
    read_header,
    shape_problem,
    size_problem,
)
from coordexp.data.jsonl import NO_RECORDS, RefusedLine, numbered_lines, parse_line
from coordexp.data.polygons import shape_area
from coordexp.data.preparation import resize_rule_of
from coordexp.errors import DataError
from coordexp.geometry import pixel_box
from coordexp.records import GTObject, ImageRecord

_ICON = 100  # pixels of the longer side
_FIRST_PIXEL = 1.7  # in pixels: a share of 1, and half a bin of a large photo
DENSITY_EDGES = (0, 1, 2, 3, 5, 10, 20, 50, 100)


class Finding(StrEnum):
    """Kinds of findings. Training refuses a dataset with errors; the others are warnings."""

    # errors
    SCHEMA = "schema"  # an invalid line
    XYWH_LOOKING = "xywh_looking"  # an inverted box that is valid as x, y, width, height
    OUT_OF_RANGE = "out_of_range"  # values beyond 0..999: pixels, most often
    MISSING_IMAGE = "missing_image"
    UNREADABLE_IMAGE = "unreadable_image"
    SIZE_MISMATCH = "size_mismatch"
    EXTREME_SHAPE = "extreme_shape"  # more than 200 times as long as wide, which vision processors refuse
    TOO_LONG = "too_long"  # prompt and answer exceed global_max_length
    ROUND_TRIP = "round_trip"  # objects → text → tokens → objects gives others
    NO_OBJECTS = "no_objects"  # in the whole dataset
    SHARES_LOOKING = "shares_looking"  # all objects are in the first pixel: shares that were read as pixels
    # worth a look
    SUBPIXEL = "subpixel"  # smaller than a pixel of the image
    DEGENERATE = "degenerate"  # a shape without area on the norm1000 grid
    DUPLICATE_OBJECT = "duplicate_object"  # same description and shape twice in an image
    DUPLICATE_IMAGE = "duplicate_image"  # one image file in several records, or the same bytes in several files
    EMPTY_IMAGE = "empty_image"
    SPELLING = "spelling"  # classes that differ in case, spaces, hyphens or underscores only
    LEFT_OUT = "left_out"  # by the conversion, according to its report


ERRORS = frozenset({
    Finding.SCHEMA, Finding.XYWH_LOOKING, Finding.OUT_OF_RANGE, Finding.MISSING_IMAGE, Finding.UNREADABLE_IMAGE,
    Finding.SIZE_MISMATCH, Finding.EXTREME_SHAPE, Finding.TOO_LONG, Finding.ROUND_TRIP,
    Finding.NO_OBJECTS, Finding.SHARES_LOOKING,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding and its place: ``file.jsonl:line``, or what the conversion's report names."""

    finding: Finding
    where: str
    detail: str


@dataclass
class DatasetCheck:
    """All findings, and the valid records."""

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

    def to_json(self) -> dict[str, Any]:
        lengths = sorted(self.token_lengths)
        objects = [obj for record in self.records for obj in record.objects]
        return {
            "path": str(self.path),
            "lines": self.lines,
            "images": len(self.records),
            "objects": len(objects),
            "soft_objects": sum(obj.soft is not None for obj in objects),
            "errors": self.errors,
            "findings": {finding.value: count for finding, count in sorted(self.counts().items())},
            "classes": dict(Counter(obj.desc for obj in objects).most_common()),
            "kinds": dict(Counter(obj.kind for obj in objects)),
            "density": histogram([len(record.objects) for record in self.records], DENSITY_EDGES),
            "tokens": None if not lengths else {
                "min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1], "limit": self.max_tokens,
            },
            "found": [asdict(problem) for problem in self.problems],
        }  # fmt: skip


def check_jsonl(
    path: str | Path,
    *,
    limit: int | None = None,
    count_tokens: Callable[[ImageRecord], int] | None = None,
    max_tokens: int | None = None,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetCheck:
    """Check a dataset line by line.

    Args:
        limit: check the first ``limit`` lines only.
        deep: decode every image too, instead of reading its header alone.
        count_tokens: tokens of a record's prompt and answer; with it, those above ``max_tokens`` are found. Not called
            for a shape that processors refuse.

    Raises:
        DataError: no such file, or no line in it.
    """
    path = Path(path)
    check = DatasetCheck(path, max_tokens=max_tokens)
    lines = list(numbered_lines(path, limit))
    if not lines:
        raise DataError(NO_RECORDS, path=path)
    samples_of: defaultdict[Path, list[str]] = defaultdict(list)
    alike: defaultdict[tuple[int, ...], list[Path]] = defaultdict(list)  # images whose files may have the same bytes
    for done, (number, text) in enumerate(lines, start=1):
        check.lines += 1
        try:
            record = parse_line(text, path=path, line=number)
        except RefusedLine as error:
            check.add(Finding(error.fault), f"{path.name}:{number}", error.reason)
            continue
        check.records.append(record)
        first = record.image not in samples_of
        samples_of[record.image].append(record.sample_id)
        size = _check_image(check, record, deep and first)
        if size is not None and first:
            alike[image_num_bytes(record.image), *size].append(record.image)
        try:
            resize_rule_of(record)
        except DataError as error:
            check.add(Finding.SCHEMA, record.sample_id, str(error))
        if not record.objects:
            check.add(Finding.EMPTY_IMAGE, record.sample_id, "no objects")
        _add_objects(check, record)
        if count_tokens is not None and shape_problem(record.width, record.height) is None:
            length = count_tokens(record)
            check.token_lengths.append(length)
            if max_tokens is not None and length > max_tokens:
                detail = f"{length} tokens of prompt and answer, global_max_length is {max_tokens}"
                check.add(Finding.TOO_LONG, record.sample_id, detail)
        if progress is not None:
            progress(done, len(lines))
    _add_duplicates(check, samples_of, alike)
    if limit is None and check.records and not any(record.objects for record in check.records):
        check.add(Finding.NO_OBJECTS, path.name, f"no object in {len(check.records)} images")
    elif (problem := shares_problem(check.records)) is not None:
        check.add(Finding.SHARES_LOOKING, path.name, problem)
    _compare_spellings(check)
    _add_left_out(check)
    return check


def objects_problem(records: Iterable[ImageRecord]) -> str | None:
    """Why training refuses the objects of a dataset as a whole; None if it does not."""
    return shares_problem(records) if any(record.objects for record in records) else "no image has an object"


def shares_problem(records: Iterable[ImageRecord]) -> str | None:
    """A sentence if all objects are within the first pixel of their image, as shares are that were read as pixels.
    Reads up to the first object that is not."""
    count, has_subpixel = 0, False
    for record in records:
        for obj in record.objects:
            _, _, x2, y2 = pixel_box(obj, record.width, record.height)
            # On an icon, a pixel may be the size of an object.
            if max(x2, y2) > _FIRST_PIXEL or max(record.width, record.height) < _ICON:
                return None
            count += 1
            has_subpixel |= _is_subpixel(obj, record)
    if not has_subpixel:
        return None
    return f"all {count} objects are within the first pixel of their image, as shares are that were read as pixels"


def _is_subpixel(obj: GTObject, record: ImageRecord) -> bool:
    x1, y1, x2, y2 = pixel_box(obj, record.width, record.height)
    return shape_area(obj.kind, obj.bins) > 0 and max(x2 - x1, y2 - y1) < 1


def _add_objects(check: DatasetCheck, record: ImageRecord) -> None:
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    for index, obj in enumerate(record.objects):
        shown = f"objects[{index}] {obj.desc!r} {obj.kind} {list(obj.bins)}"
        if shape_area(obj.kind, obj.bins) == 0:
            check.add(Finding.DEGENERATE, record.sample_id, shown)
        elif _is_subpixel(obj, record):
            x1, y1, x2, y2 = pixel_box(obj, record.width, record.height)
            size = f"{x2 - x1:.2g}x{y2 - y1:.2g} pixels of {record.width}x{record.height}"
            check.add(Finding.SUBPIXEL, record.sample_id, f"{shown}: {size}")
        identity = obj.desc, obj.kind, obj.bins
        if identity in seen:
            check.add(Finding.DUPLICATE_OBJECT, record.sample_id, shown)
        seen.add(identity)


def _add_duplicates(
    check: DatasetCheck, samples_of: Mapping[Path, list[str]], alike: Mapping[tuple[int, ...], list[Path]]
) -> None:
    by_content: defaultdict[bytes, list[str]] = defaultdict(list)
    for image in (image for images in alike.values() if len(images) > 1 for image in images):
        by_content[hashlib.sha256(image_bytes(image)).digest()].append(samples_of[image][0])
    found = [(f"{image.name} in", samples) for image, samples in samples_of.items()]
    found += [("images with the same bytes in", samples) for samples in by_content.values()]
    for what, samples in found:
        if len(samples) > 1:
            check.add(Finding.DUPLICATE_IMAGE, samples[-1], f"{what} {', '.join(samples)}")


def _add_left_out(check: DatasetCheck) -> None:
    report = check.path.with_name(f"{check.path.stem}{REPORT_SUFFIX}")
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


def _compare_spellings(check: DatasetCheck) -> None:
    counts = Counter(obj.desc for record in check.records for obj in record.objects)
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for desc, _ in counts.most_common():
        alike["".join(char for char in desc.casefold() if char not in " -_")].append(desc)
    for descs in alike.values():
        if len(descs) > 1:
            shown = ", ".join(f"{desc!r} ({counts[desc]})" for desc in descs)
            check.add(Finding.SPELLING, check.path.name, f"{shown} are different classes to the model")


def _check_image(check: DatasetCheck, record: ImageRecord, deep: bool) -> tuple[int, int] | None:
    # Returns the image's size; None if it cannot be read.
    image, sample = record.image, record.sample_id
    try:
        if not image_exists(image):
            check.add(Finding.MISSING_IMAGE, sample, f"no file {image}")
            return None
        size = open_rgb(image).size if deep else read_header(image).size
    except DataError as error:
        check.add(Finding.UNREADABLE_IMAGE, sample, str(error))
        return None
    if problem := shape_problem(*size):
        check.add(Finding.EXTREME_SHAPE, sample, f"{image}: {problem}")
    if size != (record.width, record.height):
        check.add(Finding.SIZE_MISMATCH, sample, size_problem((record.width, record.height), size))
    return size


def histogram(values: Sequence[int], edges: Sequence[int]) -> dict[str, int]:
    """Counts by range, from each edge to the next; the last is open. Ranges without any value are left out."""
    counts: dict[str, int] = {}
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        inside = sum(1 for value in values if value >= low and (high is None or value < high))
        if inside:
            name = f"{low}+" if high is None else f"{low}" if high == low + 1 else f"{low}-{high - 1}"
            counts[name] = inside
    return counts
