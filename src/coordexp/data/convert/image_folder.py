"""Image files by the names that annotations give them: paths of other machines, of a server, or without a suffix."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path, PurePosixPath

from coordexp.data.convert.shapes import files_below, unsafe_file_name, with_slashes
from coordexp.data.images import IMAGE_SUFFIXES, read_header
from coordexp.errors import DataError


class ImageFolder:
    """The images of ``folder`` and below."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, *names: str) -> tuple[Path, str]:
        """The file that has one of ``names``, and its name below the folder.

        Each name is tried as a path in the folder, then its last part anywhere below, then that without a suffix. The
        last two count only if a single file has it. Without any, the place where the first name would be.
        """
        named = [with_slashes(name) for name in names]
        for name in named:
            if not unsafe_file_name(name) and (self._folder / name).is_file():
                return self._folder / name, str(PurePosixPath(name))
        for known in (self._by_name, self._by_stem):
            for name in named:
                last = PurePosixPath(name).name
                found = known.get(last, [])
                if len(found) == 1:
                    return found[0], found[0].relative_to(self._folder).as_posix()
        last = PurePosixPath(named[0]).name.replace("\0", "") or "unnamed"
        return self._folder / last, last

    @cached_property
    def _files(self) -> list[Path]:
        return files_below(self._folder, IMAGE_SUFFIXES)

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        return _grouped((path.name, path) for path in self._files)

    @cached_property
    def _by_stem(self) -> dict[str, list[Path]]:
        return _grouped((path.stem, path) for path in self._files)


def size_of_image(path: Path) -> tuple[int, int] | None:
    """Width and height; None for a file that cannot be read, which assembling reports with all that leaves with it."""
    try:
        return read_header(path).size
    except DataError:
        return None


def _grouped(pairs: Iterable[tuple[str, Path]]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for key, path in pairs:
        groups.setdefault(key, []).append(path)
    return groups
