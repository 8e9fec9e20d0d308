"""A dataset file: one line of :mod:`coordexp.data.record_line` per image. Torch-free."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from coordexp.data.images import read_header, shape_problem, size_problem
from coordexp.data.record_line import parse_line
from coordexp.errors import DataError
from coordexp.records import GTObject, ImageRecord

ObjectOrdering = Literal["sorted", "random", "file"]

MAX_PROBLEMS_SHOWN = 20
NO_RECORDS = "the file holds no records; expected one JSON object per line"


def read_jsonl(path: str | Path, *, limit: int | None = None, check_images: bool = False) -> list[ImageRecord]:
    """Read a dataset whole.

    Args:
        limit: read only the first ``limit`` records (>= 1).
        check_images: also open every image's header and compare its upright size with the record's.

    Raises:
        DataError: no such file, no records, or bad lines: one error with all of them (the first 20 spelled out).
    """
    path = Path(path)
    records: list[ImageRecord] = []
    problems: list[DataError] = []
    for number, text in numbered_lines(path, limit):
        try:
            records.append(parse_line(text, path=path, line=number))
        except DataError as error:
            problems.append(error)
    if check_images:
        problems += image_problems(records, path)
    raise_together(sorted(problems, key=lambda problem: problem.line or 0), path)
    if not records:
        raise DataError(NO_RECORDS, path=path)
    return records


def check_dataset(records: Iterable[ImageRecord]) -> None:
    """Check that every image exists, opens, and has its record's size. Reads headers only.

    Raises:
        DataError: one error with all problems (the first 20 spelled out), each naming its record.
    """
    raise_together(image_problems(records), None)


def order_objects(
    objects: Sequence[GTObject], ordering: ObjectOrdering, rng: random.Random | None = None
) -> tuple[GTObject, ...]:
    """The order in which the answer lists its objects: ``sorted`` by (min y, min x) of each shape with ties in file
    order, ``random`` by ``rng``, or ``file`` order."""
    if ordering == "file":
        return tuple(objects)
    if ordering == "sorted":
        return tuple(sorted(objects, key=lambda obj: (min(obj.bins[1::2]), min(obj.bins[0::2]))))
    if ordering != "random":
        raise DataError(f"object ordering {ordering!r} is unknown; use sorted, random or file")
    if rng is None:
        raise DataError("object ordering 'random' needs a random.Random; pass rng so that runs can be repeated")
    return tuple(rng.sample(list(objects), len(objects)))


def numbered_lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, each with its number from 1.

    Raises:
        DataError: no such file, or a limit below 1.
    """
    check_source(path, limit)
    taken = 0
    # Bytes, split at \n only: str.splitlines would also cut at U+2028 inside a string.
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if text.strip() and (limit is None or taken < limit):
                taken += 1
                yield number, text
            elif taken == limit:
                return


def check_source(path: Path, limit: int | None) -> None:
    """Raise DataError if there is no such file or the limit is below 1."""
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; expected at least 1 record, or no limit", path=path)
    if not path.is_file():
        raise DataError("dataset file not found; check the path", path=path)


def image_problem(image: Path, declared: tuple[int, int]) -> str | None:
    """Why a record's image cannot be shown to a model; None if it can. Reads its header only. ``declared``: the
    record's (width, height)."""
    try:
        size = read_header(image).size
    except DataError as error:
        return str(error)
    if problem := shape_problem(*size):
        return f"{image}: {problem}"
    return None if size == declared else f"{image}: {size_problem(declared, size)}"


def image_problems(records: Iterable[ImageRecord], path: Path | None = None) -> list[DataError]:
    """The problems of the records' images, each named by its record, or by its line of ``path``."""
    problems: list[DataError] = []
    for record in records:
        text = image_problem(record.image, (record.width, record.height))
        if text is None:
            continue
        if path is None:
            problems.append(DataError(f"{record.sample_id}: {text}"))
        else:
            problems.append(DataError(text, path=path, line=int(record.sample_id.rpartition(":")[2])))
    return problems


def raise_together(problems: Sequence[DataError], path: Path | None) -> None:
    """Raise all problems as one DataError, the first 20 spelled out; nothing where there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    shown = [f"  {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        shown.append(f"  … and {len(problems) - MAX_PROBLEMS_SHOWN} more")
    raise DataError("\n".join([f"{len(problems)} problems", *shown]), path=path, line=None)
