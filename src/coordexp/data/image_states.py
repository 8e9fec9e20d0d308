"""Which images of a cached dataset were found right, and how their files looked then: only changed ones are opened."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np

from coordexp.data.arrow_records import ArrowRecords
from coordexp.data.jsonl import image_problem, real_size
from coordexp.data.line_validation import Progress, in_processes, spread, usable_cores
from coordexp.data.shards import image_stat
from coordexp.errors import DataError
from coordexp.files import whole_binary_file

_ROWS = 20_000  # of a piece of work: often enough for the bar, seldom enough to cost nothing
UNSEEN = -1


def check_states(records: ArrowRecords, states: Path, progress: Progress) -> list[str]:
    """Compare every image file's size and time of change with ``states``, and look into the headers of those that are
    others now; ``states`` holds them afterwards.

    Returns: the problems in the order of the records, as :func:`coordexp.data.jsonl.check_dataset` words them.
    """
    known_R2 = _read(states, len(records))
    pieces = spread(len(records), max(4 * usable_cores(), len(records) // _ROWS) if len(records) >= _ROWS else 1)
    tasks = [(start, known_R2[start:stop]) for start, stop in pieces]
    problems: list[str] = []
    changed = False
    for (start, stop), (states_P2, told) in zip(pieces, in_processes(partial(_look, records), tasks), strict=True):
        problems += told
        if states_P2 is not None:
            known_R2[start:stop] = states_P2
            changed = True
        progress(stop, len(records))
    if changed:
        _write(states, known_R2)
    return problems


def _look(records: ArrowRecords, rows: tuple[int, np.ndarray]) -> tuple[np.ndarray | None, list[str]]:
    """``rows``: the first one's place, and the known states (P, 2) of it and those behind it. The states where one is
    another now (else None), and the rows' problems."""
    begin, known_P2 = rows
    states_P2 = known_P2.copy()
    problems: list[str] = []
    sizes: dict[bytes, tuple[int, int] | DataError] = {}
    shards: dict[str, os.stat_result] = {}
    changed = False
    for first, batch in records.batches(begin, begin + len(states_P2)):
        images = batch.column("image").to_pylist()
        at = first - begin
        for row, (image, (size, time)) in enumerate(
            zip(images, states_P2[at : at + len(images)].tolist(), strict=True)
        ):
            try:
                seen = image_stat(image, shards)
                if seen.st_size == size and seen.st_mtime_ns == time:
                    continue
                now = seen.st_size, seen.st_mtime_ns
            except OSError:  # the header's check says what it is
                now = UNSEEN, UNSEEN
            path = Path(os.fsdecode(image))
            if image not in sizes:
                sizes[image] = real_size(path)
            declared = batch.column("width")[row].as_py(), batch.column("height")[row].as_py()
            text = image_problem(path, declared, sizes[image])
            if text is not None:
                now = UNSEEN, UNSEEN
                problems.append(f"{records[first + row].sample_id}: {text}")
            changed |= (size, time) != now
            states_P2[at + row] = now
    return (states_P2 if changed else None), problems


def _read(states: Path, rows: int) -> np.ndarray:
    """(rows, 2) int64: bytes and time of change in ns of an image that was right, UNSEEN for any other."""
    try:
        known_R2 = np.load(states, allow_pickle=False)
    except FileNotFoundError:
        return np.full((rows, 2), UNSEEN, np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error}); delete the file and start again", path=states) from error
    if known_R2.dtype != np.int64 or known_R2.ndim != 2 or known_R2.shape[1] != 2 or len(known_R2) < rows:
        raise DataError("is not of this dataset; delete the file and start again", path=states)
    return known_R2


def _write(states: Path, known_R2: np.ndarray) -> None:
    with whole_binary_file(states) as file:
        np.save(file, known_R2, allow_pickle=False)
