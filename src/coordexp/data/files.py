"""Files: shipped files, files that a kill may not leave half written, checksums, and the folder for what can be
computed again."""

from __future__ import annotations

import io
import logging
import os
import stat
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from coordexp import distributed
from coordexp.errors import DISK_FULL, CheckpointError, ConfigError, DataError
from coordexp.reading import is_own

logger = logging.getLogger("coordexp")

# The shipped configurations and the demo's checkpoints: inside the package in a wheel, next to src in a source tree.
_ASSET_ROOTS = (Path(__file__).parents[1] / "_assets", Path(__file__).parents[3])


def asset(relative: str) -> Path:
    """Path of a shipped file of ``configs`` or ``checkpoints``. Raises CheckpointError if it is missing."""
    for root in _ASSET_ROOTS:
        if (root / relative).exists():
            return root / relative
    raise CheckpointError(f"{relative} is missing from this installation; install the wheel again, or clone it again")


PIECE_BYTES = 64 << 20
_READ_BYTES = 4 << 20  # fits in a core's cache between the copy out of the page cache and the checksum
_THREADS = 8


def checksums(paths: Sequence[Path], *, flush: bool) -> list[list[str]]:
    """CRC-32 of each 64 MiB of each file, in hexadecimal; an empty file has none.

    Threads read the pieces: the interpreter's lock is free while a piece is read and summed. ``flush``: return once the
    disk holds the files too, so that what was summed is what a power loss leaves.
    """

    def piece(job: tuple[Path, int]) -> str:
        path, at = job
        value, end = 0, at + PIECE_BYTES
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            while at < end and (block := file.read(min(_READ_BYTES, end - at))):
                value = zlib.crc32(block, value)
                at += len(block)
        return f"{value:08x}"

    jobs = [(path, start) for path in paths for start in range(0, path.stat().st_size, PIECE_BYTES)]
    with ThreadPoolExecutor(min(_THREADS, 2 * (os.cpu_count() or 1))) as pool:
        flushed = [pool.submit(flush_file, path) for path in paths] if flush else []
        sums_of: dict[Path, list[str]] = {path: [] for path in paths}
        for (path, _), value in zip(jobs, pool.map(piece, jobs), strict=True):
            sums_of[path].append(value)
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


def give_ordinary_mode(folder: Path) -> None:
    """Give the weight files in ``folder`` the mode of other new files there; safetensors writes them with 0600."""
    probe = folder / f".mode-{os.getpid()}"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        if stat.S_IMODE(file.stat().st_mode) != mode:  # some file systems know one mode and refuse to set another
            file.chmod(mode)


_BLOCK = 1 << 16


@contextmanager
def naming(path: Path, instead_of: Path | None = None) -> Iterator[None]:
    """Name ``path`` in the error of a full disk, which names no file, and in errors that name ``instead_of``."""
    try:
        yield
    except OSError as error:
        is_full = error.filename is None and error.errno in DISK_FULL
        if is_full or (instead_of is not None and str(error.filename) == str(instead_of)):
            error.filename = str(path)
        raise


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file. If a kill left its last line unfinished, that part is cut off."""
    with naming(path), path.open("ab+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:  # from the end, block by block, to the last line break
            start = max(0, end - _BLOCK)
            file.seek(start)
            line_break = file.read(end - start).rfind(b"\n")
            if line_break >= 0:
                end = start + line_break + 1
                break
            end = start
        if end < size:
            file.truncate(end)
        file.write(line)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name complete, or not at all: also when the run is killed meanwhile, or the
    power fails. A previous file stays until then, and after an error."""
    with whole_binary_file(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8", newline="\n")
        try:
            yield file
        finally:
            file.detach()  # writes what is buffered


def temporary_beside(path: Path, kind: str) -> Path:
    """A name for a file next to ``path`` that is there for a moment: another one each time, because processes of two
    containers can have one number, and somebody else can put a link where the name is known; and never too long."""
    return path.with_name(f".{path.name[:40]}.{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}")


@contextmanager
def whole_binary_file(path: Path, *, flush: bool = True) -> Iterator[BinaryIO]:
    """As :func:`whole_file`. Without ``flush`` it does not wait for the disk, so a power loss may leave it empty."""
    temporary = temporary_beside(path, "partial")
    try:
        with naming(path, instead_of=temporary), temporary.open("xb") as file:
            yield file
            # Before it gets its name: otherwise a power loss may leave the name without content.
            file.flush()
            if flush:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):  # never written; on a read-only disk its removal fails too, with an error of its own
            temporary.unlink()
        raise
    if flush:
        flush_file(path.parent)


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both name one file, also through links, there or still to be written."""
    return os.path.abspath(one) == os.path.abspath(other) or (one.exists() and other.exists() and one.samefile(other))


def unwritable(folder: Path) -> str | None:
    """Why no file can be written to a folder, which may still have to be made; None if nothing is in the way."""
    paths = (folder.absolute(), *folder.absolute().parents)
    there = next(path for path in paths if path.exists() or path.is_symlink())
    if not there.is_dir():
        kind = "file" if there.exists() else "link to nothing"
        return f"{there} is a {kind}, where a folder is needed"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def check_writable(folder: Path, fix: str = "name another folder") -> None:
    """Raises DataError if no file can be written to a folder: before anything is computed for it."""
    if (reason := unwritable(folder)) is not None:
        raise DataError(f"{reason}; {fix}", path=folder)


def check_new_file(
    path: Path, overwrite: bool = False, fix: str = "name another file, or say --overwrite (overwrite=True)"
) -> None:
    """Raises DataError if a file that is about to be written is there, unless ``overwrite``, or is a folder."""
    if path.is_dir():
        raise DataError("is a folder; name a file", path=path)
    if path.exists() and not overwrite:
        raise DataError(f"exists already; {fix}", path=path)


def check_own_file(path: Path) -> None:
    """Raises ConfigError if no command of ours wrote the file that is there, and DataError if none can be written."""
    check_writable(path.parent)
    if path.exists() and (path.is_dir() or not is_own(path)):
        raise ConfigError(f"{path}: is there already, and no command of CoordExp wrote it; name another file")


def check_picture(path: Path) -> None:
    """As :func:`check_own_file`, for a picture."""
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ConfigError(f"{path}: a picture ends in .png, .jpg or .webp")
    check_own_file(path)


def write_atomically(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text)


VARIABLE = "COORDEXP_CACHE"  # names the folder, in which everything can be deleted at any time


def cache_folder() -> Path:
    """The folder for validated datasets and indexes of shards: the first writable one of
    :data:`VARIABLE`, ``coordexp`` in the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``), and a folder of
    the user's own among temporary files. The log names those that are passed over. Raises DataError without any."""
    candidates: list[Path] = []
    if named := os.environ.get(VARIABLE):
        candidates.append(Path(named).expanduser().absolute())
    users = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # a user without a home
        candidates.append((Path(users) if os.path.isabs(users) else Path.home() / ".cache") / "coordexp")
    candidates.append(Path(tempfile.gettempdir()) / f"coordexp-{os.getuid()}")
    refused: list[str] = []
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.parent == Path(tempfile.gettempdir()):
                status = folder.lstat()
                if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                    # Somebody else could put files there that we would train on, or have us write to any folder.
                    raise PermissionError(None, "another user's, or a link")
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            refused.append(f"{folder} ({error.strerror or error})")
            continue
        if refused and distributed.is_main():
            logger.warning(
                "the dataset cache is in %s, because %s cannot be written to; set %s to another folder",
                *(folder, ", ".join(refused), VARIABLE),
            )
        return folder
    raise DataError(f"no folder for the dataset cache can be written to: {', '.join(refused)}; set {VARIABLE}")
