"""Images, folders, patterns and datasets → records to predict on, and the images that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.images import FRAMES_CURE, HEIF_SUFFIXES, IMAGE_SUFFIXES, open_rgb, read_header, shape_problem
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.errors import DataError
from coordexp.records import ImageRecord

_GLOB = re.compile(r"[*?\[]")
_PRINTF = re.compile(r"%0?\d*d")  # frame_%05d.png, as video tools name frames
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_WORKERS = 4
# Files in a folder of images that are counted, named and skipped, and why.
_UNREAD = {
    **dict.fromkeys(
        (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv"),
        f"a video; extract its frames: {FRAMES_CURE}",
    ),
    **dict.fromkeys(
        (".svg", ".psd", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".jxl", ".jp2", ".exr"),
        "a format that is not read; convert it to PNG or JPEG",
    ),
}
_SEEN = (*IMAGE_SUFFIXES, ".gif", ".avif", *HEIF_SUFFIXES, *_UNREAD)


@dataclass(frozen=True, slots=True)
class FoundImages:
    """Records to answer, whether they are annotated, and (image, reason) of each that cannot be read. ``names``: of
    both, in order."""

    records: tuple[ImageRecord, ...]
    annotated: frozenset[str]
    skipped: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()


def find_images(sources: Sequence[Path], *, limit: int | None = None, skip_broken: bool = False) -> FoundImages:
    """The records of datasets (``*.jsonl``), and a record without objects for every image file, every image below a
    folder, and every file that a pattern (``frames/*.png``, ``frame_%05d.png``) names.

    Duplicates are predicted once. ``skip_broken``: skip and list images that cannot be decoded, are too thin, or have a
    format that is not read; otherwise the first one raises DataError, as do sources without any image.
    """
    found: dict[str, ImageRecord | str] = {}  # or why it cannot be read
    annotated: set[str] = set()
    readable = 0
    for source in sources:
        if source.suffix.lower() == ".jsonl":
            for record in read_jsonl(source, limit=limit):
                found.setdefault(record.sample_id, record)
                annotated.add(record.sample_id)
            continue
        for path, name in _image_files(source, alone=len(sources) == 1):
            if limit is not None and readable >= limit:
                break
            if name in found:
                continue
            try:
                found[name] = ImageRecord(name, path.resolve(), *_size(path), ())
                readable += 1
            except DataError as error:
                if not skip_broken:
                    raise
                found[name] = str(error)
    chosen = [one for one in found.values() if isinstance(one, ImageRecord)][:limit]
    if skip_broken:
        # Decode all of them first: that is cheap compared to prediction, and all ranks must skip the same images.
        def problem_of(record: ImageRecord) -> str | None:
            if (problem := shape_problem(record.width, record.height)) is not None:
                return f"{record.image}: {problem}"
            try:
                open_rgb(record.image, expected_size=(record.width, record.height))
            except DataError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(_WORKERS) as pool:
            for record, problem in zip(chosen, pool.map(problem_of, chosen), strict=True):
                if problem is not None:
                    found[record.sample_id] = problem
    else:
        check_dataset([record for record in chosen if record.sample_id in annotated])
    names = [name for name, one in found.items() if isinstance(one, str) or one in chosen]
    skipped = [(name, problem) for name in names if isinstance(problem := found[name], str)]
    records = [record for name in names if isinstance(record := found[name], ImageRecord)]
    if not records:
        reasons = f"; the first: {skipped[0][1]}" if skipped else ""
        raise DataError(f"no image that can be read ({len(skipped)} skipped{reasons})", path=sources[0])
    return FoundImages(tuple(records), frozenset(annotated), tuple(skipped), tuple(names))


def _size(path: Path) -> tuple[int, int]:
    if (reason := _UNREAD.get(path.suffix.lower())) is not None:
        raise DataError(reason, path=path)
    header = read_header(path)
    if (problem := shape_problem(*header.size)) is not None:
        raise DataError(problem, path=path)
    return header.size


def as_path(given: str | Path) -> Path:
    """Raises DataError for an address."""
    if _ADDRESS.match(str(given)):
        raise DataError(f"{given}: is an address; nothing is downloaded: save the image and give its file")
    return Path(given)


def is_pattern(path: Path) -> bool:
    """Whether ``path`` may name several files."""
    return _GLOB.search(_PRINTF.sub("*", str(path))) is not None


def _image_files(source: Path, alone: bool) -> Iterator[tuple[Path, str]]:
    """(file, name): the names of one folder's images start in it, others as they were given."""
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in _SEEN)
        if not paths:
            raise DataError(f"no image below this folder; looked for {', '.join(IMAGE_SUFFIXES)}", path=source)
        yield from ((path, (path.relative_to(source) if alone else path).as_posix()) for path in paths)
    elif source.exists():
        yield source, source.as_posix()
    else:
        if not is_pattern(source):
            raise DataError("no such image, folder or dataset", path=source)
        pattern = Path(_PRINTF.sub("*", str(source)))
        found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
        paths = sorted(  # frame_9 before frame_10
            (path for path in found if path.suffix.lower() in _SEEN),
            key=lambda path: [int(p) if k % 2 else p for k, p in enumerate(re.split(r"(\d+)", path.as_posix()))],
        )
        if not paths:
            raise DataError("no image has a name like this pattern", path=source)
        yield from ((path, path.as_posix()) for path in paths)
