"""A dataset's lines validated by several processes, into an Arrow file that appears once all of them are right."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordexp.data.arrow_records import BatchBuilder, record_schema
from coordexp.data.files import whole_binary_file
from coordexp.data.quick_lines import quick_line
from coordexp.data.record_line import LineFault, RefusedLine, parse_line
from coordexp.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_BYTES = 4 << 20

Progress = Callable[[int, int], None]
_Task = TypeVar("_Task")
_Done = TypeVar("_Done")


class Unkeepable(Exception):
    """A dataset that is right, as far as is known, and cannot be kept: it must be read plainly. Says why."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What became of the lines that begin in a range of bytes: how many there were, the refused ones (line within the
    piece, reason, fault), the batch of the others as Arrow's own bytes, and why there is none."""

    lines: int
    refused: list[tuple[int, str, str]]
    batch: bytes | None
    unkeepable: str | None = None


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(work: Callable[[_Task], _Done], tasks: list[_Task]) -> Iterator[_Done]:
    """Each task's result in the order of the tasks; by forked processes where several are worth it.

    Raises:
        DataError: a process was killed. And whatever ``work`` raises.
    """
    if min(len(tasks), usable_cores()) < 2:
        yield from map(work, tasks)
        return
    # Forked: a spawned process imports the caller's whole program first. The work touches neither torch nor threads.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(len(tasks), usable_cores()), context, _begin, (os.getpid(),)) as pool:
        ahead = 4 * usable_cores()  # results wait in memory until they are taken
        waiting = [pool.submit(work, task) for task in tasks[:ahead]]
        rest = iter(tasks[ahead:])
        try:
            while waiting:
                done = waiting.pop(0).result()
                if (task := next(rest, None)) is not None:
                    waiting.append(pool.submit(work, task))
                yield done
        except BrokenProcessPool as error:
            raise DataError("a process that looked at the data was killed, for want of memory most likely") from error
        finally:
            for one in waiting:
                one.cancel()


def _begin(parent: int) -> None:
    """In a new process. A killed parent tells its processes nothing: they would wait for work for ever. And a look at
    all records for cycles, of which they have none, at every some hundred new ones costs as much as a part of the work.
    """
    gc.disable()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_of_lines(path: Path, limit: int | None) -> int:
    """The byte behind the first ``limit`` lines that hold something; the file's size where it has no more."""
    if limit is None:
        return path.stat().st_size
    end = taken = 0
    with path.open("rb") as lines:
        for text in lines:
            end += len(text)
            taken += bool(text.strip())
            if taken == limit:
                break
    return end


def validate_lines(path: Path, end: int, to: Path, progress: Progress) -> list[RefusedLine]:
    """Read ``path`` up to byte ``end`` and write its records to the Arrow file ``to``; nothing is written where a line
    is refused.

    Returns: the refused lines, in their order.

    Raises:
        Unkeepable: a record that an Arrow file cannot hold. DataError: no records.
    """
    import pyarrow as pa

    tasks = [(start, min(start + PIECE_BYTES, end)) for start in range(0, end, PIECE_BYTES)]
    problems: list[RefusedLine] = []
    before = rows = 0
    try:
        with whole_binary_file(to) as file, pa.ipc.new_file(file, record_schema()) as writer:
            for task, piece in zip(tasks, in_processes(partial(_validate, path), tasks), strict=True):
                if piece.unkeepable is not None:
                    raise Unkeepable(piece.unkeepable)
                for line, reason, fault in piece.refused:
                    problems.append(RefusedLine(reason, LineFault(fault), path=path, line=before + line))
                if piece.batch is not None and not problems:
                    batch = _numbered(piece.batch, before)
                    rows += batch.num_rows
                    writer.write_batch(batch)
                before += piece.lines
                progress(task[1], end)
            if not rows or problems:
                raise _NothingToWrite
    except _NothingToWrite:
        if not problems:
            raise DataError("the file holds no records; expected one JSON object per line", path=path) from None
    return problems


class _NothingToWrite(Exception):
    pass


def _numbered(batch: bytes, before: int) -> pa.RecordBatch:
    """A piece's batch with its lines' numbers in the file."""
    import pyarrow as pa

    records = pa.ipc.read_record_batch(pa.py_buffer(batch), record_schema())
    return records.set_column(0, "line", pa.array(records.column(0).to_numpy() + before, pa.int64()))


def _validate(path: Path, piece: tuple[int, int]) -> _Piece:
    """In a process of its own. Raises nothing that a line can cause."""
    rows = BatchBuilder()
    refused: list[tuple[int, str, str]] = []
    unkeepable: str | None = None
    folder = os.path.abspath(path.parent)
    number = 0
    for number, text in enumerate(_lines_from(path, *piece), start=1):
        if not text.strip():
            continue
        try:
            quick = quick_line(text, folder)
            if quick is not None:
                rows.add_quick(quick, number)
            else:
                rows.add(parse_line(text, path=path, line=number), number)
        except RefusedLine as error:
            refused.append((number, error.reason, error.fault.value))
        except (OverflowError, RecursionError) as error:
            unkeepable = unkeepable or str(error)
    if refused or unkeepable is not None or not len(rows):
        return _Piece(number, refused, None, None if refused else unkeepable)
    return _Piece(number, refused, rows.batch().serialize().to_pybytes())


def _lines_from(path: Path, start: int, end: int) -> Iterable[bytes]:
    """The lines whose first byte lies in the range."""
    with path.open("rb", buffering=io.DEFAULT_BUFFER_SIZE * 16) as file:
        if start:
            file.seek(start - 1)
            start += len(file.readline()) - 1
        while start < end and (text := file.readline()):
            start += len(text)
            yield text


def spread(rows: int, pieces: int) -> list[tuple[int, int]]:
    """``rows`` cut into about ``pieces`` ranges (first, behind the last)."""
    size: Any = max(1, -(-rows // max(1, pieces)))
    return [(start, min(start + size, rows)) for start in range(0, rows, size)]
