"""Several JSONL files as one dataset, and summaries over all records of a dataset, in memory or cached."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordexp.data.dataset_cache import CachedRecords
from coordexp.records import ImageRecord


@dataclass(frozen=True, slots=True)
class DataPart:
    """The records of one file. ``weight``: how often an epoch has each of them."""

    path: Path
    records: Sequence[ImageRecord]
    weight: float = 1.0


class JoinedRecords(Sequence[ImageRecord]):
    """The records of several files, one after the other. Sample ids start with the file's name, preceded by as many of
    its folders as distinguish it from the other files: ``old/train.jsonl:3``."""

    def __init__(self, parts: Sequence[DataPart]) -> None:
        self.parts = tuple(parts)
        self.names = _short_names([part.path for part in parts])
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part.records))
        self.starts, self._length = ends[:-1], ends[-1]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        at = bisect.bisect_right(self.starts, index) - 1
        record = self.parts[at].records[index - self.starts[at]]
        return replace(record, sample_id=f"{self.names[at]}:{_line_of(record)}")


def index_of(records: Sequence[ImageRecord], sample_id: str) -> int | None:
    """The index of a record; None if there is none of that id. A single file may have another name than in
    ``sample_id``: it was renamed since."""
    name, _, line = sample_id.rpartition(":")
    start = 0
    if isinstance(records, JoinedRecords):
        if name not in records.names:
            return None
        at = records.names.index(name)
        start, records = records.starts[at], records.parts[at].records
    if not line.isdecimal():
        return None
    index = bisect.bisect_left(records, int(line), key=_line_of)
    return start + index if index < len(records) and _line_of(records[index]) == int(line) else None


def parts_of(records: Sequence[ImageRecord]) -> tuple[Sequence[ImageRecord], ...]:
    """The records of each file of a dataset."""
    return tuple(part.records for part in records.parts) if isinstance(records, JoinedRecords) else (records,)


def pixel_areas(records: Sequence[ImageRecord]) -> tuple[int, int] | None:
    """The smallest and the largest area of an image in pixels; None without images."""
    found: list[int] = []
    for part in parts_of(records):
        cached = isinstance(part, CachedRecords)
        found += part.pixel_areas() if cached else [record.width * record.height for record in part]
    return (min(found), max(found)) if found else None


def distinct_preparations(records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """Records that together have every ``metadata.prepared`` (None counts as a value) of the dataset."""
    return [
        record
        for part in parts_of(records)
        for record in (part.distinct_preparations() if isinstance(part, CachedRecords) else part)
    ]


def distinct_descs(records: Sequence[ImageRecord]) -> set[str]:
    """The distinct descriptions of all objects."""
    names: set[str] = set()
    for part in parts_of(records):
        cached = isinstance(part, CachedRecords)
        names |= part.distinct_descs() if cached else {obj.desc for record in part for obj in record.objects}
    return names


def descs_by_record(records: Sequence[ImageRecord]) -> Iterator[frozenset[str]]:
    """The distinct descriptions of each record's objects."""
    for part in parts_of(records):
        if isinstance(part, CachedRecords):
            yield from part.descs_by_record()
        else:
            yield from (frozenset(obj.desc for obj in record.objects) for record in part)


def _line_of(record: ImageRecord) -> int:
    return int(record.sample_id.rpartition(":")[2])


def _short_names(paths: Sequence[Path]) -> tuple[str, ...]:
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    names = []
    for at, parts in enumerate(whole):
        others = whole[:at] + whole[at + 1 :]
        length = next(n for n in range(1, len(parts) + 1) if all(other[-n:] != parts[-n:] for other in others))
        names.append(Path(*parts[-length:]).as_posix())
    return tuple(names)
