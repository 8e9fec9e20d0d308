"""A dataset as training opens it: validated once, then mapped into memory, whatever its size.

A dataset of some megabytes is read and checked at every start, by every process. A larger one is validated by one
process with all its cores; the result lies in :func:`~coordexp.data.cache_folder.cache_folder`, a folder per dataset:

    entry-whole.json       of which content (sha256, size, time of change) and by which validator; names the other two
    records-….arrow        the records, mapped into memory by every process
    images-….npy           size and time of change of every image that was right

Errors are those of :func:`~coordexp.data.jsonl.read_jsonl` and :func:`~coordexp.data.jsonl.check_dataset`, word for
word.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from coordexp.data.arrow_records import ArrowRecords
from coordexp.data.cache_folder import VARIABLE, SharedWork, cache_folder
from coordexp.data.files import write_atomically
from coordexp.data.jsonl import check_source, image_problems, raise_together, read_jsonl
from coordexp.data.line_validation import Unkeepable, end_of_lines, validate_lines
from coordexp.data.record_line import LineFault, RefusedLine
from coordexp.data.seen_images import check_states
from coordexp.errors import DataError
from coordexp.records import ImageRecord

logger = logging.getLogger("coordexp")

KEPT_FROM_BYTES = 4 << 20
"""Smaller datasets are read plainly: about a second's work."""
_SHOWN_AFTER_S = 2.0  # what is over sooner shows no progress
_VALIDATOR = ("errors", "records", "data.record_line", "data.quick_lines", "data.arrow_records", "data.line_validation")
_HEADERS = ("data.images", "data.jpeg_size", "data.jsonl", "data.seen_images", "data.file_states")


@dataclass(frozen=True, slots=True)
class _Entry:
    """What lies in the cache for a file, or for its first lines."""

    validator: str
    headers: str
    digest: str
    size: int
    mtime_ns: int

    def records(self, part: str) -> str:
        return f"records-{part}-{self.digest[:16]}-{self.validator}.arrow"

    def states(self, part: str) -> str:
        return f"images-{part}-{self.digest[:16]}-{self.headers}.npy"


def open_records(
    path: str | Path, *, limit: int | None = None, wait_s: float = 1800.0, kept_from: int | None = None
) -> Sequence[ImageRecord]:
    """The records of a dataset, or its first ``limit`` (>= 1), in the order of its lines.

    Of several processes that want the same dataset one validates it; the others wait for at most ``wait_s`` seconds.
    Problems of images are not raised here, but by :func:`check_images`.

    Args:
        kept_from: from how many bytes on the result is kept; None for :data:`KEPT_FROM_BYTES`.

    Raises:
        DataError: as :func:`~coordexp.data.jsonl.read_jsonl`; or the wait was too long, or the cache cannot be used.
    """
    path = Path(path)
    check_source(path, limit)
    end = end_of_lines(path, limit)
    if end < (KEPT_FROM_BYTES if kept_from is None else kept_from):
        return read_jsonl(path, limit=limit)
    try:
        return _Kept(path, limit, end).open(wait_s)
    except Unkeepable as reason:
        logger.warning(
            "%s is read anew by every process at every start: it holds what cannot be kept, %s", path, reason
        )
        return read_jsonl(path, limit=limit)
    except OSError as error:
        place = error.filename or cache_folder()
        raise DataError(
            f"the validated dataset {path} cannot be kept ({error.strerror or error}); free space, or name another "
            f"folder with {VARIABLE}",
            path=place,
        ) from error


def check_images(*datasets: Sequence[ImageRecord]) -> None:
    """Check that every image exists, opens, and has its record's size: what :func:`open_records` found of the datasets
    that it kept, and the headers of the others' images.

    Raises:
        DataError: one error with all problems (the first 20 spelled out), each naming its record.
    """
    problems: list[DataError] = []
    for records in datasets:
        kept = isinstance(records, ArrowRecords)
        problems += [DataError(text) for text in records.problems] if kept else image_problems(records)
    raise_together(problems, None)


class _Kept:
    """A dataset file, or its first ``limit`` lines up to byte ``end``, and its folder of the cache."""

    def __init__(self, path: Path, limit: int | None, end: int) -> None:
        self._path = path
        self._end = end
        self._limit = None if end >= path.stat().st_size else limit
        place = os.fsencode(os.path.abspath(path))
        slug = re.sub(r"[^A-Za-z0-9._-]", "_", path.name)[:60]
        self._folder = cache_folder() / "datasets" / f"{slug}-{hashlib.sha256(place).hexdigest()[:16]}"
        self._folder.mkdir(parents=True, exist_ok=True)

    def open(self, wait_s: float) -> ArrowRecords:
        """Take over what another process found meanwhile, or look."""
        work = SharedWork(self._folder)
        with work.turn(wait_s) as outcome:
            if outcome is None or outcome["limit"] != self._limit:
                outcome = {"limit": self._limit, "refused": [], "problems": [], "unkeepable": None} | self._look()
                work.leave(outcome)
        if outcome["unkeepable"] is not None:
            raise Unkeepable(outcome["unkeepable"])
        refused = [
            RefusedLine(reason, LineFault(fault), path=self._path, line=n) for n, reason, fault in outcome["refused"]
        ]
        raise_together(refused, self._path)
        return ArrowRecords(self._folder / outcome["file"], self._path.name, self._limit, outcome["problems"])

    def _look(self) -> dict[str, Any]:
        """What is wrong with the dataset, or where its records lie; its images looked at."""
        for part in dict.fromkeys(("whole", self._part())):
            entry = self._fresh(part)
            if entry is not None:
                break
        else:
            part, entry = self._part(), self._entry()
            with _telling(f"validating {self._path.name}") as progress:
                try:
                    refused = validate_lines(self._path, self._end, self._folder / entry.records(part), progress)
                except Unkeepable as reason:
                    return {"unkeepable": str(reason)}
            if refused:
                return {"refused": [[one.line, one.reason, one.fault.value] for one in refused]}
            if (entry.size, entry.mtime_ns) != self._stat():
                raise DataError("changed while it was read; start again", path=self._path)
        self._remember(part, entry)
        file = self._folder / entry.records(part)
        records = ArrowRecords(file, self._path.name, self._limit)
        with _telling(f"checking the images of {self._path.name}") as progress:
            problems = check_states(records, self._folder / entry.states(part), progress)
        return {"file": file.name, "problems": problems}

    def _part(self) -> str:
        return "whole" if self._limit is None else f"first-{self._limit}"

    def _fresh(self, part: str) -> _Entry | None:
        """What is kept, if it is of the file as it is now."""
        try:
            kept = _Entry(**json.loads((self._folder / f"entry-{part}.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, TypeError):  # nothing, or an entry of other fields, by another version
            return None
        if kept.validator != _version_of(_VALIDATOR) or not (self._folder / kept.records(part)).is_file():
            return None
        if (kept.size, kept.mtime_ns) == self._stat():
            return replace(kept, headers=_version_of(_HEADERS))
        now = self._entry()
        return now if now.digest == kept.digest else None

    def _entry(self) -> _Entry:
        size, mtime_ns = self._stat()
        with self._path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _Entry(_version_of(_VALIDATOR), _version_of(_HEADERS), digest, size, mtime_ns)

    def _stat(self) -> tuple[int, int]:
        seen = self._path.stat()
        return seen.st_size, seen.st_mtime_ns

    def _remember(self, part: str, entry: _Entry) -> None:
        """Name the entry's files, and remove those of an earlier content; who has mapped them keeps them."""
        file = self._folder / f"entry-{part}.json"
        text = json.dumps(asdict(entry))
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            return
        write_atomically(file, text)
        kept = {entry.records(part), entry.states(part)}
        for old in [*self._folder.glob(f"records-{part}-*.arrow"), *self._folder.glob(f"images-{part}-*.npy")]:
            if old.name not in kept:
                old.unlink(missing_ok=True)


@contextmanager
def _telling(description: str) -> Iterator[Callable[[int, int], None]]:
    """On stderr, where it takes more than a moment."""
    from coordexp.data.progress_bar import literal_console, reporting  # a start that reads what is kept needs no bar

    with reporting(literal_console(stderr=True), description, "%", after_s=_SHOWN_AFTER_S) as tell:
        yield lambda done, total: tell(100 * done // max(1, total), 100)


@cache
def _version_of(modules: tuple[str, ...]) -> str:
    """Another one wherever a rule may be another: the modules' own text, Python's and Unicode's version, Pillow's."""
    from PIL import __version__ as pillow

    content = hashlib.sha256(f"{sys.version_info} {unicodedata.unidata_version} {pillow}".encode())
    package = Path(__file__).parents[1]
    for name in modules:
        content.update(package.joinpath(*name.split(".")).with_suffix(".py").read_bytes())
    return content.hexdigest()[:12]
