"""Validated records in an Arrow file: mapped into memory and made one at a time, however many there are."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from coordexp.data.quick_lines import QuickLine
from coordexp.errors import DataError
from coordexp.records import GEOMETRY_KINDS, GTObject, ImageRecord

if TYPE_CHECKING:
    import pyarrow as pa

PREPARED = "prepared"
"""The key of a record's metadata that has a column of its own: what training asks of all records at once."""


def record_schema() -> pa.Schema:
    """A row is a record. ``line`` counts from 1; ``image`` is an absolute path in the file system's own bytes; a kind
    is its place in ``GEOMETRY_KINDS``; ``metadata`` and ``prepared`` are JSON, null for none."""
    import pyarrow as pa

    objects = pa.list_(
        pa.struct([("desc", pa.string()), ("kind", pa.int8()), ("bins", pa.list_(pa.int16())), ("soft", pa.float64())])
    )
    return pa.schema([
        ("line", pa.int64()), ("image", pa.binary()), ("width", pa.int64()), ("height", pa.int64()),
        ("objects", objects), ("metadata", pa.string()), (PREPARED, pa.string()),
    ])  # fmt: skip


class BatchBuilder:
    """The columns of a batch, which grow by a record at a time."""

    def __init__(self) -> None:
        self._lines: list[int] = []
        self._images: list[bytes] = []
        self._sizes: list[tuple[int, int]] = []
        self._object_counts: list[int] = []
        self._descs: list[str] = []
        self._kinds: list[int] = []
        self._bin_counts: list[int] = []
        self._bins: list[int] = []
        self._softs: list[float | None] = []
        self._metadata: list[str | None] = []
        self._prepared: list[str | None] = []

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, record: ImageRecord, line: int) -> None:
        """A record, of line ``line``.

        Raises:
            OverflowError, RecursionError: a side above 2**63 pixels, or metadata nested too deeply to be written.
        """
        if max(record.width, record.height) >= 1 << 63:
            raise OverflowError(f"a side of {max(record.width, record.height)} pixels")
        objects = record.objects
        quick = QuickLine(
            os.fsencode(record.image), record.width, record.height,
            [obj.desc for obj in objects], [GEOMETRY_KINDS.index(obj.kind) for obj in objects],
            [obj.bins for obj in objects], [obj.soft for obj in objects], record.metadata,
        )  # fmt: skip
        self.add_quick(quick, line)

    def add_quick(self, quick: QuickLine, line: int) -> None:
        """A record by its values; raises RecursionError as :meth:`add`."""
        metadata = quick.metadata
        self._metadata.append(_json(metadata) if metadata else None)
        self._prepared.append(_json(metadata.get(PREPARED)) if metadata else None)
        self._lines.append(line)
        self._images.append(quick.image)
        self._sizes.append((quick.width, quick.height))
        self._object_counts.append(len(quick.descs))
        self._descs += quick.descs
        self._kinds += quick.kinds
        self._softs += quick.softs
        self._bin_counts += map(len, quick.shapes)
        self._bins += chain.from_iterable(quick.shapes)

    def batch(self) -> pa.RecordBatch:
        """What was added, as one batch of :func:`record_schema`."""
        import pyarrow as pa

        struct = pa.StructArray.from_arrays(
            [
                pa.array(self._descs, pa.string()),
                pa.array(self._kinds, pa.int8()),
                pa.ListArray.from_arrays(_offsets(self._bin_counts), pa.array(self._bins, pa.int16())),
                pa.array(self._softs, pa.float64()),
            ],
            names=["desc", "kind", "bins", "soft"],
        )
        columns: list[Any] = [
            pa.array(self._lines, pa.int64()),
            pa.array(self._images, pa.binary()),
            pa.array([width for width, _ in self._sizes], pa.int64()),
            pa.array([height for _, height in self._sizes], pa.int64()),
            pa.ListArray.from_arrays(_offsets(self._object_counts), struct),
            pa.array(self._metadata, pa.string()),
            pa.array(self._prepared, pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=record_schema())


def _offsets(lengths: Sequence[int]) -> pa.Array:
    import pyarrow as pa

    return pa.array(accumulate(lengths, initial=0), pa.int32())


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)  # in ASCII: half a character is no UTF-8, and may stand here


class ArrowRecords(Sequence[ImageRecord]):
    """The first ``limit`` records of an Arrow file (None: all), each made as it is asked for.

    ``name`` is the dataset file's own, for sample ids. ``problems`` says what is wrong with the images of these
    records, in their order. A copy in another process opens the file again.
    """

    def __init__(self, file: Path, name: str, limit: int | None = None, problems: Sequence[str] = ()) -> None:
        import pyarrow as pa

        self.file = file
        self.problems = tuple(problems)
        self._name = name
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(file)))
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(
                f"a cached dataset cannot be read ({error}); delete the file and start again", path=file
            ) from error
        self._batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        self._columns: dict[int, _Columns] = {}
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        total = self._ends[-1] if self._ends else 0
        self._len = total if limit is None else min(limit, total)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.file, self._name, self._len, self.problems)

    def __len__(self) -> int:
        return self._len

    @overload
    def __getitem__(self, index: int) -> ImageRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[ImageRecord]: ...
    def __getitem__(self, index: int | slice) -> ImageRecord | list[ImageRecord]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(self._len))]
        if not -self._len <= index < self._len:
            raise IndexError(f"record {index} of {self._len}")
        index %= self._len
        number = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[number - 1] if number else 0)
        if number not in self._columns:
            self._columns[number] = _Columns(self._batches[number])
        return self._columns[number].record(row, self._name)

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows ``start`` to ``stop`` in pieces, each with the place of its first row."""
        for end, batch in zip(self._ends, self._batches, strict=True):
            first = end - batch.num_rows
            low, high = max(start, first), min(stop, end, self._len)
            if low < high:
                yield low, batch.slice(low - first, high - low)

    def place_of(self, sample_id: str) -> int | None:
        """The place of a record; None where there is no such."""
        import numpy as np

        name, _, line = sample_id.rpartition(":")
        if name != self._name or not line.isdecimal():
            return None
        for first, batch in self.batches(0, self._len):
            lines = batch.column("line").to_numpy()
            at = int(np.searchsorted(lines, int(line)))
            if at < len(lines):
                return first + at if lines[at] == int(line) else None
        return None

    def areas(self) -> tuple[int, int]:
        """The smallest and the largest area in pixels, of at least one record."""
        areas = [
            batch.column("width").to_numpy() * batch.column("height").to_numpy()
            for _, batch in self.batches(0, self._len)
        ]
        return min(int(area.min()) for area in areas), max(int(area.max()) for area in areas)

    def first_of_each_preparation(self) -> list[ImageRecord]:
        """The first record of each different ``metadata.prepared``, none of it included, in their order."""
        places: dict[str | None, int] = {}
        for first, batch in self.batches(0, self._len):
            column = batch.column(PREPARED)
            for value in column.unique().to_pylist():
                if value not in places:
                    places[value] = (
                        first + column.index(value).as_py() if value is not None else first + _first_null(column)
                    )
        return [self[place] for place in sorted(places.values())]


@lru_cache(maxsize=4)
def _reopened(file: Path, name: str, limit: int, problems: tuple[str, ...]) -> ArrowRecords:
    """A process that is handed the same records with each piece of its work opens them once."""
    return ArrowRecords(file, name, limit, problems)


class _Columns:
    """One batch, by what reading a single row needs: a slice of each array rather than a scalar of each value."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._rows = [batch.column(name) for name in ("line", "image", "width", "height", "metadata")]
        objects: Any = batch.column("objects")
        bins: Any = objects.values.field("bins")
        self._object_ends = objects.offsets.to_numpy()
        self._bin_ends = bins.offsets.to_numpy()
        self._bins = bins.values.to_numpy()
        self._parts = [objects.values.field(name) for name in ("desc", "kind", "soft")]

    def record(self, row: int, name: str) -> ImageRecord:
        line, image, width, height, metadata = (column[row].as_py() for column in self._rows)
        start, stop = self._object_ends[row : row + 2].tolist()
        objects: tuple[GTObject, ...] = ()
        if start < stop:
            ends = self._bin_ends[start : stop + 1].tolist()
            bins = self._bins[ends[0] : ends[-1]].tolist()
            shapes = [tuple(bins[low - ends[0] : high - ends[0]]) for low, high in pairwise(ends)]
            descs, kinds, softs = (part.slice(start, stop - start).to_pylist() for part in self._parts)
            objects = tuple(
                [
                    GTObject(desc, GEOMETRY_KINDS[kind], shape, soft)
                    for desc, kind, shape, soft in zip(descs, kinds, shapes, softs, strict=True)
                ]
            )
        return ImageRecord(
            sample_id=f"{name}:{line}",
            image=Path(os.fsdecode(image)),
            width=width,
            height=height,
            objects=objects,
            metadata={} if metadata is None else json.loads(metadata),
        )


def _first_null(column: Any) -> int:
    import numpy as np

    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
