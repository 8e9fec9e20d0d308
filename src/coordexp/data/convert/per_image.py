"""Formats with one annotation file an image → JSONL: Pascal VOC (XML), LabelMe (JSON; polygons, rectangles, and circles
as their bounding boxes), and DOTA (text, one object per line: the four corners of a rotated box in pixels, the class,
and whether it is difficult, e.g. ``x1 y1 x2 y2 x3 y3 x4 y4 small-vehicle 0``).

VOC's own coordinates count from 1, but most tools that write VOC count from 0, so coordinates are kept as given;
``one_based=True`` subtracts 1 from ``xmin`` and ``ymin``: the edges of the pixels xmin to xmax are xmin - 1 and xmax.
"""

from __future__ import annotations

import base64
import math
import posixpath
import xml.etree.ElementTree as ET
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning, bounds
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason, SourceShape
from coordexp.data.convert.shapes import ShapeGeometry, declared_size, degrees, finite_numbers, flat, number, shape_of
from coordexp.data.find_images import (
    REPORT_SUFFIX,
    ImageFolder,
    check_folder,
    files_below,
    folder_levels,
    list_files,
    unsafe_file_name,
    with_slashes,
)
from coordexp.data.images import SEEN_SUFFIXES, size_of_image
from coordexp.errors import DataError
from coordexp.reading import read_json, read_text, read_xml

ANNOTATIONS, IMAGES = "Annotations", "JPEGImages"
_VALIDATION = ("val", "valid", "validation")  # names of one split


def convert_voc(
    root: str | Path,
    out_dir: str | Path,
    *,
    split: str | None = None,
    annotations_dir: str | Path = ANNOTATIONS,
    images_dir: str | Path = IMAGES,
    one_based: bool = False,
    skip_difficult: bool = False,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a VOC folder: one with ``Annotations``, ``JPEGImages`` and ``ImageSets/Main``, in any case and at any
    depth; or one with XML files next to their images, such as Roboflow's exports; or one with a folder of XML files and
    a folder of images, of any names.

    ``split``: a name in ``ImageSets/Main`` (``train`` …), in its order, or of a folder of XML files next to images.
    None takes every XML, by file name.
    """
    xml_dir, image_dir, split_file, note = _find_folders(Path(root), split, Path(annotations_dir), Path(images_dir))
    report = ConversionReport(Path(out_dir) / f"{options.name or split or 'data'}.jsonl")
    if note:
        report.note(Note.FOLDERS_FOUND, str(root), None, note)
    images = ImageFolder(image_dir)
    listing = images.listing if xml_dir == image_dir else report.pass_over(list_files(xml_dir))
    xmls = {path.relative_to(xml_dir).with_suffix("").as_posix(): path for path in listing.with_suffix(".xml")}
    if split_file is None:
        stems = sorted(xmls)
    else:
        stems = [_stem_of(line.strip(), xmls) for line in read_text(split_file).splitlines() if line.strip()]
    report.images_seen = len(stems)
    trees: dict[str, ET.Element] = {}
    seen: set[str] = set()
    for stem in stems:
        shown = f"{stem}.xml"
        if stem in seen:
            report.skip_image(SkipReason.DUPLICATE_IMAGE, shown, f"{stem!r} is listed twice in the split; used once")
        elif unsafe_file_name(stem):
            report.skip_image(SkipReason.UNSAFE_FILE_NAME, shown, f"{stem!r} leaves the annotations folder")
        elif stem not in xmls:
            report.skip_image(SkipReason.MISSING_ANNOTATION, shown, f"no file {xml_dir / shown}")
        else:
            try:
                trees[stem] = read_xml(xmls[stem])
            except DataError as error:
                report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, str(error))
        seen.add(stem)
    # An image with the name of the annotation file is preferred; if there are several, the one in <filename>.
    wanted = []
    for stem, tree in trees.items():
        named = PurePosixPath(with_slashes(_text(tree, "filename")))
        same = [str(PurePosixPath(stem).with_name(named.name))] if named.stem == xmls[stem].stem else []
        wanted.append([*same, stem, *([str(named)] if named.name else [])])
    sources = report.find_all(images, wanted, xml_dir.name, annotations=[f"{stem}.xml" for stem in trees])
    if split_file is None:
        report.skip_unannotated(images, sources, xml_dir, ".xml", xmls)
    for (stem, tree), image in zip(trees.items(), sources, strict=True):
        named = PurePosixPath(with_slashes(_text(tree, "filename")))
        if named.name and xmls[stem].stem not in (named.name, named.stem):
            detail = f"<filename> is {str(named)!r}; used {image.path.name!r}"
            report.note(Note.FILENAME_MISMATCH, image.annotation, None, detail)
        image.declared_size = declared_size(_text(tree, "size/width"), _text(tree, "size/height"))
        boxes = [
            (node, box)
            for node in tree.findall("object")
            for box in node.findall("bndbox") or [None]  # several: ybat writes all boxes of a class into one object
        ]
        report.read_objects(image, boxes, partial(_read_object, one_based, skip_difficult))
    return assemble(sources, report, options, Meaning(xml_dir))


def _find_folders(
    root: Path, split: str | None, annotations: Path, images: Path
) -> tuple[Path, Path, Path | None, str]:
    # The folder of the XML files, that of the images, the split's file (None: every annotation), and a note that says
    # which folders were found instead of the named ones: the same names in another case or deeper below `root`
    # (`images` for `JPEGImages` too); without a split the only two folders of `root` that hold XML files and images;
    # else a folder with XML files next to their images, `root` or its part `split`.
    check_folder(root, "folder")
    names = [images, *([Path("images")] if str(images) == IMAGES else [])]
    homes: list[tuple[Path, Path, Path]] = []
    for level in folder_levels(root):
        for home in level:
            xml_dir = _below(home, annotations)
            image_dir = next((path for name in names if (path := _below(home, name)) is not None), None)
            if xml_dir is not None and image_dir is not None:
                homes.append((home, xml_dir, image_dir))
        if homes:  # the highest folders that contain both
            _check_one([home for home, _, _ in homes], f"hold {annotations} and {images}", root)
            home, xml_dir, image_dir = homes[0]
            is_as_named = (xml_dir, image_dir) == (root / annotations, root / images)
            note = "" if is_as_named else f"annotations in {xml_dir}, images in {image_dir}"
            return xml_dir, image_dir, None if split is None else _split_file(home, split), note
    if split is None and (pair := _only_pair(root)) is not None:
        return *pair, None, f"annotations in {pair[0]}, images in {pair[1]}"
    # Roboflow's `train`, which may be deeper, or labelImg's only folder.
    parts = [Path("" if split is None else split)] if split not in _VALIDATION else [*map(Path, _VALIDATION)]
    for level in folder_levels(root):
        folders = dict.fromkeys(_below(home, part) for home in level for part in parts)
        if beside := [folder for folder in folders if folder is not None and files_below(folder, (".xml",))]:
            _check_one(beside, "have XML files for it", root)
            return beside[0], beside[0], None, f"XML files next to their images in {beside[0]}"
    part = "" if split is None else f" in a folder called {split}"
    raise DataError(
        f"no folder {root / annotations} with {images} next to it, here or deeper, and no XML files next to images"
        f"{part}; name the folders with --annotations and --images",
        path=root,
    )


def _check_one(folders: Sequence[Path], what: str, root: Path) -> None:
    if len(folders) > 1:
        raise DataError(f"several folders {what}: {', '.join(map(str, folders[:6]))}; give one of them", path=root)


def _split_file(home: Path, split: str) -> Path:
    folder = _below(home, Path("ImageSets/Main")) or home / "ImageSets" / "Main"
    file = folder / f"{split}.txt"
    if not file.is_file():
        known = ", ".join(sorted(other.stem for other in folder.glob("*.txt"))) or "none"
        raise DataError(
            f"no split {split!r} (no file {file}); found: {known}. Without --split every annotation is converted; "
            "divide the result with: coordexp data split",
            path=home,
        )
    return file


def _only_pair(root: Path) -> tuple[Path, Path] | None:
    # The only folder of `root` with XML files and no images, and the only one with images and no XML files.
    folders = _folders(root)
    holds = [(one, bool(files_below(one, (".xml",))), bool(files_below(one, SEEN_SUFFIXES))) for one in folders]
    annotations = [one for one, xml, images in holds if xml and not images]
    images = [one for one, xml, images in holds if images and not xml]
    return (annotations[0], images[0]) if len(annotations) == len(images) == 1 else None


def _below(home: Path, name: Path) -> Path | None:
    # The folder `name` (which may have parts) of `home`: as written, else in another case.
    if (home / name).is_dir():
        return home / name
    folder = home
    for part in name.parts:
        inside = [path for path in _folders(folder) if path.name.casefold() == part.casefold()]
        if not inside:
            return None
        folder = inside[0]
    return folder


def _folders(folder: Path) -> list[Path]:
    return next(islice(folder_levels(folder), 1, None), [])


def _stem_of(line: str, xmls: Collection[str]) -> str:
    # Lines of per-class files end in a presence flag (an image without the class is an example all the same), and some
    # tools write the image's suffix; both count only if the line itself does not name an annotation, such as `photo 1`.
    if line in xmls:
        return line
    head, _, flag = line.rpartition(" ")
    stem = head.strip() if head and flag in ("-1", "0", "1") else line
    without, dot, suffix = stem.rpartition(".")
    return without if f"{dot}{suffix.lower()}" in SEEN_SUFFIXES and without in xmls else stem


def _read_object(
    one_based: bool, skip_difficult: bool, index: int, entry: tuple[ET.Element, ET.Element | None]
) -> SourceShape:
    node, box = entry
    desc = _text(node, "name")
    if _text(node, "deleted") == "1":  # LabelMe's web tool keeps what was deleted
        raise LeftOut(SkipReason.IGNORED, f"{desc} is marked deleted")
    if skip_difficult and _text(node, "difficult") == "1":
        raise LeftOut(SkipReason.DIFFICULT, f"{desc} is marked difficult")
    if node.find("robndbox") is not None:  # roLabelImg's: centre, size and an angle in radians
        cx, cy, w, h, angle = (number(_text(node, f"robndbox/{name}")) for name in ("cx", "cy", "w", "h", "angle"))
        shown = f"robndbox is {[cx, cy, w, h, angle]}"
        return shape_of(index, desc, "centre", [cx, cy, w, h], shown, turn=degrees(angle))
    points = node.findall("polygon/pt")
    if points and box is None:  # LabelMe's web tool
        values = [number(_text(point, axis)) for point in points for axis in "xy"]
        return shape_of(index, desc, "ring", values)
    texts = ["" if box is None else _text(box, side) for side in ("xmin", "ymin", "xmax", "ymax")]
    x1, y1, x2, y2 = (number(text) for text in texts)
    # Pixels x1..x2 counted from 1, both included: their edges are x1 - 1 and x2.
    first = [None if value is None else value - one_based for value in (x1, y1)]
    return shape_of(index, desc, "corners", [*first, x2, y2], f"bndbox is {texts}")


def _text(node: ET.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def convert_labelme(
    folder: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    geometry: ShapeGeometry = "as_annotated",
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a folder of LabelMe files. If an ``imagePath`` does not exist, such as the annotator's own
    ``C:\\photos\\a.jpg``, its last part is looked for."""
    folder = Path(folder)
    meaning = Meaning(folder, geometry=geometry)
    check_folder(folder, "folder")
    listing = list_files(folder)
    files = [file for file in listing.with_suffix(".json") if not file.name.endswith(REPORT_SUFFIX)]
    if not files:
        raise DataError("no *.json below this folder; LabelMe writes one next to each image", path=folder)
    report = ConversionReport(Path(out_dir) / f"{options.name or folder.absolute().name}.jsonl")
    home = folder if images_dir is None else Path(images_dir)
    contents: dict[Path, dict[str, Any]] = {}
    report.images_seen = len(files)
    for file in files:
        shown = file.relative_to(folder).as_posix()
        try:
            content = read_json(file)
            if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
                raise DataError("no list 'shapes': not a LabelMe file")
            if not isinstance(content.get("imagePath"), str) or not content["imagePath"].strip():
                raise DataError("no imagePath")
        except DataError as error:
            report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, str(error))
            continue
        contents[file] = content
    if home != folder:
        report.pass_over(listing)
    wanted, hints = [], []
    for file, content in contents.items():
        named = with_slashes(content["imagePath"])
        base = PurePosixPath(file.parent.relative_to(folder) if images_dir is None else "")  # where the path starts
        is_absolute = PurePosixPath(named).is_absolute() or PureWindowsPath(named).is_absolute()
        wanted.append([named] if is_absolute else [posixpath.normpath(f"{base}/{named}"), named])
        hints.append([str(base / PurePosixPath(named).name)])
    images = ImageFolder(home, outside=True)
    annotations = [file.relative_to(folder).as_posix() for file in contents]
    sources = report.find_all(images, wanted, folder.name, annotations=annotations, hints=hints)
    report.note_unnamed(images, sources, folder.name)
    for (file, content), image in zip(contents.items(), sources, strict=True):
        image.declared_size = declared_size(content.get("imageWidth"), content.get("imageHeight"))
        data = content.get("imageData")
        # A file that is not an image, such as the annotation itself (LabelMe's tutorial), is not the photo either.
        if isinstance(data, str) and data and size_of_image(image.path) is None:
            # Read again when its turn comes: all images of a folder would not fit into memory.
            image.embedded = partial(_embedded_image, file)
        report.read_objects(image, content["shapes"], _read_shape, _group_of)
    return assemble(sources, report, options, meaning)


def _embedded_image(file: Path) -> bytes:
    try:
        return base64.b64decode(read_json(file)["imageData"], validate=True)
    except ValueError as error:
        raise DataError(f"no base64: {error}", path=file) from error


def _group_of(shape: Any) -> Hashable:
    # Shapes of one label and group_id are parts of one object.
    group = shape.get("group_id") if isinstance(shape, dict) else None
    return None if group is None else (str(shape.get("label")), str(group))


def _read_shape(index: int, shape: Any) -> SourceShape:
    fields = shape if isinstance(shape, dict) else {}
    kind, desc, points = fields.get("shape_type") or "polygon", fields.get("label"), flat(fields.get("points"))
    desc = desc if isinstance(desc, str) else ""
    if desc == "__ignore__":
        raise LeftOut(SkipReason.IGNORED, "__ignore__ marks a region to leave out")
    shown = f"{kind} with points {fields.get('points')}"
    if kind in ("polygon", "rotation"):  # the latter is X-AnyLabeling's, four points
        return shape_of(index, desc, "ring", points, shown)
    if kind not in ("rectangle", "circle"):
        detail = f"{desc}: shape_type {kind!r} has no area, or is a mask; polygon, rectangle and circle are read"
        raise LeftOut(SkipReason.UNSUPPORTED_SHAPE, detail)
    numbers = finite_numbers(points)
    if kind == "rectangle":  # two corners in any order; newer versions write all four
        corners = points if numbers is None or len(numbers) not in (4, 8) else list(bounds(numbers))
        return shape_of(index, desc, "corners", corners, shown)
    if numbers is None or len(numbers) != 4:
        return shape_of(index, desc, "ellipse", None, shown)
    x, y, edge_x, edge_y = numbers  # its centre, and a point on it
    radius = math.hypot(edge_x - x, edge_y - y)
    return shape_of(index, desc, "ellipse", [x, y, radius, radius], shown)


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
