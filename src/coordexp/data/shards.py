"""Images inside tar files.

A path through a tar file (WebDataset's shards) names an image in it: ``set-00003.tar/00030017.jpg``. A shard is read at
random without unpacking it. The offsets of its members are found once and cached. Compressed tar files have none, and
are refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from coordexp.data.files import cache_folder, whole_binary_file
from coordexp.errors import DataError
from coordexp.reading import open_file

if TYPE_CHECKING:
    import numpy as np

SHARD_SUFFIX = ".tar"
_IN_SHARD = f"{SHARD_SUFFIX}{os.sep}"


@dataclass(frozen=True, slots=True)
class Member:
    """The place of an image's bytes: ``size`` bytes from byte ``offset`` of ``shard``."""

    shard: Path
    offset: int
    size: int


def shard_of(path: str) -> str | None:
    """The tar file in a path; None without one. Reads no file."""
    at = path.find(_IN_SHARD)
    return None if at < 0 else path[: at + len(SHARD_SUFFIX)]


def find_member(path: Path) -> Member | None:
    """The member that ``path`` names; None if the path has no tar file or the tar file no such member. Raises DataError
    for an invalid, compressed or unreadable tar file."""
    text = str(path)
    shard = shard_of(text)
    if shard is None or not os.path.isfile(shard):
        return None
    import numpy as np

    seen = os.stat(shard)
    names_N, places_N2 = _index(shard, seen.st_size, seen.st_mtime_ns)
    name = os.fsencode(text[len(shard) + 1 :])
    at = int(np.searchsorted(names_N, name))
    if at == len(names_N) or names_N[at] != name:
        return None
    offset, size = places_N2[at].tolist()
    return Member(Path(shard), offset, size)


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


_LONGEST_NAME = 4096  # bytes; no file system has longer paths, and each name takes as much memory as the longest
_MOST_METADATA = 1 << 20
_METADATA = b"xgXLK"  # types of headers that are followed by names and more of the next member


class _Header(tarfile.TarInfo):
    """Refuses sizes with which ``tarfile`` would read the rest of the shard at once, or a place again and again."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0 or (header.type in _METADATA and header.size > _MOST_METADATA):
            raise tarfile.ReadError(f"the header of a member says {header.size} bytes")
        return header


@lru_cache(maxsize=512)
def _index(shard: str, size: int, mtime_ns: int) -> tuple[np.ndarray, np.ndarray]:
    # Names (N,) of the members in order, bytes; offset and size (N, 2), int64. A changed shard is indexed again.
    import numpy as np

    place = hashlib.sha256(os.fsencode(os.path.abspath(shard))).hexdigest()[:16]
    kept = cache_folder() / "shards" / f"{place}-{size}-{mtime_ns}.npy"
    try:
        table_N = np.load(kept, allow_pickle=False)
    except (OSError, ValueError, EOFError):  # not there, or damaged
        places = _places(Path(shard), size)
        fields = [("name", f"S{max(map(len, places), default=1)}"), ("offset", np.int64), ("size", np.int64)]
        table_N = np.array([(name, *places[name]) for name in sorted(places)], dtype=fields)
        kept.parent.mkdir(exist_ok=True)
        with whole_binary_file(kept) as file:
            np.save(file, table_N, allow_pickle=False)
        for old in kept.parent.glob(f"{place}-*.npy"):
            if old != kept:
                old.unlink(missing_ok=True)
    return np.ascontiguousarray(table_N["name"]), np.stack([table_N["offset"], table_N["size"]], axis=1)


def _places(shard: Path, shard_size: int) -> dict[bytes, tuple[int, int]]:
    # Offset and size of each member; of two with one name the last counts, as in tar.
    places: dict[bytes, tuple[int, int]] = {}
    with open_file(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Header) as tar:
                for info in tar:
                    name = os.fsencode(info.name.removeprefix("./"))
                    # An extended header can give another size and name than the member's own.
                    if len(name) > _LONGEST_NAME:
                        raise tarfile.ReadError(f"a name of {len(name):,} bytes")
                    is_whole = info.isfile() and not info.issparse()
                    if info.size < 0 or (is_whole and info.size > shard_size - info.offset_data):
                        place = f"{info.size} bytes from byte {info.offset_data}"
                        raise tarfile.ReadError(f"member {info.name[:80]!r} has {place}")
                    if is_whole:
                        places[name] = info.offset_data, info.size
        except (tarfile.TarError, OSError, ValueError, LookupError) as error:
            raise DataError(
                f"not readable at byte {file.tell()} ({error}); shards are uncompressed tar files, as coordexp data "
                "pack writes them",
                path=shard,
            ) from error
    return places
