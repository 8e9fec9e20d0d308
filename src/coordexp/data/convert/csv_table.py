"""CSV with one object a line → JSONL: our own exports, TensorFlow's and Roboflow's, and tables as Kaggle has them."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning
from coordexp.data.convert.report import ConversionReport, Form, LeftOut, SkipReason
from coordexp.data.convert.shapes import BoxFields, ShapeGeometry, declared_size, number, shape_of
from coordexp.data.find_images import ImageFolder, images_folder, only_file, stem_of, with_slashes
from coordexp.errors import DataError
from coordexp.reading import csv_rows, read_text

_BETWEEN_BOXES = re.compile(r"\]\s*,?\s*\[|;")
_NUMBERS = re.compile(r"[\s,()\[\]]+")


# The accepted names of each column, in lower case and with underscores.
NAMES = {
    "image": ("image", "filename", "file_name", "file", "path", "image_path", "image_name", "image_id", "imageid",
              "img", "img_path", "image_file", "image_filename", "filepath", "file_path"),
    "name": ("name", "class", "label", "category", "class_name", "label_name", "category_name", "classname",
             "labelname", "labels", "classes", "class_label"),
    "x1": ("x1", "xmin", "x_min", "left", "bbox_xmin", "bbox_x1"),
    "y1": ("y1", "ymin", "y_min", "top", "bbox_ymin", "bbox_y1"),
    "x2": ("x2", "xmax", "x_max", "right", "bbox_xmax", "bbox_x2"),
    "y2": ("y2", "ymax", "y_max", "bottom", "bbox_ymax", "bbox_y2"),
    "x": ("x", "bbox_x", "box_x"),
    "y": ("y", "bbox_y", "box_y"),
    "cx": ("cx", "x_center", "center_x", "xc", "x_centre", "centre_x", "xcenter"),
    "cy": ("cy", "y_center", "center_y", "yc", "y_centre", "centre_y", "ycenter"),
    "w": ("w", "box_width", "bbox_width", "bbox_w", "box_w"),
    "h": ("h", "box_height", "bbox_height", "bbox_h", "box_h"),
    "bbox": ("bbox", "box", "bounding_box", "bboxes", "boxes"),
    "polygon": ("polygon",),
    "width": ("image_width", "img_width"),  # of the image; and width and height, unless they are the box's
    "height": ("image_height", "img_height"),
}  # fmt: skip
# The columns that hold a box; the one of these that a table has in full is read.
SHAPES: dict[str, tuple[str, ...]] = {
    "corners": ("x1", "y1", "x2", "y2"),
    "corner and size": ("x", "y", "w", "h"),
    "centre and size": ("cx", "cy", "w", "h"),
    "one cell": ("bbox",),
}


@dataclass(frozen=True, slots=True)
class Table:
    """The lines after the header, by the meaning of their cells; how a box is written, one of :data:`SHAPES`; and, by
    their positions, what is wrong with lines that have more cells than the header."""

    rows: list[dict[str, str]]
    shape: str
    too_long: dict[int, str]


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
    one cell ``[x, y, w, h]`` (:data:`NAMES`). Optional columns are ``width`` and ``height`` of the image and a
    ``polygon`` of ``x y`` pairs. A line with an image only is an image without objects; one with more cells than the
    header, such as a name with a comma and without quotes, is left out. Image names without a suffix are searched at
    any depth. ``columns``: the header by meaning, as a mapping too: ``{"image": "img", "name": "species"}``.
    """
    path = only_file(Path(table), ".csv")
    meaning = Meaning(path, "shares" if normalised else "pixels", geometry, boxes)
    images = ImageFolder(images_folder(images_dir, path), outside=True)
    read = read_table(path, columns, with_name=desc is None)
    report = ConversionReport(Path(out_dir) / f"{options.name or stem_of(path)}.jsonl")
    first_rows: dict[str, dict[str, str]] = {}
    for row in read.rows:
        first_rows.setdefault(_name_in(row), row)
    found = report.find_all(images, [[named] for named in first_rows], path.name)
    report.note_unnamed(images, found, path.name)
    sources = dict(zip(first_rows, found, strict=True))
    report.images_seen = len(sources)
    for named, source in sources.items():
        row = first_rows[named]
        source.sizeless = "width" not in row
        source.declared_size = declared_size(row.get("width"), row.get("height"))
    for index, row in enumerate(read.rows):
        source = sources[_name_in(row)]
        if index in read.too_long:
            with report.reading_object(source, index):
                raise LeftOut(SkipReason.MALFORMED_GEOMETRY, read.too_long[index])
            continue
        if not any(row.get(part) for part in ("name", "polygon", *SHAPES.get(read.shape, ()))):
            continue
        shapes = list(_shapes_of(row, read.shape))
        names = _names_of(row["name"], len(shapes), read.shape) if desc is None else [desc] * len(shapes)
        for at, (form, values, shown) in enumerate(shapes):
            with report.reading_object(source, index):
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


def is_formula(text: str) -> bool:
    """Whether a spreadsheet computes a cell of this text."""
    return text.startswith(("=", "+", "-", "@"))


def read_table(path: Path, columns: str | Mapping[str, str] | None, with_name: bool) -> Table:
    """Read a CSV with a header; separators are commas, semicolons or tabs. ``columns``: header by meaning, as a mapping
    or ``meaning=header,…``; ``with_name``: a column of names is needed. Raises DataError if a column is missing, or if
    the header can be read in several ways."""
    text = read_text(path)
    separator = max(",;\t", key=text.split("\n", 1)[0].count)
    header, *lines = [row for _, row in csv_rows(io.StringIO(text, newline=""), path, separator)] or [[]]
    lines = [[_unquoted(cell).strip() for cell in line] for line in lines if any(cell.strip() for cell in line)]
    too_long = {
        index: f"{len(line)} cells, and the header has {len(header)}: put a cell with a comma in quotes, or name all "
        f"columns: {','.join(line)[:80]!r}"
        for index, line in enumerate(lines)
        if any(line[len(header) :])
    }
    lines = [line + [""] * (len(header) - len(line)) for line in lines]
    found = _Header(path, header, lines)
    given = found.given(columns)
    if not with_name and "name" in given:
        raise DataError("--desc names all objects, and --columns name=… a column of names; give one", path=path)
    column_of = {meaning: at for meaning in NAMES if (at := found.column(meaning, given)) is not None}
    if {"x0", "y0", "x1", "y1"} <= found.at.keys() and not {"x1", "y1", "x2", "y2"} & given.keys():
        column_of |= {"x1": found.at["x0"], "y1": found.at["y0"], "x2": found.at["x1"], "y2": found.at["y1"]}
    _take_sizes(found, column_of)
    complete = [shape for shape, needed in SHAPES.items() if all(meaning in column_of for meaning in needed)]
    chosen = [shape for shape in complete if any(meaning in given for meaning in SHAPES[shape])]
    shapes = chosen or complete
    if len(shapes) > 1:
        named = [{meaning: header[column_of[meaning]] for meaning in SHAPES[shape]} for shape in shapes]
        listed = ", ".join(f"({', '.join(headers.values())})" for headers in named)
        example = ",".join(f"{meaning}={name}" for meaning, name in named[0].items())
        raise found.problem(
            f"several columns may be the box: {listed}", f"; choose some with --columns, e.g. --columns {example}"
        )
    for meaning in ("image", *(("name",) if with_name else ())):
        if meaning not in column_of:
            others = ", ".join(NAMES[meaning][1:])
            one_class = "; a table of a single class needs --desc NAME" if meaning == "name" else ""
            raise found.problem(f"no column {meaning!r} (or {others})", f"; or write --columns {meaning}=…{one_class}")
    if not shapes and "polygon" not in column_of:
        wanted = "; ".join(", ".join(needed) for needed in SHAPES.values())
        raise found.problem(f"no columns of a box ({wanted})", "; or write --columns x1=…,y1=…,x2=…,y2=…")
    rows = [{meaning: line[at] for meaning, at in column_of.items()} for line in lines]
    return Table(rows, shapes[0] if shapes else "", too_long)


class _Header:
    def __init__(self, path: Path, cells: list[str], rows: list[list[str]]) -> None:
        self.path, self.cells, self.rows = path, cells, rows
        self.at = {_plain(cell): at for at, cell in reversed(list(enumerate(cells)))}

    def problem(self, what: str, further: str = "") -> DataError:
        seen = f"in the header {', '.join(self.cells)[:160]!r}"
        return DataError(f"{what} {seen}; the first line names the columns{further}", path=self.path, line=1)

    def given(self, columns: str | Mapping[str, str] | None) -> dict[str, int]:
        if columns is None:
            return {}
        if isinstance(columns, str):
            pairs = [part.partition("=") for part in columns.split(",") if part.strip()]
            columns = {meaning.strip(): name.strip() for meaning, _, name in pairs}
        chosen = {}
        for meaning, name in columns.items():
            if meaning not in NAMES:
                raise DataError(f"--columns {meaning}={name}: unknown meaning; use {', '.join(NAMES)}", path=self.path)
            if _plain(name) not in self.at:
                raise self.problem(f"--columns {meaning}={name}: no column {name!r}")
            chosen[meaning] = self.at[_plain(name)]
        return chosen

    def column(self, meaning: str, given: Mapping[str, int]) -> int | None:
        if meaning in given:
            return given[meaning]
        taken = set(given.values())
        places = [self.at[name] for name in NAMES[meaning] if name in self.at and self.at[name] not in taken]
        if len(places) > 1 and any(len({row[at] for at in places}) > 1 for row in self.rows):
            named = ", ".join(repr(self.cells[at]) for at in places)
            raise self.problem(
                f"several columns may be the {meaning}, and differ: {named}",
                f"; choose one with --columns {meaning}={self.cells[places[0]]}",
            )
        return places[0] if places else None


def _take_sizes(found: _Header, column_of: dict[str, int]) -> None:
    # width and height are those of the box if no other columns can be, and those of the image otherwise. xmin and ymin
    # next to a width and a height are the corner of that box.
    has_corners = "x2" in column_of and "y2" in column_of
    needs_sizes = not has_corners and any(start in column_of for start in ("x", "cx", "x1"))
    for size, meaning in (("w", "width"), ("h", "height")):
        at = found.at.get(meaning)
        if at is not None and at not in column_of.values():
            column_of.setdefault(size if needs_sizes and size not in column_of else meaning, at)
    if not has_corners and "x1" in column_of and "y1" in column_of and "x" not in column_of:
        column_of["x"], column_of["y"] = column_of.pop("x1"), column_of.pop("y1")


def _plain(cell: str) -> str:
    return cell.strip().lower().replace(" ", "_").replace(".", "_").replace("-", "_")


def _unquoted(cell: str) -> str:
    """A cell without the quote by which ``coordexp export csv`` keeps spreadsheets from computing it."""
    return cell[1:] if cell[:1] == "'" and is_formula(cell.lstrip("'")) else cell
