"""CSV (one box a line) → JSONL: TensorFlow's and Roboflow's columns, our own exports', or any with the names below."""

from __future__ import annotations

import csv
import os
from pathlib import Path, PurePosixPath

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.shapes import (
    ConversionReport,
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
    unsafe_file_name,
    with_slashes,
)
from coordexp.data.files import read_text
from coordexp.errors import DataError

ROBOFLOW = "_annotations.csv"
# The accepted names of each column.
COLUMNS = {
    "image": ("image", "filename", "file_name", "file", "path", "image_path", "image_name"),
    "name": ("name", "class", "label", "category", "class_name", "label_name"),
    "x1": ("x1", "xmin", "x_min", "left"),
    "y1": ("y1", "ymin", "y_min", "top"),
    "x2": ("x2", "xmax", "x_max", "right"),
    "y2": ("y2", "ymax", "y_max", "bottom"),
}
_OPTIONAL = {
    "width": ("width", "image_width"),
    "height": ("height", "image_height"),
    "polygon": ("polygon",),
}


def convert_csv(
    table: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    geometry: ShapeGeometry = "as_annotated",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a CSV with a header to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    A line is one object: image, name, and corners in pixels from 0 (:data:`COLUMNS`); optional columns are ``width``
    and ``height`` of the image and a ``polygon`` of ``x y`` pairs. A line with an image only is an image without
    objects. Separators are commas, semicolons or tabs.

    Args:
        table: the file, or a folder with Roboflow's ``_annotations.csv``.
        images_dir: the folder in which image names start; None: the table's own.
    """
    path = Path(table) / ROBOFLOW if Path(table).is_dir() else Path(table)
    check_choice("geometry", geometry, ShapeGeometry)
    folder = path.parent if images_dir is None else Path(images_dir)
    check_folder(folder, "images folder")
    rows, column_of = _read(path)
    stem = path.absolute().parent.name if path.name == ROBOFLOW else path.stem
    report = ConversionReport(Path(out_dir) / f"{options.name or stem}.jsonl")
    sizes: dict[str, tuple[int, int] | None] = {}
    objects: dict[str, list[SourceObject]] = {}
    for index, cells in enumerate(rows):
        row = {meaning: cells[at].strip() if at < len(cells) else "" for meaning, at in column_of.items()}
        named = str(PurePosixPath(with_slashes(row["image"])))
        if named not in objects:
            report.images_seen += 1
            objects[named] = []
            sizes[named] = declared_size(*(number(row.get(side, "")) for side in ("width", "height")))
        if any(row.get(part) for part in ("name", "x1", "y1", "x2", "y2", "polygon")):
            with report.reading_object(named, index):
                desc = row["name"]
                if row.get("polygon"):
                    ring = finite_numbers([number(text) for text in row["polygon"].replace(",", " ").split()])
                    if ring is None or len(ring) < 6 or len(ring) % 2:
                        detail = f"{desc}: polygon {row['polygon'][:80]!r}; expected 'x y x y x y …'"
                        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
                    objects[named].append(polygon_object(index, desc, ring, geometry))
                    continue
                corners = [row[side] for side in ("x1", "y1", "x2", "y2")]
                box = finite_numbers([number(text) for text in corners])
                if box is None:
                    detail = f"{desc}: corners {corners} are not four numbers"
                    raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
                objects[named].append(box_object(index, desc, box, geometry))
    sources = []
    for named, shapes in objects.items():
        file, image = named, folder / named
        if unsafe_file_name(named):  # used if that file exists, otherwise its last part
            file = PurePosixPath(named).name or "unnamed"
            led_to = Path(os.path.normpath(folder / named.replace("\0", "")))
            image = led_to if led_to.is_file() else folder / file
        sources.append(SourceImage(file, path.name, image, sizes[named], tuple(shapes)))
    return assemble(sources, report, options)


def _read(path: Path) -> tuple[list[list[str]], dict[str, int]]:
    # The lines after the header, and the index of each column.
    text = read_text(path)
    first = text.split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    header, *rows = csv.reader(text.splitlines(), delimiter=separator) if text.strip() else [[]]
    known = {cell.strip().lower().replace(" ", "_"): at for at, cell in reversed(list(enumerate(header)))}
    column_of = {}
    for meaning, names in {**COLUMNS, **_OPTIONAL}.items():
        at = next((known[name] for name in names if name in known), None)
        if at is not None:
            column_of[meaning] = at
        elif meaning in COLUMNS:
            raise DataError(
                f"no column {meaning!r} (or {', '.join(names[1:])}) in the header {', '.join(header)[:120]!r}; the "
                "first line names the columns, and corners are pixels",
                path=path,
                line=1,
            )
    return [row for row in rows if any(cell.strip() for cell in row)], column_of
