"""Image files that a check found sound, kept between checks: only new and changed ones are read again.

A store by path, so that any JSONL may ask, however its lines change. A mapped dataset's own states
(:mod:`coordexp.data.image_states`) stay an array beside it: its rows never change, and are compared without a look-up
each. Both go by what :func:`coordexp.data.shards.image_stat` says.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType

from coordexp.data.cache_folder import cache_folder
from coordexp.data.shards import image_stat

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
    version. A store that cannot be used is said in the log, and every image is read.
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
