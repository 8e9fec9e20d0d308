"""DOTA → JSONL. A text file per image has one line per object: the four corners of a rotated box in pixels, the class,
and whether it is difficult, e.g. ``x1 y1 x2 y2 x3 y3 x4 y4 small-vehicle 0``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning
from coordexp.data.convert.report import ConversionReport, LeftOut, SkipReason, SourceShape
from coordexp.data.convert.shapes import ShapeGeometry, number, shape_of
from coordexp.data.find_images import ImageFolder, check_folder, list_files
from coordexp.errors import DataError
from coordexp.reading import read_text

_HEAD = ("imagesource:", "gsd:")  # lines of DOTA's own files before the objects


def convert_dota(
    folder: str | Path,
    out_dir: str | Path,
    *,
    labels_dir: str | Path | None = None,
    images_dir: str | Path | None = None,
    skip_difficult: bool = False,
    geometry: ShapeGeometry = "as_annotated",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert DOTA's labels. Rotated boxes are polygons of four points."""
    root = Path(folder)
    check_folder(root, "folder")
    labels = _labels_folder(root) if labels_dir is None else Path(labels_dir)
    meaning = Meaning(labels, geometry=geometry)
    check_folder(labels, "folder of labels")
    if images_dir is None:
        beside = labels.parent / "images"
        place = beside if beside.is_dir() else labels if labels == root else labels.parent
    else:
        place = Path(images_dir)
    check_folder(place, "images folder")
    report = ConversionReport(Path(out_dir) / f"{options.name or root.absolute().name}.jsonl")
    images = ImageFolder(place)
    listing = images.listing if labels == place else report.pass_over(list_files(labels))
    files = {path.relative_to(labels).with_suffix("").as_posix(): path for path in listing.with_suffix(".txt")}
    report.images_seen = len(files)
    names = [path.name for path in files.values()]
    sources = report.find_all(images, [[stem] for stem in files], labels.name, annotations=names)
    report.skip_unannotated(images, sources, labels, ".txt", files)
    for path, image in zip(files.values(), sources, strict=True):
        image.sizeless = True
        lines = [line for line in read_text(path).splitlines() if line.strip() and not line.lower().startswith(_HEAD)]
        report.read_objects(image, lines, partial(_read_line, skip_difficult))
    return assemble(sources, report, options, meaning)


def _labels_folder(root: Path) -> Path:
    # The only folder below `root` with a name that starts with labelTxt, or `root` itself.
    folders = {folder for path in list_files(root).with_suffix(".txt") for folder in path.relative_to(root).parents}
    named = sorted(root / folder for folder in folders if folder.name.lower().startswith("labeltxt"))
    if len(named) > 1:
        raise DataError(f"several folders of labels: {', '.join(map(str, named))}; choose with --labels-dir", path=root)
    if not named and not any(root.glob("*.txt")):
        raise DataError("no folder labelTxt, and no text files; name the folder of labels with --labels-dir", path=root)
    return named[0] if named else root


def _read_line(skip_difficult: bool, index: int, line: str) -> SourceShape:
    parts = line.split()
    has_mark = len(parts) > 9 and parts[-1].isdecimal()
    desc = " ".join(parts[8:-1] if has_mark else parts[8:])
    if len(parts) < 9:
        raise LeftOut(
            SkipReason.MALFORMED_GEOMETRY, f"{line[:80]!r}: expected 'x1 y1 x2 y2 x3 y3 x4 y4 class difficult'"
        )
    if has_mark and skip_difficult and parts[-1] != "0":
        raise LeftOut(SkipReason.DIFFICULT, f"{desc}: difficult {parts[-1]}")
    return shape_of(index, desc, "ring", [number(text) for text in parts[:8]], parts[:8])
