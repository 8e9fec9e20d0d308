"""Images, folders, patterns and datasets → records to predict on, and the images that cannot be read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.find_images import is_hidden, list_files
from coordexp.data.images import IMAGE_SUFFIXES, SEEN_SUFFIXES, open_rgb, read_header, shape_problem, size_of_image
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.errors import DataError
from coordexp.records import ImageRecord

_GLOB = re.compile(r"[*?\[]")
_PRINTF = re.compile(r"%0?\d*d")  # frame_%05d.png, as video tools name frames
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_WORKERS = 4
_NO_IMAGES = (".txt", ".json", ".jsonl", ".xml", ".csv", ".yaml", ".yml", ".md", ".py", ".html", ".zip", ".tar", ".gz")


@dataclass(frozen=True, slots=True)
class FoundImages:
    """Records to answer, whether they are annotated, and (image, reason) of each that cannot be read. ``names``: of
    both, in order. ``passed_over``: a line per kind of file in a folder that is not an image."""

    records: tuple[ImageRecord, ...]
    annotated: frozenset[str]
    skipped: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


def find_images(sources: Sequence[Path], *, limit: int | None = None, skip_broken: bool = False) -> FoundImages:
    """The records of datasets (``*.jsonl``), and a record without objects for every image file, every image below a
    folder, and every file that a pattern (``frames/*.png``, ``frame_%05d.png``) names.

    Duplicates are predicted once. ``skip_broken``: skip and list images that cannot be decoded, are too thin, or have a
    format that is not read; otherwise the first one raises DataError, as do sources without any image.
    """
    found: dict[str, ImageRecord | str] = {}  # or why it cannot be read
    annotated: set[str] = set()
    passed_over: list[str] = []
    readable = 0
    for source in sources:
        if source.suffix.lower() == ".jsonl":
            for record in read_jsonl(source, limit=limit):
                known = found.get(record.sample_id)
                if known is not None and known != record:
                    raise DataError(
                        f"another dataset has {record.sample_id} too, for another image or other objects; give their "
                        "files different names",
                        path=source,
                    )
                found[record.sample_id] = record
                annotated.add(record.sample_id)
            continue
        for path, name in _image_files(source, len(sources) == 1, passed_over):
            if limit is not None and readable >= limit:
                break
            if name in found:
                continue
            try:
                found[name] = ImageRecord(name, path.absolute(), *_size(path), ())
                readable += 1
            except DataError as error:
                if not skip_broken:
                    raise
                found[name] = str(error)
    chosen = [one for one in found.values() if isinstance(one, ImageRecord)][:limit]
    if skip_broken:
        found |= {chosen[at].sample_id: problem for at, problem in broken_images(chosen).items()}
    else:
        check_dataset([record for record in chosen if record.sample_id in annotated])
    taken = {record.sample_id for record in chosen}
    names = [name for name, one in found.items() if isinstance(one, str) or name in taken]
    skipped = [(name, problem) for name in names if isinstance(problem := found[name], str)]
    records = [record for name in names if isinstance(record := found[name], ImageRecord)]
    if not records:
        reasons = f"; the first: {skipped[0][1]}" if skipped else ""
        raise DataError(f"no image that can be read ({len(skipped)} skipped{reasons})", path=sources[0])
    return FoundImages(tuple(records), frozenset(annotated), tuple(skipped), tuple(names), tuple(passed_over))


def broken_images(records: Sequence[ImageRecord]) -> dict[int, str]:
    """Why images cannot be answered, by position. Decodes all of them: that is cheap compared to answering, and all
    ranks must skip the same images."""

    def problem_of(record: ImageRecord) -> str | None:
        if (problem := shape_problem(record.width, record.height)) is not None:
            return f"{record.image}: {problem}"
        try:
            open_rgb(record.image, expected_size=(record.width, record.height))
        except DataError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_WORKERS) as pool:
        problems = enumerate(pool.map(problem_of, records))
        return {at: problem for at, problem in problems if problem is not None}


def _size(path: Path) -> tuple[int, int]:
    header = read_header(path)
    if (problem := shape_problem(*header.size)) is not None:
        raise DataError(problem, path=path)
    return header.size


def as_path(given: str | Path) -> Path:
    """Raises DataError for an address, and for an empty name, which as a path is the working directory."""
    if not str(given):
        raise DataError("an image has an empty name; give a file, a folder, a pattern or a dataset")
    if _ADDRESS.match(str(given)):
        raise DataError(f"{given}: is an address; nothing is downloaded: save the image and give its file")
    return Path(given)


def is_pattern(path: Path) -> bool:
    """Whether ``path`` may name several files."""
    return _GLOB.search(_PRINTF.sub("*", str(path))) is not None


def _is_picture(path: Path) -> bool:
    # A file of another suffix, or of none, as stores of hashes have them, counts if it can be read.
    suffix = path.suffix.lower()
    return suffix in SEEN_SUFFIXES or (suffix not in _NO_IMAGES and path.is_file() and size_of_image(path) is not None)


def _image_files(source: Path, alone: bool, passed_over: list[str]) -> Iterator[tuple[Path, str]]:
    """(file, name): the names of one folder's images start in it, others as they were given."""
    if source.is_dir():
        listing = list_files(source)
        paths = [path for path in listing.files if _is_picture(path)]
        others = Counter(path.suffix.lower() or "no suffix" for path in set(listing.files).difference(paths))
        passed_over += listing.summary()
        if others:
            counts = ", ".join(f"{suffix}: {count}" for suffix, count in sorted(others.items()))
            passed_over.append(f"{others.total()} files passed over, no images: {counts}")
        if not paths:
            raise DataError(f"no image below this folder; looked for {', '.join(IMAGE_SUFFIXES)}", path=source)
        yield from ((path, (path.relative_to(source) if alone else path).as_posix()) for path in paths)
    elif source.exists():
        yield source, source.as_posix()
    else:
        if not is_pattern(source):
            raise DataError("no such image, folder or dataset", path=source)
        pattern = Path(_PRINTF.sub("*", str(source)))
        found = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
        # `**` finds the copies of tools too, in folders that the user did not name.
        hidden = {path for path in found if any(map(is_hidden, set(path.parts) - set(pattern.parts)))}
        if hidden:
            passed_over.append(f"{len(hidden)} passed over, hidden: {min(hidden)}{', …' if len(hidden) > 1 else ''}")
        paths = sorted(  # frame_9 before frame_10
            (path for path in found if path not in hidden and _is_picture(path)),
            key=lambda path: [int(p) if k % 2 else p for k, p in enumerate(re.split(r"(\d+)", path.as_posix()))],
        )
        if not paths:
            raise DataError("no image has a name like this pattern", path=source)
        yield from ((path, path.as_posix()) for path in paths)
