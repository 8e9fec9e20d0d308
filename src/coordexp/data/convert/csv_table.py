"""CSV with one object a line → JSONL: our own exports, TensorFlow's and Roboflow's, and tables as Kaggle has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.columns import SHAPES, read_table
from coordexp.data.convert.numbers import Meaning
from coordexp.data.convert.report import ConversionReport, Form, LeftOut, SkipReason
from coordexp.data.convert.shapes import BoxFields, ShapeGeometry, declared_size, number, shape_of
from coordexp.data.find_images import ImageFolder, images_folder, only_file, stem_of, with_slashes

_BETWEEN_BOXES = re.compile(r"\]\s*,?\s*\[|;")
_NUMBERS = re.compile(r"[\s,()\[\]]+")


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
    """Convert a CSV with a header.

    A line is one object: image, name, and a box in pixels from 0, as corners, as a corner or centre with a size, or as
    one cell ``[x, y, w, h]`` (:data:`~coordexp.data.convert.columns.NAMES`). Optional columns are ``width`` and
    ``height`` of the image and a ``polygon`` of ``x y`` pairs. A line with an image only is an image without objects;
    one with more cells than the header, such as a name with a comma and without quotes, is left out.
    Separators are commas, semicolons or tabs. Image names without a suffix are searched at any depth. ``columns``: the
    header by meaning, as a mapping too: ``{"image": "img", "name": "species"}``.
    """
    path = only_file(Path(table), ".csv")
    unit = "shares" if normalised else "pixels"
    meaning = Meaning(path, unit, geometry, boxes, "add --normalised to read them so")
    images = ImageFolder(images_folder(images_dir, path), outside=True)
    read = read_table(path, columns, with_name=desc is None)
    report = ConversionReport(Path(out_dir) / f"{options.name or stem_of(path)}.jsonl")
    first_rows: dict[str, dict[str, str]] = {}
    for row in read.rows:
        first_rows.setdefault(_name_in(row), row)
    annotations = [path.name] * len(first_rows)
    found = report.find_all(images, [[named] for named in first_rows], path.name, annotations=annotations)
    report.note_unnamed(images, found, path.name)
    sources = dict(zip(first_rows, found, strict=True))
    report.images_seen = len(sources)
    for named, source in sources.items():
        row = first_rows[named]
        source.sizeless = "width" not in row
        source.declared_size = declared_size(*(number(row.get(side, "")) for side in ("width", "height")))
    for index, row in enumerate(read.rows):
        named = _name_in(row)
        source = sources[named]
        if index in read.too_long:
            with report.reading_object(source, index, named):
                raise LeftOut(SkipReason.MALFORMED_GEOMETRY, read.too_long[index])
            continue
        if not any(row.get(part) for part in ("name", "polygon", *SHAPES.get(read.shape, ()))):
            continue
        shapes = list(_shapes_of(row, read.shape))
        names = _names_of(row["name"], len(shapes), read.shape) if desc is None else [desc] * len(shapes)
        for at, (form, values, shown) in enumerate(shapes):
            with report.reading_object(source, index, named):
                if names is None:
                    detail = f"{row['name'][:80]!r} are not {len(shapes)} names, as there are boxes"
                    raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
                source.objects.append([shape_of(index, names[at], form, values, shown)])
    return assemble(found, report, options, meaning)


def _name_in(row: Mapping[str, str]) -> str:
    return str(PurePosixPath(with_slashes(row["image"])))


def _names_of(cell: str, count: int, shape: str) -> list[str] | None:
    # Where a cell may hold several boxes, another may hold a list of names, one a box; otherwise it is the name of all.
    # None for a list of another length.
    try:
        names = ast.literal_eval(cell) if cell.startswith("[") and shape == "one cell" else cell
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        names = cell
    if not isinstance(names, list):
        return [cell] * count
    return names if len(names) == count and all(isinstance(name, str) for name in names) else None


def _shapes_of(row: Mapping[str, str], shape: str) -> Iterator[tuple[Form, list[float | None], str]]:
    # Each shape of a line: its form, its numbers, and its text.
    if row.get("polygon") or not shape:
        text = row.get("polygon", "")
        yield "ring", [number(part) for part in text.replace(",", " ").split()], text
    elif shape == "one cell":
        for text in _BETWEEN_BOXES.split(row["bbox"]):
            yield "size", [number(part) for part in _NUMBERS.split(text) if part], text
    else:
        form: Form = "corners" if shape == "corners" else "centre" if shape == "centre and size" else "size"
        texts = [row[meaning] for meaning in SHAPES[shape]]
        yield form, [number(text) for text in texts], f"{shape} {texts}"
