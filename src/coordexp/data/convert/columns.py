"""Which column of a table is which, by the names in its header or by the caller's word."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coordexp.errors import DataError
from coordexp.reading import csv_rows, read_text

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
    rows = [{meaning: _cell(line, at) for meaning, at in column_of.items()} for line in lines]
    too_long = {
        index: f"{len(line)} cells, and the header has {len(header)}: put a cell with a comma in quotes, or name all "
        f"columns: {','.join(line)[:80]!r}"
        for index, line in enumerate(lines)
        if any(line[len(header) :])
    }
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
        if len(places) > 1 and any(len({_cell(row, at) for at in places}) > 1 for row in self.rows):
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


def _cell(row: list[str], at: int) -> str:
    return row[at] if at < len(row) else ""
