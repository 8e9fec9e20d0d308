"""Which image does a name mean? Names of annotations and of users, and the files of a folder.

An annotation's name may be a path of another machine, of a server, or without a suffix. Its exact relative name counts
first. Without such a file, its tail counts if a single file has it (``photos/cam1/7.jpg`` for ``cam1/7.jpg``), with a
note. A file that another name means exactly is never taken, nor one of several. The name stays as it was given: links
are followed for reading, never for naming.
"""

from __future__ import annotations

import os
import posixpath
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath

from coordexp.data.images import SEEN_SUFFIXES
from coordexp.errors import DataError
from coordexp.printable import has_half_characters, printable

_OF_TOOLS = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "__pycache__")
_SHOWN = 3
_LONGEST_NAME, _LONGEST_PATH = 255, 4096  # bytes, in every file system that images lie in


# --- the files of a folder ---


@dataclass(frozen=True, slots=True)
class Listing:
    """Files below a folder, sorted, and why others are passed over: (path below the folder, reason)."""

    folder: Path
    files: tuple[Path, ...]
    passed_over: tuple[tuple[str, str], ...] = ()

    def with_suffix(self, *suffixes: str) -> list[Path]:
        """Those with one of ``suffixes``, which are in lower case; files may have them in any."""
        return [path for path in self.files if path.suffix.lower() in suffixes]

    def summary(self) -> list[str]:
        """A line per reason: how many are passed over, and the first of them."""
        by_reason: defaultdict[str, list[str]] = defaultdict(list)
        for name, reason in self.passed_over:
            by_reason[reason].append(printable(name))
        return [
            f"{len(names)} passed over, {reason}: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
            for reason, names in by_reason.items()
        ]


def list_files(folder: Path, *, converted: bool = True) -> Listing:
    """All files of ``folder``, at any depth. Linked folders are entered, each folder once. Hidden files and folders and
    those of tools are passed over, and images that a conversion wrote unless ``converted``. Raises DataError for a
    folder that cannot be opened."""
    files: list[Path] = []
    passed_over: list[tuple[Path, str]] = []
    seen: set[tuple[int, int]] = set()
    folders, links = [folder], []  # linked folders are last, so that a folder has its own name rather than a link's
    while folders or links:
        here = folders.pop() if folders else links.pop(0)
        try:
            found = _entries(here, seen)
        except OSError as error:
            raise DataError(f"cannot be searched ({error.strerror})", path=here) from error
        if found is None:
            passed_over.append((here, "a link to a folder that is read already"))
        for name, kind in found or ():
            path = here / name
            if kind == "file":
                files.append(path)
            elif kind not in ("folder", "linked folder"):
                passed_over.append((path, kind))
            elif not converted and _is_converted(path):
                passed_over.append((path, "images that a conversion wrote"))
            else:
                (links if kind == "linked folder" else folders).append(path)
    reasons = sorted((path.relative_to(folder).as_posix(), reason) for path, reason in passed_over)
    return Listing(folder, tuple(sorted(files)), tuple(reasons))


def _entries(folder: Path, seen: set[tuple[int, int]]) -> list[tuple[str, str]] | None:
    """Names in ``folder`` in order, each with ``file``, ``folder``, ``linked folder``, or why it is passed over; None
    for one of the folders that were ``seen``, to which it is added. Raises OSError for one that cannot be opened."""
    status = os.stat(folder)
    if (status.st_dev, status.st_ino) in seen:
        return None
    seen.add((status.st_dev, status.st_ino))
    found: list[tuple[str, str]] = []
    with os.scandir(folder) as entries:  # which knows the folders among many images without looking at each
        for entry in entries:
            if is_hidden(entry.name):
                kind = "a tool's own folder" if entry.name in _OF_TOOLS else "hidden"
            elif has_half_characters(entry.name):
                kind = "a name that is not UTF-8; rename it"
            else:
                try:
                    kind = "file" if not entry.is_dir() else "linked folder" if entry.is_symlink() else "folder"
                except OSError as error:  # such as a link to itself
                    kind = f"cannot be opened ({error.strerror})"
            found.append((entry.name, kind))
    return sorted(found)


REPORT_SUFFIX = ".conversion_report.json"


def _is_converted(folder: Path) -> bool:
    # OUT/images/NAME next to OUT/NAME.jsonl and its report, whose first record has an image there.
    out = folder.parent.parent
    if folder.parent.name != "images" or not (out / f"{folder.name}{REPORT_SUFFIX}").is_file():
        return False
    try:
        with (out / f"{folder.name}.jsonl").open("rb") as file:
            return f'"images/{folder.name}/'.encode() in file.readline()
    except OSError:
        return False


def folder_levels(root: Path) -> Iterator[list[Path]]:
    """``[root]``, then its folders, then theirs; linked ones too, each once, without hidden ones and those of tools."""
    seen: set[tuple[int, int]] = set()
    level = [root]
    while level:
        yield level
        level = [
            folder / name
            for folder in level
            for name, kind in _entries(folder, seen) or ()
            if kind in ("folder", "linked folder")
        ]


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or a tool's own."""
    return name.startswith(".") or name in _OF_TOOLS


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of :func:`list_files` that have one of ``suffixes``."""
    return list_files(folder).with_suffix(*suffixes)


def only_file(source: Path, suffix: str) -> Path:
    """``source`` if it is a file; else Roboflow's in it, or the only file of this suffix below it that is no
    conversion's report. Raises DataError without one."""
    if source.is_dir():
        found = files_below(source, (suffix,))
        files = [file for file in found if file.parent == source and file.name.startswith("_annotations.")]
        files = files or [file for file in found if not file.name.endswith(REPORT_SUFFIX)]
        if len(files) != 1:
            names = ", ".join(file.relative_to(source).as_posix() for file in files[:5]) or "none"
            raise DataError(f"{len(files)} files *{suffix} below this folder ({names}); name one of them", path=source)
        return files[0]
    if not source.is_file():
        raise DataError("annotation file not found; check the path", path=source)
    return source


def stem_of(file: Path) -> str:
    """What a file of annotations is called, Roboflow's ``train/_annotations.csv`` by its folder."""
    return file.absolute().parent.name if file.name.startswith("_annotations.") else file.stem


# --- names ---


def with_slashes(file: str) -> str:
    """A relative file name as annotated on any system: Windows tools write backslashes."""
    return file.replace("\\", "/")


def unsafe_file_name(file: str) -> bool:
    """Whether ``file`` could leave the folder it is joined to, or can be no file's name."""
    try:
        os.fsencode(file)
    except UnicodeEncodeError:  # half a character, as JSON can write it: "\\ud800"
        return True
    path = PurePosixPath(file)
    absolute = path.is_absolute() or PureWindowsPath(file).is_absolute()
    return not file.strip() or absolute or ".." in path.parts or "\0" in file


def _possible(name: str) -> str:
    """``name`` without what no file's name can have."""
    return with_slashes(name).replace("\0", "").encode(errors="ignore").decode()


@dataclass(frozen=True, slots=True)
class NameMatch:
    """The file of a name, None if not found, with the reason; ``note``: set if it was found by its tail."""

    file: str | None
    note: str | None = None
    problem: str | None = None


def match_names(
    wanted: Sequence[Sequence[str]],
    files: Iterable[str],
    is_file: Callable[[str], bool] | None = None,
    hints: Sequence[Sequence[str]] | None = None,
) -> list[NameMatch]:
    """The file that each entry of ``wanted`` means, among ``files``, which are relative names with slashes.

    Args:
        wanted: the names of each entry, the likeliest first.
        is_file: whether a file of this relative name exists that ``files`` may lack.
        hints: names that an entry is likely to mean without saying so, tried before its tails, and noted as they are.

    A name that is there means that file. Another name means the file that shares most of its last parts, with a note,
    unless several files do or the file is another entry's:

    >>> files = ["train/1.jpg", "train/2.jpg", "val/2.jpg"]
    >>> wanted = [["train/1.jpg"], ["/disk/val/2.jpg"], ["2.jpg"], ["old/1.jpg"]]
    >>> for match in match_names(wanted, files):
    ...     print(match.file, match.note, match.problem, sep=" | ")
    train/1.jpg | None | None
    val/2.jpg | '/disk/val/2.jpg' is not there; took 'val/2.jpg', whose folders fit best | None
    None | None | '2.jpg' is not there, and 2 files have this name: train/2.jpg, val/2.jpg
    None | None | 'old/1.jpg' is not there, and 'train/1.jpg' is the image of another entry
    """
    known = _Names(files)
    exact = [known.exact(names) or _exists(names, is_file) for names in wanted]
    claimed = {file for file in exact if file is not None}
    # If names with folders are right as they are, then a name with another folder means another file.
    pairs = zip(exact, wanted, strict=True)
    trusted = any(file is not None and "/" in file and file in _plain(names) for file, names in pairs)
    found = [
        NameMatch(file) if file is not None else known.by_tail(names, likely, claimed, trusted)
        for file, names, likely in zip(exact, wanted, hints or [()] * len(wanted), strict=True)
    ]
    takers: defaultdict[str | None, set[str]] = defaultdict(set)
    for match, names in zip(found, wanted, strict=True):
        if match.note is not None:
            takers[match.file].add(names[0])
    return [
        match
        if match.note is None or len(takers[match.file]) == 1
        else NameMatch(None, problem=f"{len(takers[match.file])} names would mean {match.file!r} by their last part")
        for match in found
    ]


class _Names:
    def __init__(self, files: Iterable[str]) -> None:
        self._files = dict.fromkeys(files)
        self._by_spelling = _unique((_spelling(file), file) for file in self._files)
        self._without_suffix = _unique((_spelling(_stem(file)), file) for file in self._files)
        self._by_last: defaultdict[str, list[str]] = defaultdict(list)
        self._by_stem: defaultdict[str, list[str]] = defaultdict(list)
        for file in self._files:
            last = posixpath.basename(_spelling(file))
            self._by_last[last].append(file)
            self._by_stem[_stem(last)].append(file)

    def exact(self, names: Sequence[str]) -> str | None:
        for name in _plain(names):
            if name in self._files:
                return name
            if (file := self._by_spelling.get(_spelling(name))) is not None:
                return file
            # A name without a suffix, as tables have them.
            if not _has_suffix(name) and (file := self._without_suffix.get(_spelling(name))) is not None:
                return file
        return None

    def by_tail(self, names: Sequence[str], hints: Sequence[str], claimed: set[str], trusted: bool) -> NameMatch:
        problem = None
        for hint in hints:
            if (file := self.exact([hint])) is not None and file not in claimed:
                return NameMatch(file, f"{names[0]!r} is not there; took {file!r}")
        for given in names:
            parts = [part for part in PurePosixPath(_spelling(with_slashes(given))).parts if part not in ("/", "..")]
            if not parts:
                continue
            candidates = self._by_last.get(parts[-1], [])
            if not candidates and not _has_suffix(parts[-1]):
                candidates = self._by_stem.get(parts[-1], [])
            if not candidates:
                continue
            shared = {file: _shared_folders(file, parts) for file in candidates}
            best = [file for file in candidates if shared[file] == max(shared.values())]
            (file, *others) = best
            if others:
                listed = ", ".join(best[:_SHOWN]) + (", …" if len(best) > _SHOWN else "")
                problem = problem or f"{given!r} is not there, and {len(best)} files have this name: {listed}"
            elif file in claimed:
                problem = problem or f"{given!r} is not there, and {file!r} is the image of another entry"
            elif trusted and 1 + shared[file] < min(len(PurePosixPath(file).parts), len(parts)):
                problem = problem or f"{given!r} is not there, and {file!r} is in another folder than the one it names"
            else:
                why = "whose folders fit best" if len(candidates) > 1 else "the only file of this name"
                return NameMatch(file, f"{given!r} is not there; took {file!r}, {why}")
        return NameMatch(None, problem=problem)


def _plain(names: Sequence[str]) -> list[str]:
    return [str(PurePosixPath(with_slashes(name))) for name in names if not unsafe_file_name(with_slashes(name))]


def can_be_file(path: Path) -> bool:
    """Whether a file can have this path: systems refuse longer ones."""
    sizes = [len(part.encode(errors="surrogatepass")) for part in (str(path), *path.parts)]
    return sizes[0] < _LONGEST_PATH and max(sizes[1:], default=0) <= _LONGEST_NAME


def _exists(names: Sequence[str], is_file: Callable[[str], bool] | None) -> str | None:
    return None if is_file is None else next((name for name in _plain(names) if is_file(name)), None)


def _spelling(name: str) -> str:
    return unicodedata.normalize("NFC", name)  # macOS writes é as two characters


def _stem(name: str) -> str:
    return posixpath.splitext(name)[0] if _has_suffix(name) else name


def _has_suffix(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in SEEN_SUFFIXES


def _shared_folders(file: str, parts: Sequence[str]) -> int:
    count = 0
    for one, other in zip(reversed(PurePosixPath(_spelling(file)).parts[:-1]), reversed(parts[:-1]), strict=False):
        if one != other:
            break
        count += 1
    return count


def _unique(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    listed = list(pairs)
    counts = Counter(key for key, _ in listed)
    return {key: value for key, value in listed if counts[key] == 1}


# --- the images of a folder ---


@dataclass(frozen=True, slots=True)
class FoundImage:
    """The file of a name, its name below the folder, and a ``note`` if it was found by its tail. Without a file
    (``there`` is False) ``path`` is where it would be, and ``problem`` may say more."""

    path: Path
    name: str
    there: bool = True
    note: str | None = None
    problem: str | None = None


@dataclass
class ImageFolder:
    """The images of ``folder`` and below. ``outside``: names may lead out of the folder, if the file exists."""

    folder: Path
    outside: bool = False
    listing: Listing = field(init=False)

    def __post_init__(self) -> None:
        self.listing = list_files(self.folder, converted=False)

    @property
    def images(self) -> list[Path]:
        """Everything that looks like an image, also in formats that are not read."""
        return self.listing.with_suffix(*SEEN_SUFFIXES)

    def find_all(
        self, wanted: Sequence[Sequence[str]], hints: Sequence[Sequence[str]] | None = None
    ) -> list[FoundImage]:
        """The file of each entry, by :func:`match_names`."""
        files = [path.relative_to(self.folder).as_posix() for path in self.images]
        matches = match_names(wanted, files, lambda name: os.path.isfile(self.folder / name), hints)
        return [self._found(names, match) for names, match in zip(wanted, matches, strict=True)]

    def _found(self, names: Sequence[str], match: NameMatch) -> FoundImage:
        if match.note is None and match.file is not None:
            return FoundImage(self.folder / match.file, match.file)
        for name in names if self.outside else ():
            led_to = Path(os.path.normpath(self.folder / _possible(name)))
            if os.path.isfile(led_to):  # False too for a path longer than systems allow
                # The path from the folder, without the steps that lead out of it.
                parts = PurePosixPath(Path(os.path.relpath(led_to, self.folder)).as_posix()).parts
                return FoundImage(led_to, "/".join(part for part in parts if part != ".."))
        if match.file is not None:
            return FoundImage(self.folder / match.file, match.file, note=match.note)
        plain = _plain(names)
        place = plain[0] if plain else PurePosixPath(_possible(names[0])).name or "unnamed"
        return FoundImage(self.folder / place, place, there=False, problem=match.problem)


def check_folder(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise DataError(f"{what} not found; check the path", path=folder)


def images_folder(given: str | Path | None, file: Path) -> Path:
    """The folder of images that was given, or that of the annotation ``file``. Raises DataError if it is none."""
    folder = file.parent if given is None else Path(given)
    check_folder(folder, "images folder")
    return folder
