"""The JSONL dataset: one line of strict JSON per image ↔ :class:`ImageRecord`, read, checked and written. Torch-free.

    {"images": ["a.jpg"], "width": 640, "height": 480,
     "objects": [{"desc": "red cup", "bbox_2d": [10, 20, 300, 400]},
                 {"desc": "leaf", "poly": [10, 10, 90, 12, "<|coord_50|>", "<|coord_80|>"], "soft": 0.8}],
     "metadata": {"any": "thing"}}

Coordinates are norm1000 bins (0..999), as integers or coordinate tokens. ``soft`` marks an object without an
annotation; see :class:`~coordexp.records.GTObject`. Lines are not repaired: a line is valid or refused.
"""

from __future__ import annotations

import json
import os
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

from coordexp.coords import COORD_TOKENS
from coordexp.data.files import whole_file
from coordexp.data.images import read_header, shape_problem, size_problem
from coordexp.errors import DataError
from coordexp.printable import has_half_characters
from coordexp.reading import LFS_POINTER, is_lfs_pointer, open_file
from coordexp.records import (
    BIN_RULE,
    GEOMETRY_KINDS,
    NUM_BINS,
    GeometryKind,
    GTObject,
    ImageRecord,
    check_bin_rule,
)

ObjectOrdering = Literal["sorted", "sorted_x", "random", "file"]
Fault = Literal["schema", "xywh_looking", "out_of_range"]  # as ``data check`` names them

MAX_PROBLEMS_SHOWN = 20
NO_RECORDS = "the file has no records; expected one JSON object per line"
_REQUIRED_FIELDS = ("images", "width", "height", "objects")
_RECORD_FIELDS = (*_REQUIRED_FIELDS, "metadata")
_OBJECT_FIELDS = ("desc", *GEOMETRY_KINDS, "soft")
_BIN_OF_TOKEN = {token: k for k, token in enumerate(COORD_TOKENS)}
_CONTROL_LIKE = re.compile(r"<\|.*?\|>", re.DOTALL)
# Cc control, Cs lone surrogate (cannot be encoded), Zl/Zp line and paragraph separators: an answer is one line of text.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cs", "Zl", "Zp"})
_NORM1000_HINT = "values are norm1000 integers 0..999, not pixels: round(999 * x / width)"


class RefusedLine(DataError):
    """An invalid line."""

    fault: Fault = "schema"


class _BadText(ValueError):
    """Like RefusedLine, before file and line number are known."""

    def __init__(self, reason: str, fault: Fault = "schema") -> None:
        super().__init__(reason)
        self.fault: Fault = fault


def parse_line(text: str | bytes, *, path: Path, line: int) -> ImageRecord:
    """The record in one line of the dataset at ``path``. Relative images start at its folder; ``line`` counts from 1.
    Raises RefusedLine, with ``path:line`` and the object's 0-based index."""
    fault: Fault = "schema"
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        if decoded.startswith("\ufeff"):
            raise _BadText("the file starts with a byte order mark; save it as UTF-8 without BOM")
        return _record(_DECODER.decode(decoded), path, line)
    except _BadText as problem:
        reason, fault = str(problem), problem.fault
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start + 1} of the line; save the file as UTF-8"
    except json.JSONDecodeError as error:
        reason = f"broken JSON: {error.msg} at column {error.pos + 1}; each line must be one complete JSON object"
    except (RecursionError, ValueError) as error:  # nested too deeply, or an integer of thousands of digits
        reason = f"unreadable JSON: {error}"
    refused = RefusedLine(reason, path=path, line=line)
    refused.fault = fault
    raise refused


def clean_desc(desc: Any) -> str:
    """A description as the model should write it: stripped, NFC. Raises ValueError for what it must not write."""
    if not isinstance(desc, str):
        raise _BadText(f"desc must be a string, got {_show(desc)}")
    return _clean_text(desc)


@lru_cache(maxsize=1 << 14)  # a class name occurs in thousands of lines
def _clean_text(desc: str) -> str:
    text = unicodedata.normalize("NFC", desc).strip()
    if not text:
        raise _BadText("desc is empty; every object needs a description, e.g. its class name")
    bad = [char for char in text if unicodedata.category(char) in _REFUSED_CATEGORIES]
    if bad:
        raise _BadText(f"desc {desc!r} contains the control character U+{ord(bad[0]):04X}; remove it")
    token = _CONTROL_LIKE.search(text)
    if token:
        raise _BadText(
            f"desc contains {token.group()!r}, which the tokenizer would read as a control token; "
            "remove it (coordinates belong in bbox_2d or poly)"
        )
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _BadText(f"duplicate key {twice!r} in one JSON object; keep one of them")
    return mapping


def _no_constant(name: str) -> NoReturn:
    raise _BadText(f"broken JSON: {name} is not a JSON value; use a finite number or null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)


def _record(line: Any, path: Path, number: int) -> ImageRecord:
    if not isinstance(line, dict):
        raise _BadText(f"expected a JSON object with {', '.join(_REQUIRED_FIELDS)}; got {_show(line)}")
    _check_fields(line, _RECORD_FIELDS)
    missing = [name for name in _REQUIRED_FIELDS if name not in line]
    if missing:
        raise _BadText(f"missing {', '.join(missing)}; required are {', '.join(_REQUIRED_FIELDS)} (objects may be [])")
    for name in ("width", "height"):
        if type(line[name]) is not int or not 1 <= line[name] < 1 << 31:
            expected = "a positive integer of at most 31 bits, the image's size in pixels"
            raise _BadText(f"{name} must be {expected}; got {_show(line[name])}")
    metadata = line.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _BadText(f"metadata must be a JSON object; got {_show(metadata)}")
    try:
        check_bin_rule(metadata.get(BIN_RULE))
    except DataError as error:
        raise _BadText(f"metadata.{error}") from error
    if not isinstance(line["objects"], list):
        raise _BadText(f"objects must be a list, [] for an empty image; got {_show(line['objects'])}")
    images = line["images"]
    if not isinstance(images, list) or len(images) != 1 or not isinstance(images[0], str) or not images[0].strip():
        raise _BadText(
            'images must be a list of exactly one path, relative to the JSONL\'s folder, e.g. ["images/a.jpg"]; '
            f"got {_show(images)}"
        )
    if "\0" in images[0]:
        raise _BadText(f"images has a path with a NUL character: {_show(images[0])}")
    if not images[0].isascii() and has_half_characters(images[0]):
        raise _BadText(f"images has a path with half a character (a lone surrogate): {_show(images[0])}; rename it")
    return ImageRecord(
        sample_id=f"{path.name}:{number}",
        image=Path(os.path.abspath(os.path.join(os.path.dirname(path), images[0]))),
        width=line["width"],
        height=line["height"],
        objects=tuple([_object(index, value) for index, value in enumerate(line["objects"])]),
        metadata=metadata,
    )


def _object(index: int, value: Any) -> GTObject:
    try:
        if not isinstance(value, dict):
            raise _BadText(
                f"expected a JSON object with desc and one of {' or '.join(GEOMETRY_KINDS)}; got {_show(value)}"
            )
        _check_fields(value, _OBJECT_FIELDS)
        if "desc" not in value:
            raise _BadText("missing desc; every object needs a description, e.g. its class name")
        desc = clean_desc(value["desc"])
        kinds: list[GeometryKind] = [kind for kind in GEOMETRY_KINDS if kind in value]
        if len(kinds) != 1:
            given = "both" if kinds else "neither"
            raise _BadText(f"needs exactly one of {' or '.join(GEOMETRY_KINDS)}; found {given}")
        bins = _bins(kinds[0], value[kinds[0]])
        if "soft" not in value:
            return GTObject(desc, kinds[0], bins)
        soft = value["soft"]
        if type(soft) not in (int, float) or not 0 < soft <= 1:
            raise _BadText(
                "soft must be a number above 0 and at most 1, the weight of an object that a model found; "
                f"leave it out for an annotated object; got {_show(soft)}"
            )
        return GTObject(desc, kinds[0], bins, float(soft))
    except _BadText as problem:
        raise _BadText(f"objects[{index}]: {problem}", problem.fault) from None


def _bins(kind: GeometryKind, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise _BadText(f"{kind} must be a flat list of coordinates; got {_show(values)}")
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) < NUM_BINS:
        bins = tuple(values)
    else:
        bins = tuple([_bin(kind, index, value) for index, value in enumerate(values)])
    if kind == "poly":
        if len(bins) < 6 or len(bins) % 2:
            raise _BadText(f"poly has {len(bins)} values; expected x, y of at least 3 points: an even number >= 6")
        return bins
    if len(bins) != 4:
        raise _BadText(f"bbox_2d has {len(bins)} values; expected 4: [x1, y1, x2, y2]")
    x1, y1, x2, y2 = bins
    if x2 < x1 or y2 < y1:
        raise _BadText(
            f"bbox_2d {list(bins)} is inverted; expected [x1, y1, x2, y2] with x1 <= x2 and y1 <= y2 "
            "(is it [x, y, width, height]? then write x + width, y + height)",
            "xywh_looking" if x1 + x2 <= NUM_BINS and y1 + y2 <= NUM_BINS else "schema",
        )
    return bins


def _bin(kind: str, index: int, value: Any) -> int:
    if type(value) is int and 0 <= value < NUM_BINS:
        return value
    if isinstance(value, str):
        if value in _BIN_OF_TOKEN:
            return _BIN_OF_TOKEN[value]
        raise _BadText(
            f"{kind}[{index}] is {_show(value)}; expected an integer 0..999 or {COORD_TOKENS[0]} .. {COORD_TOKENS[-1]}"
        )
    if isinstance(value, list):
        raise _BadText(f"{kind}[{index}] is a list; expected a flat list x, y, x, y, … without inner brackets")
    raise _BadText(f"{kind}[{index}] is {_show(value)}; {_NORM1000_HINT}", "out_of_range")


def _check_fields(mapping: Mapping[str, Any], valid: Sequence[str]) -> None:
    for name in mapping:
        if name not in valid:
            raise _BadText(f"unknown field {name!r}; valid fields: {', '.join(valid)}")


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def write_jsonl(records: Iterable[ImageRecord], path: str | Path) -> int:
    """Write ``records`` to ``path``, images relative to its folder; return the number of lines. The file appears
    complete, or a previous one stays. Raises DataError for a record that the reader would refuse, or metadata that JSON
    cannot hold."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with whole_file(path) as file:
        for count, record in enumerate(records, start=1):
            file.write(line_of(record, path, count))
    return count


def line_of(record: ImageRecord, path: Path, number: int) -> str:
    """A record as line ``number`` of the JSONL ``path``, its end included. Raises DataError as :func:`write_jsonl`."""
    image = Path(os.path.relpath(record.image, os.path.abspath(path.parent))).as_posix()
    fields: dict[str, Any] = {
        "images": [image],
        "width": record.width,
        "height": record.height,
        "objects": [
            {"desc": obj.desc, obj.kind: list(obj.bins), **({} if obj.soft is None else {"soft": obj.soft})}
            for obj in record.objects
        ],
    }
    if record.metadata:
        fields["metadata"] = dict(record.metadata)
    try:
        text = json.dumps(fields, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot write {record.sample_id}: {error}", path=path, line=number) from error
    parse_line(text, path=path, line=number)
    return text + "\n"


def read_jsonl(path: str | Path, *, limit: int | None = None, check_images: bool = False) -> list[ImageRecord]:
    """Read a dataset, or its first ``limit`` (>= 1) records. ``check_images``: as :func:`check_dataset`. Raises
    DataError for no file, no records, or bad lines: one error with all of them (the first 20 spelled out)."""
    path = Path(path)
    records: list[ImageRecord] = []
    problems: list[DataError] = []
    for number, text in numbered_lines(path, limit):
        try:
            record = parse_line(text, path=path, line=number)
            if check_images and (problem := image_problem(record.image, (record.width, record.height))) is not None:
                raise DataError(problem, path=path, line=number)
            records.append(record)
        except DataError as error:
            problems.append(error)
    raise_together(problems, path)
    if not records:
        raise DataError(NO_RECORDS, path=path)
    return records


def check_dataset(records: Iterable[ImageRecord]) -> None:
    """Raise one DataError unless every image exists, opens, and has its record's size. Reads headers only."""
    raise_together(image_problems(records), None)


def order_objects(
    objects: Sequence[GTObject], ordering: ObjectOrdering, rng: random.Random | None = None
) -> tuple[GTObject, ...]:
    """The order in which the answer lists its objects: ``sorted`` by (min y, min x) of each shape, ``sorted_x`` by
    (min x, min y), both with ties in file order; ``random`` by ``rng``, or ``file`` order."""
    if ordering == "file":
        return tuple(objects)
    if ordering == "sorted":
        return tuple(sorted(objects, key=lambda obj: (min(obj.bins[1::2]), min(obj.bins[0::2]))))
    if ordering == "sorted_x":
        return tuple(sorted(objects, key=lambda obj: (min(obj.bins[0::2]), min(obj.bins[1::2]))))
    if ordering != "random":
        raise DataError(f"object ordering {ordering!r} is unknown; use sorted, sorted_x, random or file")
    if rng is None:
        raise DataError("object ordering 'random' needs a random.Random; pass rng so that runs can be repeated")
    return tuple(rng.sample(list(objects), len(objects)))


def numbered_lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, each with its number from 1. Raises DataError for no file or a limit below 1."""
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; expected at least 1 record, or no limit", path=path)
    if not path.exists():
        raise DataError("dataset file not found; check the path", path=path)
    if is_lfs_pointer(path):
        raise DataError(f"is {LFS_POINTER}", path=path)
    # Bytes, split at \n only: str.splitlines would also cut at U+2028 inside a string.
    with open_file(path) as lines:
        yield from islice(((number, text) for number, text in enumerate(lines, start=1) if text.strip()), limit)


def image_problem(image: Path, declared: tuple[int, int]) -> str | None:
    """Why a record's image cannot be used; None if it can. ``declared``: the record's (width, height)."""
    try:
        size = read_header(image).size
    except DataError as error:
        return str(error)
    if problem := shape_problem(*size):
        return f"{image}: {problem}"
    return None if size == declared else f"{image}: {size_problem(declared, size)}"


def image_problems(records: Iterable[ImageRecord]) -> list[DataError]:
    problems = ((record, image_problem(record.image, (record.width, record.height))) for record in records)
    return [DataError(f"{record.sample_id}: {text}") for record, text in problems if text is not None]


def raise_together(problems: Sequence[DataError], path: Path | None) -> None:
    """Raise all problems as one DataError, with the text of the first 20. Does nothing if there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    shown = [f"  {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        shown.append(f"  … and {len(problems) - MAX_PROBLEMS_SHOWN} more")
    raise DataError("\n".join([f"{len(problems)} problems", *shown]), path=path)
