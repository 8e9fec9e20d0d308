"""Images inside tar files (WebDataset's shards), named by a path through the file: ``set-00003.tar/00030017.jpg``.

A shard is read at random without unpacking it. The offsets of its members are found once and cached
(:mod:`coordexp.data.cache_folder`). Compressed tar files have no offsets and are refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from coordexp.data.cache_folder import cache_folder
from coordexp.data.files import whole_binary_file
from coordexp.data.record_line import line_of, write_jsonl
from coordexp.errors import DataError
from coordexp.records import ImageRecord

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".tar"
_IN_SHARD = f"{SUFFIX}{os.sep}"


@dataclass(frozen=True, slots=True)
class Member:
    """The place of an image's bytes: ``size`` bytes from byte ``offset`` of ``shard``."""

    shard: Path
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Index:
    """The members of a shard, sorted by name: (N,) bytes, and (N, 2) int64 of offset and size."""

    names_N: np.ndarray
    places_N2: np.ndarray


def shard_of(path: str) -> str | None:
    """The tar file in a path; None if there is none. Reads no file."""
    at = path.find(_IN_SHARD)
    return None if at < 0 else path[: at + len(SUFFIX)]


def find_member(path: Path) -> Member | None:
    """The member that ``path`` names; None if the path has no tar file or the tar file no such member.

    Raises:
        DataError: the tar file is invalid, compressed, or not readable.
    """
    text = str(path)
    shard = shard_of(text)
    if shard is None or not os.path.isfile(shard):
        return None
    import numpy as np

    seen = os.stat(shard)
    index = _index(shard, seen.st_size, seen.st_mtime_ns)
    name = os.fsencode(text[len(shard) + 1 :])
    at = int(np.searchsorted(index.names_N, name))
    if at == len(index.names_N) or index.names_N[at] != name:
        return None
    offset, size = index.places_N2[at].tolist()
    return Member(Path(shard), offset, size)


def image_stat(image: bytes, shards: dict[str, os.stat_result] | None = None) -> os.stat_result:
    """Size and times of an image file; of an image in a shard the shard's own, kept in ``shards``.

    Raises:
        OSError: no such file.
    """
    shards = {} if shards is None else shards
    try:
        return os.stat(image)
    except NotADirectoryError:
        shard = shard_of(os.fsdecode(image))
        if shard is None:
            raise
        if shard not in shards:
            shards[shard] = os.stat(shard)
        return shards[shard]


class MemberFile(io.RawIOBase):
    """A member as a file: reads only the requested bytes of the shard."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._file = member.shard.open("rb", buffering=0)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._member.size}[whence]
        if base + offset < 0:
            raise ValueError(f"no place {base + offset} in a file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = max(0, min(len(buffer), self._member.size - self._at))
        data = os.pread(self._file.fileno(), wanted, self._member.offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@lru_cache(maxsize=512)
def _index(shard: str, size: int, mtime_ns: int) -> _Index:
    """Keyed by size and modification time, so that a changed shard is indexed again."""
    import numpy as np

    place = hashlib.sha256(os.fsencode(os.path.abspath(shard))).hexdigest()[:16]
    kept = cache_folder() / "shards" / f"{place}-{size}-{mtime_ns}.npy"
    try:
        table_N = np.load(kept, allow_pickle=False)
    except FileNotFoundError:
        table_N = _scan(shard)
        kept.parent.mkdir(exist_ok=True)
        with whole_binary_file(kept) as file:
            np.save(file, table_N, allow_pickle=False)
        for old in kept.parent.glob(f"{place}-*.npy"):
            if old != kept:
                old.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error}); delete the file and start again", path=kept) from error
    return _Index(np.ascontiguousarray(table_N["name"]), np.stack([table_N["offset"], table_N["size"]], axis=1))


def _scan(shard: str) -> np.ndarray:
    """Name, offset and size of every file in the shard, sorted by name; of two of one name the last, as tar has it."""
    import numpy as np

    places: dict[bytes, tuple[int, int]] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for info in tar:
                if info.isfile() and not info.issparse():
                    places[os.fsencode(info.name.removeprefix("./"))] = info.offset_data, info.size
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"no tar file that can be read ({error}); shards are uncompressed tar files, as coordexp data pack writes "
            "them",
            path=shard,
        ) from error
    longest = max(map(len, places), default=1)
    fields = [("name", f"S{longest}"), ("offset", np.int64), ("size", np.int64)]
    return np.array([(name, *places[name]) for name in sorted(places)], dtype=fields)


def pack(
    records: Sequence[ImageRecord], out: Path, shard_bytes: int, progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Write ``records`` to the JSONL ``out`` and their images, byte for byte, into tar files next to it.

    ``out``'s stem names the shards, of about ``shard_bytes`` each: ``set-00000.tar`` holds ``00000000.jpg`` and
    ``00000000.json``, the record's own line, for each of its records, so WebDataset reads it without the JSONL.
    The JSONL appears last, after all shards. ``progress(done, total)`` counts packed records.

    Returns: the number of records and of shards.

    Raises:
        DataError: ``out`` or a shard exists, an image cannot be read, or a record cannot be written.
    """
    taken = [path for path in (out, *out.parent.glob(f"{out.stem}-[0-9]*{SUFFIX}")) if path.exists()]
    if taken:
        raise DataError("exists already; name another file, or remove it", path=taken[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        count = write_jsonl(_packed(records, out, shard_bytes, written, progress), out)
    except BaseException:  # Ctrl-C too: shards without their JSONL are of no use
        for shard in written:
            shard.unlink(missing_ok=True)
        raise
    return count, len(written)


def _packed(
    records: Sequence[ImageRecord],
    out: Path,
    shard_bytes: int,
    written: list[Path],
    progress: Callable[[int, int], None] | None,
) -> Iterator[ImageRecord]:
    """The records with their images in shards, which are written on the way and noted in ``written``."""
    number = 0
    while number < len(records):
        shard = out.with_name(f"{out.stem}-{len(written):05d}{SUFFIX}")
        packed: list[ImageRecord] = []
        with (
            whole_binary_file(shard) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar,
        ):
            while number < len(records) and (not packed or tar.offset < shard_bytes):
                record = records[number]
                if progress is not None:
                    progress(number, len(records))
                name = f"{number:08d}{record.image.suffix.lower()}"
                _add(tar, name, image_bytes(record.image))
                alone = replace(record, image=Path(os.path.abspath(out.parent), name))
                _add(tar, f"{number:08d}.json", line_of(alone, out, number + 1).encode())
                packed.append(replace(record, image=Path(os.path.abspath(shard), name)))
                number += 1
        written.append(shard)
        yield from packed


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Without time and owner, so that equal sets make equal shards."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def image_bytes(path: Path) -> bytes:
    """An image file's own bytes, in a folder or in a shard.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    try:
        member = find_member(path)
        if member is None:
            return path.read_bytes()
        with MemberFile(member) as file:
            return file.readall()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", path=path) from error
