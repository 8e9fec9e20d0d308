"""CSV with one object a line → JSONL: our own exports, TensorFlow's and Roboflow's, and tables as Kaggle has them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.columns import SHAPES, read_table
from coordexp.data.convert.shapes import (
    BoxFields,
    ConversionReport,
    CornerCheck,
    LeftOut,
    ShapeGeometry,
    SkipReason,
    SourceImage,
    SourceObject,
    box_object,
    check_choice,
    check_folder,
    declared_size,
    finite_numbers,
    number,
    polygon_object,
)
from coordexp.data.find_images import FoundImage, ImageFolder, with_slashes
from coordexp.data.images import size_of_image
from coordexp.errors import DataError

ROBOFLOW = "_annotations.csv"
_BETWEEN_BOXES = re.compile(r"\]\s*,?\s*\[|;")
_NUMBERS = re.compile(r"[\s,()\[\]]+")
_SizeOf = Callable[[], tuple[int, int] | None]  # of the image, read when it is needed


def convert_csv(
    table: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    geometry: ShapeGeometry = "as_annotated",
    columns: str | Mapping[str, str] | None = None,
    desc: str | None = None,
    boxes: BoxFields = "auto",
    normalised: bool = False,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a CSV with a header to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    A line is one object: image, name, and a box in pixels from 0, as corners, as a corner or centre with a size, or as
    one cell ``[x, y, w, h]`` (:data:`~coordexp.data.convert.columns.NAMES`). Optional columns are ``width`` and
    ``height`` of the image and a ``polygon`` of ``x y`` pairs. A line with an image only is an image without objects.
    Separators are commas, semicolons or tabs.

    Args:
        table: the file, or a folder with Roboflow's ``_annotations.csv``.
        images_dir: the folder in which image names start; None: the table's own. Names without a suffix are searched
            at any depth.
        columns: header by meaning, where the header's own names do not tell: ``{"image": "img", "name": "species"}``,
            or ``"image=img,name=species"``.
        desc: the name of all objects, for tables without one.
        boxes: what the numbers of a box with a size hold. ``auto`` reads them as the header says, and one cell as
            ``[x, y, w, h]``, and refuses numbers that look like corners.
        normalised: coordinates are shares of the image's sides. Without it, a table of numbers up to 1 is refused.
    """
    path = Path(table) / ROBOFLOW if Path(table).is_dir() else Path(table)
    check_choice("geometry", geometry, ShapeGeometry)
    check_choice("boxes", boxes, BoxFields)
    folder = path.parent if images_dir is None else Path(images_dir)
    check_folder(folder, "images folder")
    read = read_table(path, columns, with_name=desc is None)
    stem = path.absolute().parent.name if path.name == ROBOFLOW else path.stem
    report = ConversionReport(Path(out_dir) / f"{options.name or stem}.jsonl")
    rows = [
        {meaning: cells[at].strip() if at < len(cells) else "" for meaning, at in read.column_of.items()}
        for cells in read.rows
    ]
    images = _TableImages(folder, rows, report)
    objects: dict[str, list[SourceObject]] = {}
    num_annotated: Counter[str] = Counter()
    reader = _BoxReader(path, read.shape, geometry, boxes, normalised)
    meanings = SHAPES.get(read.shape, ())
    for index, row in enumerate(rows):
        named = _name_in(row)
        if named not in objects:
            report.images_seen += 1
            objects[named] = []
            report.note_found(images.found[named], path.name)
        if not any(row.get(part) for part in ("name", "polygon", *meanings)):
            continue
        name = row["name"] if desc is None else desc
        for box in reader.shapes_of(row):
            num_annotated[named] += 1
            with report.reading_object(named, index):
                objects[named].append(reader.read(index, name, box, row, lambda named=named: images.size(named)))
    reader.refuse()
    sources = [
        SourceImage(found.name, path.name, found.path, images.declared[named], tuple(objects[named]),
                    num_annotated[named], problem=found.problem)
        for named, found in images.found.items()
    ]  # fmt: skip
    return assemble(sources, report, options)


def _name_in(row: Mapping[str, str]) -> str:
    return str(PurePosixPath(with_slashes(row["image"])))


class _TableImages:
    # The image files and their sizes in the table, by their names in it.

    def __init__(self, folder: Path, rows: Sequence[Mapping[str, str]], report: ConversionReport) -> None:
        images = ImageFolder(folder, outside=True)
        report.pass_over(images.listing)
        self.declared: dict[str, tuple[int, int] | None] = {}
        for row in rows:
            size = declared_size(*(number(row.get(side, "")) for side in ("width", "height")))
            self.declared.setdefault(_name_in(row), size)
        names = list(self.declared)
        self.found: dict[str, FoundImage] = dict(zip(names, images.find_all([[n] for n in names]), strict=True))
        self._sizes: dict[str, tuple[int, int] | None] = {}

    def size(self, named: str) -> tuple[int, int] | None:
        """The size in the table or else of the image itself; None if it cannot be read, which assembling reports."""
        if self.declared[named] is None and named not in self._sizes:
            self._sizes[named] = size_of_image(self.found[named].path)
        return self.declared[named] or self._sizes[named]


class _BoxReader:
    # Reads the boxes of a table, and remembers what makes their numbers look like something else.

    def __init__(self, path: Path, shape: str, geometry: ShapeGeometry, boxes: BoxFields, normalised: bool) -> None:
        self._path = path
        self._shape = shape
        self._geometry: ShapeGeometry = geometry
        self._boxes = boxes
        self._normalised = normalised
        self._corners = CornerCheck()
        self._largest = 0.0

    def shapes_of(self, row: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
        """The texts of each box of a line; a polygon has none."""
        if row.get("polygon") or not self._shape:
            yield ()
        elif self._shape == "one cell":
            for text in _BETWEEN_BOXES.split(row["bbox"]):
                yield tuple(part for part in _NUMBERS.split(text) if part)
        else:
            yield tuple(row[meaning] for meaning in SHAPES[self._shape])

    def read(
        self, index: int, desc: str, texts: Sequence[str], row: Mapping[str, str], size_of: _SizeOf
    ) -> SourceObject:
        if not texts:
            ring = finite_numbers([number(text) for text in row.get("polygon", "").replace(",", " ").split()])
            if ring is None or len(ring) < 6 or len(ring) % 2:
                detail = f"{desc}: polygon {row.get('polygon', '')[:80]!r}; expected 'x y x y x y …'"
                raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
            return polygon_object(index, desc, self._in_pixels(ring, size_of), self._geometry)
        given = finite_numbers([number(text) for text in texts])
        if given is None or len(given) != 4:
            raise LeftOut(SkipReason.MALFORMED_GEOMETRY, f"{desc}: {self._shape} {list(texts)} are not four numbers")
        self._largest = max(self._largest, *map(abs, given))
        given = self._in_pixels(given, size_of)
        box = given
        if self._shape != "corners" and self._boxes != "xyxy":
            x, y, width, height = given
            if self._shape == "centre and size":
                x, y = x - width / 2, y - height / 2
            box = (x, y, x + width, y + height)
            if self._boxes == "auto" and (size := size_of()) is not None:
                self._corners.add(given, box, size)
        return box_object(index, desc, box, self._geometry)

    def refuse(self) -> None:
        """Raise DataError if all numbers say that they are not what they were read as."""
        fields = "x, y, width and height" if self._shape != "centre and size" else "centre, width and height"
        self._corners.refuse(self._path, fields)
        if 0 < self._largest <= 1 and not self._normalised:
            raise DataError(
                f"all coordinates are at most {self._largest:g}: shares of the image, not pixels; add --normalised to "
                "read them so",
                path=self._path,
            )

    def _in_pixels(self, values: tuple[float, ...], size_of: _SizeOf) -> tuple[float, ...]:
        if not self._normalised:
            return values
        size = size_of() or (1, 1)  # without a readable image the object is left out with it
        return tuple(value * size[at % 2] for at, value in enumerate(values))
