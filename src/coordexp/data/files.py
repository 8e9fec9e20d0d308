"""Read and write files safely: shipped files, users' text and JSON, files that a kill may not leave half written, and
checksums."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from coordexp.errors import CheckpointError, DataError

# The shipped configurations and the demo's checkpoints: inside the package in a wheel, next to src in a source tree.
_ASSET_ROOTS = (Path(__file__).parents[1] / "_assets", Path(__file__).parents[3])


def asset(relative: str) -> Path:
    """Path of a shipped file of ``configs`` or ``checkpoints``.

    Raises:
        CheckpointError: the installation does not have it.
    """
    for root in _ASSET_ROOTS:
        if (root / relative).exists():
            return root / relative
    raise CheckpointError(f"{relative} is missing from this installation; install the wheel again, or clone it again")


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


_BLOCK = 1 << 16


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file whose last line a kill may have left unfinished: that part is no record, and goes."""
    with path.open("ab+") as file:
        end = _end_of_last_line(file)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)
        file.write(line)


def _end_of_last_line(file: BinaryIO) -> int:
    """The byte behind the file's last line break; 0 without one. Looks from the end: one block of a whole file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        line_break = file.read(end - start).rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1
        end = start
    return 0


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name complete, or not at all: also when the run is killed meanwhile, or the
    power fails. What stood there before stays until then, and stays after an error."""
    with _complete(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        yield file
        _to_disk(file)


@contextmanager
def whole_binary_file(path: Path) -> Iterator[BinaryIO]:
    """As :func:`whole_file`, for bytes."""
    with _complete(path) as temporary, temporary.open("wb") as file:
        yield file
        _to_disk(file)


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too: leave no half file behind, and go on raising
        temporary.unlink(missing_ok=True)
        raise
    flush_file(path.parent)


def _to_disk(file: TextIO | BinaryIO) -> None:
    """Before it gets its name: otherwise a power loss may leave the name with nothing behind it."""
    file.flush()
    os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` as a :func:`whole_file`."""
    with whole_file(path) as file:
        file.write(text)


def read_text(path: Path) -> str:
    """A UTF-8 file's text; the byte order mark that Windows editors write is no part of it.

    Raises:
        DataError: not there, not readable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start + 1}; save it as UTF-8", path=path) from error
    except OSError as error:
        raise DataError(f"not readable: {error.strerror}", path=path) from error


def read_json(path: Path) -> Any:
    """A JSON file's content. Raises DataError as :func:`read_text` does, and when it is no JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not readable as JSON: {error}", path=path) from error
