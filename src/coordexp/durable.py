"""Checksums of files, and waiting until a disk holds them: what a checkpoint is sealed with."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 64 << 20
_READ_BYTES = 4 << 20  # stays in a core's cache between the copy out of the page cache and the checksum
_THREADS = 8


def checksums(paths: Sequence[Path], *, flush: bool) -> list[list[str]]:
    """CRC-32 of each 64 MiB of each file, in hexadecimal; an empty file has none.

    Pieces are read side by side: the interpreter's lock is free while a piece is read and summed. ``flush``: return
    once the disk holds the files too, so that what was summed is what a power loss leaves.
    """
    jobs = [(path, start) for path in paths for start in range(0, path.stat().st_size, PIECE_BYTES)]
    with ThreadPoolExecutor(min(_THREADS, 2 * (os.cpu_count() or 1))) as pool:
        flushed = [pool.submit(flush_file, path) for path in paths] if flush else []
        sums = pool.map(lambda job: _piece(*job), jobs)
        sums_of: dict[Path, list[str]] = {path: [] for path in paths}
        for (path, _), value in zip(jobs, sums, strict=True):
            sums_of[path].append(f"{value:08x}")
        for one in flushed:
            one.result()
    return [sums_of[path] for path in paths]


def flush_file(path: Path) -> None:
    """Return once the disk holds the file, or, of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _piece(path: Path, start: int) -> int:
    value, at, end = 0, start, start + PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while at < end and (block := file.read(min(_READ_BYTES, end - at))):
            value = zlib.crc32(block, value)
            at += len(block)
    return value
