"""Photographs cut into overlapping tiles: which tiles there are, which objects each contains, and their dataset."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from PIL import Image

from coordexp.data.completed import completion_of_part
from coordexp.data.images import JPEG_SUFFIXES, open_rgb, save_image
from coordexp.data.jsonl import write_jsonl
from coordexp.data.polygons import canonical_ring, clipped_shape, shape_area
from coordexp.data.preparation import original_image
from coordexp.data.shards import shard_of
from coordexp.errors import ConfigError
from coordexp.geometry import to_bin, to_pixel
from coordexp.records import GTObject, ImageRecord

TILE = "tile"  # key of a tile's metadata
# Keys of a tile's metadata while its photograph is answered, which no user's own metadata has.
_PHOTOGRAPH, _WINDOW = "@photograph", "@window"
_WHOLE = 1 - 1e-9  # of an object's area, up to rounding
_WORKERS = 4

Window = tuple[int, int, int, int]
"""x1, y1, x2, y2 of a tile in whole pixels of its photograph; x2 and y2 are the edges after its last pixels."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of ``width`` x ``height`` pixels; neighbours share at least ``overlap`` (0 to 0.9) of a side. Raises
    ConfigError for other numbers."""

    width: int
    height: int
    overlap: float = 0.2

    def __post_init__(self) -> None:
        if min(self.width, self.height) < 1:
            raise ConfigError(f"tiles of {self.width}x{self.height} pixels; give at least 1 pixel a side")
        if not isinstance(self.overlap, int | float) or not 0 <= self.overlap <= 0.9:
            raise ConfigError(f"overlap of tiles: {self.overlap!r}; give a share of a tile's side, from 0 to 0.9")

    @classmethod
    def of(cls, size: str | SupportsIndex | Sequence[SupportsIndex], overlap: float = 0.2) -> Tiling:
        """``size``: 512, "512", "640x480" or (640, 480), width first. Raises ConfigError for anything else."""
        try:
            if isinstance(size, bool):
                raise TypeError
            if isinstance(size, str):
                sides = [int(side) for side in size.lower().split("x")]
            else:
                sides = [index(side) for side in (size if isinstance(size, Sequence) else [size])]
            width, height = sides * 2 if len(sides) == 1 else sides
        except (TypeError, ValueError):
            raise ConfigError(f"tiles of {size!r}; give a side in pixels, such as 512, or 640x480") from None
        return cls(width, height, overlap)

    @classmethod
    def asked(cls, tiles: str | SupportsIndex | Sequence[SupportsIndex] | None, overlap: float | None) -> Tiling | None:
        """As :meth:`of`; None without ``tiles``, to which ``overlap`` belongs. Raises ConfigError."""
        if tiles is None and overlap is not None:
            raise ConfigError("overlap has no use here; it belongs to tiles (--tiles)")
        return None if tiles is None else cls.of(tiles, 0.2 if overlap is None else overlap)

    def windows(self, width: int, height: int) -> list[Window]:
        """The tiles of a photograph of this size, row by row: as few as the overlap allows, evenly spread. All have the
        same size, unless the photograph is smaller."""
        across, down = _starts(width, self.width, self.overlap), _starts(height, self.height, self.overlap)
        return [(x, y, min(x + self.width, width), min(y + self.height, height)) for y in down for x in across]


def _starts(side: int, tile: int, overlap: float) -> list[int]:
    last = max(0, side - tile)
    steps = -(-last // max(1, tile - round(tile * overlap)))
    return [round(last * k / max(1, steps)) for k in range(steps + 1)]


def tile_records(records: Iterable[ImageRecord], tiling: Tiling) -> list[ImageRecord]:
    """A record without objects for each tile of each photograph, in order. Its image is the photograph still:
    :class:`CutTiles` has the tiles' own."""
    tiles = []
    for record in records:
        for window in tiling.windows(record.width, record.height):
            name = f"{record.sample_id}#{','.join(map(str, window))}"
            size = window[2] - window[0], window[3] - window[1]
            place = {_PHOTOGRAPH: record.sample_id, _WINDOW: window}
            tiles.append(ImageRecord(name, record.image, *size, (), place))
    return tiles


def whole_of(record: ImageRecord) -> str:
    """The sample id of the photograph of one of :func:`tile_records`; of other records, their own."""
    return record.metadata.get(_PHOTOGRAPH, record.sample_id)


class CutTiles(Sequence[ImageRecord]):
    """:func:`tile_records`, each cut into a PNG in ``folder`` when it is read, because all backends read files.

    The last ``kept`` files exist, and one photograph is in memory, so read tiles in order. Reading raises DataError if
    the photograph cannot be read."""

    def __init__(self, tiles: Sequence[ImageRecord], folder: Path, kept: int) -> None:
        self._tiles = tiles
        self._folder = folder
        self._kept = kept
        self._files: deque[Path] = deque()
        self._count = 0
        self._photograph: tuple[Path, Image.Image] | None = None

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: Any) -> Any:  # no slices: their files could be gone
        tile = self._tiles[index]
        if self._photograph is None or self._photograph[0] != tile.image:
            self._photograph = None  # before the next one is decoded
            self._photograph = tile.image, open_rgb(tile.image)
        while len(self._files) >= self._kept:
            self._files.popleft().unlink()
        self._count += 1
        path = self._folder / f"tile-{self._count}.png"
        self._photograph[1].crop(tile.metadata[_WINDOW]).save(path, compress_level=1)
        self._files.append(path)
        return replace(tile, image=path)


@dataclass(frozen=True, slots=True)
class TileCounts:
    """Counts of :func:`write_tiles`.

    ``whole`` and ``cut`` objects of tiles are written, ``left_out`` ones have too small a share in that tile; one of
    the ``annotated`` objects may be in several tiles, and ``lost`` ones are in none. ``negatives``: written tiles
    without objects; ``negatives_left_out``: those that are not written. ``resized``: photographs that a conversion
    resized."""

    photographs: int = 0
    tiles: int = 0
    annotated: int = 0
    whole: int = 0
    cut: int = 0
    left_out: int = 0
    lost: int = 0
    negatives: int = 0
    negatives_left_out: int = 0
    resized: int = 0


def objects_in(record: ImageRecord, window: Window, min_area_ratio: float) -> tuple[dict[int, GTObject], Counter[str]]:
    """The objects of a tile, in its own bins, by their number in ``record``; counts of ``whole``, ``cut`` and
    ``left_out`` ones. An object is left out if less than ``min_area_ratio`` of its area is in the tile."""
    sides = window[2] - window[0], window[3] - window[1]
    found: dict[int, GTObject] = {}
    counts: Counter[str] = Counter()
    for number, obj in enumerate(record.objects):
        size = record.width, record.height
        points = [to_pixel(k, size[at % 2]) for at, k in enumerate(obj.bins)]
        part, share = clipped_shape(obj.kind, points, window)
        if not part:
            continue
        bins = tuple(to_bin(x - window[at % 2], sides[at % 2]) for at, x in enumerate(part))
        if obj.kind == "poly":
            bins = canonical_ring(bins)
        collapsed = (obj.kind == "poly" and len(bins) < 6) or (share < _WHOLE and shape_area(obj.kind, bins) == 0)
        if share < min_area_ratio or collapsed:
            counts["left_out"] += 1
            continue
        counts["whole" if share >= _WHOLE else "cut"] += 1
        found[number] = replace(obj, bins=bins)
    return found, counts


def write_tiles(
    records: Sequence[ImageRecord],
    out: Path,
    tiling: Tiling,
    *,
    min_area_ratio: float = 0.1,
    negatives: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TileCounts:
    """Cut the photographs of ``records``, and write the dataset of their tiles to ``out``, which appears last; images
    are in ``images/STEM`` next to it, JPEG of JPEG and PNG of all others. An older ``out`` is removed first: its images
    are replaced.

    A tile's ``metadata.tile`` has the photograph (path from ``out``, size, line, its own metadata) and the tile's
    place in it; objects that a model added keep their ``metadata.completion``. :func:`coordexp.tile` explains the
    arguments. Raises ConfigError for a number outside of its range, and DataError if a photograph cannot be read, or
    has another size than its record.
    """
    for name, value in (("min_area_ratio", min_area_ratio), ("negatives", negatives)):
        if not (isinstance(value, Real) and 0 <= value <= 1):
            raise ConfigError(f"{name}: {value!r}; give a share, from 0 to 1")
    out.unlink(missing_ok=True)
    counts: Counter[str] = Counter(photographs=len(records))
    folder = out.parent / "images" / out.stem
    folder.mkdir(parents=True, exist_ok=True)
    stems = Counter(record.image.stem for record in records)
    taken: set[str] = set(stems)

    def tiles() -> Iterator[ImageRecord]:
        for done, record in enumerate(records):
            if progress is not None:
                progress(done, len(records))
            # One name for each line: photographs of several folders, or several lines of one.
            stem = record.image.stem
            if stems[stem] > 1:
                stem = next(one for n in itertools.count(done + 1) if (one := f"{record.image.stem}-{n}") not in taken)
                taken.add(stem)
            jpeg = record.image.suffix.lower() in JPEG_SUFFIXES
            written, covered = [], set()
            for window in tiling.windows(record.width, record.height):
                objects, of_tile = objects_in(record, window, min_area_ratio)
                draw = random.Random(f"tile:{seed}:{record.sample_id}:{window}").random()
                if not objects and draw >= negatives:
                    counts["negatives_left_out"] += 1
                    counts.update(of_tile)
                    continue
                counts.update(of_tile, tiles=1, negatives=int(not objects))
                covered.update(objects)
                path = folder / f"{stem}_{'_'.join(map(str, window))}{'.jpg' if jpeg else '.png'}"
                about = {**_photograph(record, out), "box": list(window), **of_tile}
                size = window[2] - window[0], window[3] - window[1]
                metadata = {TILE: about, **completion_of_part(record, list(objects))}
                written.append((window, ImageRecord(str(path), path, *size, tuple(objects.values()), metadata)))
            original = original_image(record)
            counts["resized"] += original is not None and (original.width, original.height) != (
                record.width,
                record.height,
            )
            counts["annotated"] += len(record.objects)
            counts["lost"] += len(record.objects) - len(covered)
            if written:
                image = open_rgb(record.image, expected_size=(record.width, record.height))
                for _ in pool.map(lambda one, image=image: save_image(image.crop(one[0]), one[1].image), written):
                    pass
            yield from (tile for _, tile in written)

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="tiles") as pool:
        write_jsonl(tiles(), out)
    return TileCounts(**counts)


def photograph_of(record: ImageRecord) -> str | None:
    """The path of the photograph that a tile of :func:`write_tiles` was cut from, of a tile of a tile too; None for
    other records."""
    photograph, metadata = None, record.metadata
    while (found := _cut_from(Path(photograph or record.image), metadata)) is not None:
        photograph, metadata = found, metadata[TILE].get("metadata")
    return photograph


def _cut_from(image: Path, metadata: Any) -> str | None:
    """The path of what the tile ``image`` with ``metadata`` was cut from: a photograph, or a larger tile."""
    tile = metadata.get(TILE) if isinstance(metadata, Mapping) else None
    source = tile.get("image") if isinstance(tile, Mapping) else None
    if not isinstance(source, str):
        return None  # or metadata of the user's own
    # The path is given from the JSONL. Tiles are in images/STEM next to it; packed ones in a shard next to it.
    shard = shard_of(str(image))
    return os.path.normpath((Path(shard).parent if shard else image.parent.parent.parent) / source)


def packed_tile(record: ImageRecord, out: Path) -> ImageRecord:
    """The record for a JSONL ``out`` with shards: a tile's photograph is given from there; others are unchanged."""
    source = _cut_from(record.image, record.metadata)
    if source is None:
        return record
    tile = {**record.metadata[TILE], "image": _from(out, source)}
    return replace(record, metadata={**record.metadata, TILE: tile})


def _from(out: Path, image: str | Path) -> str:
    return Path(os.path.relpath(image, os.path.abspath(out.parent))).as_posix()


def _photograph(record: ImageRecord, out: Path) -> dict[str, Any]:
    size = {"width": record.width, "height": record.height}
    about = {"image": _from(out, record.image), **size, "line": record.sample_id}
    return about | ({"metadata": dict(record.metadata)} if record.metadata else {})
