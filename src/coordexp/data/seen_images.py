"""Image files that were found right, and how they looked then: only new and changed ones are read again.

:class:`SeenImages` is a store by path for checks, so that any JSONL may ask, however its lines change. The states of a
mapped dataset (:func:`check_states`) stay an array beside it: its rows never change, and are compared without a look-up
each. Both go by what :func:`coordexp.data.shards.image_stat` says.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from coordexp.data.cache_folder import cache_folder
from coordexp.data.file_states import BYTES_AND_TIME, file_states
from coordexp.data.files import whole_binary_file
from coordexp.data.images import shape_problem
from coordexp.data.jpeg_size import plain_jpeg_size
from coordexp.data.jsonl import image_problem, real_size
from coordexp.data.line_validation import Progress, in_processes, spread, usable_cores
from coordexp.data.shards import image_stat
from coordexp.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from coordexp.data.arrow_records import ArrowRecords

logger = logging.getLogger("coordexp")

_FILE = "seen_images.sqlite"
_WAIT_S = 30.0  # for another check that writes at the same moment
_ROWS_AT_ONCE = 500
_TABLE = """CREATE TABLE IF NOT EXISTS images (
    path BLOB PRIMARY KEY, reader TEXT, bytes INTEGER, mtime_ns INTEGER,
    width INTEGER, height INTEGER, sha256 BLOB, decoded INTEGER
) WITHOUT ROWID"""


@dataclass(frozen=True, slots=True)
class SeenImage:
    """A sound image: its upright size in pixels, its file's SHA-256, and whether all of its pixels were decoded."""

    width: int
    height: int
    sha256: bytes
    decoded: bool


class SeenImages:
    """The images that earlier checks found sound; a context, at whose end new ones are kept.

    An image counts as long as its file, or the shard that holds it, has its size and time of change, and Pillow its
    version. A store that cannot be used is reported in the log, and every image is read.
    """

    def __init__(self) -> None:
        self.path = cache_folder() / _FILE
        self._reader = f"1 pillow {version('pillow')}"
        self._new = 0
        self._asked: tuple[Path, tuple[int, int] | None] | None = None  # the last image, and its file as it was then
        self._rows: sqlite3.Connection | None = None
        with self._or_without():
            self._rows = sqlite3.connect(self.path, timeout=_WAIT_S)
            self._rows.execute(_TABLE)

    def __enter__(self) -> SeenImages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._or_without():
            if self._rows is not None:
                self._rows.commit()
                self._rows.close()

    def find(self, image: Path) -> SeenImage | None:
        """What is known of a file that is as it was; None where it must be read."""
        stat = _stat(image)
        self._asked = image, stat
        row = None
        with self._or_without():
            if self._rows is not None and stat is not None:
                row = self._rows.execute(
                    "SELECT width, height, sha256, decoded FROM images"
                    " WHERE path = ? AND reader = ? AND bytes = ? AND mtime_ns = ?",
                    (_key(image), self._reader, *stat),
                ).fetchone()
        return None if row is None else SeenImage(row[0], row[1], row[2], bool(row[3]))

    def keep(self, image: Path, seen: SeenImage) -> None:
        """Note a sound image, which was read behind the last :meth:`find`."""
        asked, stat = self._asked or (None, None)
        if asked != image:
            raise ValueError(f"{image} was not asked for, so its file may have changed while it was read")
        if stat is None:  # it came while it was looked for
            return
        row = (_key(image), self._reader, *stat, seen.width, seen.height, seen.sha256, int(seen.decoded))
        with self._or_without():
            if self._rows is not None:
                self._rows.execute("INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
                self._new += 1
                if self._new % _ROWS_AT_ONCE == 0:  # a check that is interrupted goes on where it was
                    self._rows.commit()

    @contextmanager
    def _or_without(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            logger.warning(
                "%s cannot be used (%s): every image is read, now and next time; delete the file, it is made anew",
                *(self.path, error),
            )
            self._rows = None


def _key(image: Path) -> bytes:
    return os.fsencode(os.path.abspath(image))


def _stat(image: Path) -> tuple[int, int] | None:
    """Bytes and time of change in ns; None where there is no such file."""
    try:
        file = image_stat(os.fsencode(image))
    except (OSError, ValueError):  # the check that opens it says what it is
        return None
    return file.st_size, file.st_mtime_ns


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
    for first, batch in records.batches(begin, begin + len(states_P2)):
        images: list[bytes] = batch.column("image").to_pylist()
        now_N2 = _states(images, shards)
        known_N2 = states_P2[first - begin : first - begin + len(images)]
        others = ((now_N2 != known_N2) | (now_N2 == UNSEEN)).any(axis=1).nonzero()[0].tolist()
        if not others:
            continue
        declared = [batch.column(side).to_pylist() for side in ("width", "height")]
        for row in others:
            image, size = images[row], (declared[0][row], declared[1][row])
            if image not in sizes:
                sizes[image] = _size(image)
            if sizes[image] == size:
                continue
            text = image_problem(Path(os.fsdecode(image)), size, sizes[image])
            assert text is not None, "the sizes differ, or there is none"
            now_N2[row] = UNSEEN
            problems.append(f"{records[first + row].sample_id}: {text}")
        known_N2[:] = now_N2
    return (states_P2 if (states_P2 != known_P2).any() else None), problems


def _states(images: list[bytes], shards: dict[str, os.stat_result]) -> np.ndarray:
    """(N, 2) int64: bytes and time of change in ns of image files; UNSEEN where there is no such."""
    import numpy as np

    states_N2 = file_states(images)  # as a rule all are files of their own: a million in two seconds at most
    if states_N2 is not None:
        return states_N2
    states_N2 = np.full((len(images), 2), UNSEEN, np.int64)
    for row, image in enumerate(images):
        with suppress(OSError):  # the header's check says what it is
            states_N2[row] = BYTES_AND_TIME(image_stat(image, shards))
    return states_N2


def _size(image: bytes) -> tuple[int, int] | DataError:
    """What :func:`coordexp.data.jsonl.real_size` says."""
    size = plain_jpeg_size(image)
    return size if size is not None and shape_problem(*size) is None else real_size(Path(os.fsdecode(image)))


def _read(states: Path, rows: int) -> np.ndarray:
    """(rows, 2) int64: bytes and time of change in ns of an image that was right, UNSEEN for any other."""
    import numpy as np  # a check of a plain JSONL needs no arrays

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
    import numpy as np

    with whole_binary_file(states) as file:
        np.save(file, known_R2, allow_pickle=False)
