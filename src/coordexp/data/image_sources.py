"""Images, folders, patterns and datasets → records to predict on, and the images that cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coordexp.data.images import IMAGE_SUFFIXES, open_rgb, read_header
from coordexp.data.jsonl import check_dataset, read_jsonl
from coordexp.errors import DataError
from coordexp.records import ImageRecord

_GLOB = re.compile(r"[*?\[]")
_PRINTF = re.compile(r"%0?\d*d")  # frame_%05d.png, as video tools name frames
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class FoundImages:
    """Records to answer, whether they are annotated, and (image, reason) of each that cannot be read."""

    records: tuple[ImageRecord, ...]
    annotated: frozenset[str]
    skipped: tuple[tuple[str, str], ...] = ()


def find_images(sources: Sequence[Path], *, limit: int | None = None, skip_broken: bool = False) -> FoundImages:
    """The records of datasets (``*.jsonl``), and a record without objects for every image file, every image below a
    folder, and every file that a pattern (``frames/*.png``, ``frame_%05d.png``) names.

    Duplicates are predicted once. ``skip_broken``: skip and list images that cannot be decoded; otherwise the first one
    raises DataError, as do sources without any image.
    """
    records: dict[str, ImageRecord] = {}
    annotated: set[str] = set()
    skipped: list[tuple[str, str]] = []
    for source in sources:
        if source.suffix.lower() == ".jsonl":
            for record in read_jsonl(source, limit=limit):
                records.setdefault(record.sample_id, record)
                annotated.add(record.sample_id)
            continue
        for path, name in _image_files(source, alone=len(sources) == 1):
            if limit is not None and len(records) >= limit:
                break
            try:
                width, height = read_header(path).size
            except DataError as error:
                if not skip_broken:
                    raise
                skipped.append((name, str(error)))
                continue
            records.setdefault(name, ImageRecord(name, path.resolve(), width, height, ()))
    chosen = list(records.values())[:limit]
    if skip_broken:
        # Decode all of them first: that is cheap compared to prediction, and all ranks must skip the same images.
        def decode_problem(record: ImageRecord) -> str | None:
            try:
                open_rgb(record.image, expected_size=(record.width, record.height))
            except DataError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(_WORKERS) as pool:
            problems = dict(zip((record.sample_id for record in chosen), pool.map(decode_problem, chosen), strict=True))
        chosen = [record for record in chosen if problems[record.sample_id] is None]
        skipped += [(name, problem) for name, problem in problems.items() if problem is not None]
    else:
        check_dataset([record for record in chosen if record.sample_id in annotated])
    if not chosen:
        reasons = f"; the first: {skipped[0][1]}" if skipped else ""
        raise DataError(f"no image that can be read ({len(skipped)} skipped{reasons})", path=sources[0])
    return FoundImages(tuple(chosen), frozenset(annotated), tuple(skipped))


def is_pattern(path: Path) -> bool:
    """Whether ``path`` may name several files."""
    return _GLOB.search(_PRINTF.sub("*", str(path))) is not None


def _image_files(source: Path, alone: bool) -> Iterator[tuple[Path, str]]:
    """(file, name): the names of one folder's images start in it, others as they were given."""
    if source.is_dir():
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
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
            (path for path in found if path.suffix.lower() in IMAGE_SUFFIXES),
            key=lambda path: [int(p) if k % 2 else p for k, p in enumerate(re.split(r"(\d+)", path.as_posix()))],
        )
        if not paths:
            raise DataError("no image has a name like this pattern", path=source)
        yield from ((path, path.as_posix()) for path in paths)
