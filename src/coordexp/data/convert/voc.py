"""Pascal VOC (one XML an image) → JSONL.

VOC's own coordinates count from 1, but most tools that write VOC count from 0, so coordinates are taken as given;
``one_based=True`` subtracts 1 from all four.

Folders are found in any case and at any depth; XML files may also be next to their images.
"""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from coordexp.data.convert.assemble import ImageOptions, Progress, assemble
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason
from coordexp.data.convert.source_image import (
    SourceImage,
    SourceObject,
    declared_size,
    files_below,
    unsafe_file_name,
    with_slashes,
)
from coordexp.data.files import read_text
from coordexp.data.images import IMAGE_SUFFIXES
from coordexp.errors import DataError

ANNOTATIONS, IMAGES = "Annotations", "JPEGImages"
_ALSO_IMAGES = ("JPEGImages", "images")  # other tools' names
_ALSO_SPLITS = {"val": ("val", "valid", "validation"), "valid": ("valid", "val", "validation")}


@dataclass(frozen=True, slots=True)
class VocLayout:
    """``xml_dir``, ``image_dir``: may be one folder. ``split_file``: None takes every annotation. ``note``: which
    folders were found instead of the named ones; empty if those exist."""

    xml_dir: Path
    image_dir: Path
    split_file: Path | None
    note: str = ""


def find_layout(root: Path, split: str | None, annotations_dir: str | Path, images_dir: str | Path) -> VocLayout:
    """The folders as named, else the same names in another case or deeper below ``root`` (``images`` for
    ``JPEGImages`` too), else a folder with XML files next to their images: ``root``, or its part ``split``.

    Raises:
        DataError: none of these, or several; or no such split.
    """
    if not root.is_dir():
        raise DataError("no such folder; check the path", path=root)
    plain = root / annotations_dir, root / images_dir
    if all(folder.is_dir() for folder in plain):
        return VocLayout(*plain, None if split is None else _split_file(root, root, split))
    image_names = [str(images_dir), *(_ALSO_IMAGES if str(images_dir) == IMAGES else ())]
    homes = _homes(root, str(annotations_dir), image_names)
    if len(homes) > 1:
        shown = ", ".join(str(home) for home, _, _ in homes[:6])
        raise DataError(
            f"several folders hold {annotations_dir} and {images_dir}: {shown}; give one of them", path=root
        )
    if homes:
        home, xml_dir, image_dir = homes[0]
        split_file = None if split is None else _split_file(root, home, split)
        return VocLayout(xml_dir, image_dir, split_file, f"annotations in {xml_dir}, images in {image_dir}")
    beside = _beside(root, split)
    if beside is None:
        raise DataError(
            f"no folder {root / annotations_dir} with {images_dir} next to it, here or deeper, and no XML files next "
            "to images; name the folders with --annotations-dir and --images-dir",
            path=root,
        )
    return VocLayout(beside, beside, None, f"XML files next to their images in {beside}")


def _homes(root: Path, annotations: str, images: list[str]) -> list[tuple[Path, Path, Path]]:
    """The highest folders that contain both, each with the two."""
    homes: list[tuple[Path, Path, Path]] = []
    for folders in _levels(root):
        for home in folders:
            xml_dir = _below(home, annotations)
            image_dir = next((path for name in images if (path := _below(home, name)) is not None), None)
            if xml_dir is not None and image_dir is not None:
                homes.append((home, xml_dir, image_dir))
        if homes:
            return homes
    return homes


def _levels(root: Path) -> Iterator[list[Path]]:
    """``root``, then the folders in it, then the folders in those, …; each level by name."""
    level = [root]
    while level:
        yield level
        level = [Path(entry.path) for folder in level for entry in _folders(folder)]


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((one for one in entries if one.is_dir(follow_symlinks=False)), key=lambda one: one.name)


def _below(home: Path, name: str) -> Path | None:
    """The folder ``name`` (which may have parts) of ``home``: as written, else in another case."""
    if (home / name).is_dir():
        return home / name
    folder = home
    for part in Path(name).parts:
        inside = [Path(entry.path) for entry in _folders(folder) if entry.name.casefold() == part.casefold()]
        if not inside:
            return None
        folder = inside[0]
    return folder


def _split_file(root: Path, home: Path, split: str) -> Path:
    folder = _below(home, "ImageSets/Main") or home / "ImageSets" / "Main"
    path = folder / f"{split}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.txt"))) or "none"
        raise DataError(f"no split {split!r} (no file {path}); found: {known}", path=root)
    return path


def _beside(root: Path, split: str | None) -> Path | None:
    """The folder with XML files next to images: Roboflow's ``train``, labelImg's only one."""
    if split is None:
        folder: Path | None = root
    else:
        names = _ALSO_SPLITS.get(split, (split,))
        folder = next((path for name in names if (path := _below(root, name)) is not None), None)
        if folder is None:
            return None
    return folder if files_below(folder, (".xml",)) else None


Images = Mapping[str, Sequence[Path]]
"""Image files by their path below the images folder, without suffix."""


def convert_voc(
    root: str | Path,
    out_dir: str | Path,
    *,
    split: str | None = None,
    annotations_dir: str | Path = ANNOTATIONS,
    images_dir: str | Path = IMAGES,
    name: str | None = None,
    one_based: bool = False,
    skip_difficult: bool = False,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a VOC folder to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    Args:
        root: the folder with ``Annotations``, ``JPEGImages`` and ``ImageSets/Main``, in any case and at any depth; or
            one with XML files next to their images, such as Roboflow's exports.
        split: a name in ``ImageSets/Main`` (``train`` …), in its order, or of a folder of XML files next to
            images. None takes every XML, by file name.
        annotations_dir, images_dir: other folder names, relative to ``root``, or absolute.
        name: of the JSONL; the split's name, or ``data``, when None.

    Raises:
        DataError: a folder or the split is missing, or nothing usable is found.
    """
    layout = find_layout(Path(root), split, annotations_dir, images_dir)
    xml_dir, image_dir = layout.xml_dir, layout.image_dir
    report = ConversionReport(Path(out_dir) / f"{name or split or 'data'}.jsonl")
    if layout.note:
        report.note(Note.FOLDERS_FOUND, str(root), None, layout.note)
    images_by_stem = _images_by_stem(image_dir)
    sources: list[SourceImage] = []
    seen: set[str] = set()
    of_split = layout.split_file
    stems = _all_stems(xml_dir, images_by_stem) if of_split is None else _split_stems(of_split, xml_dir)
    for stem in stems:
        report.images_seen += 1
        xml, shown = xml_dir / f"{stem}.xml", f"{stem}.xml"
        if stem in seen:
            report.skip_image(SkipReason.DUPLICATE_IMAGE, shown, f"{stem!r} is listed twice in the split; used once")
        elif unsafe_file_name(stem):
            report.skip_image(SkipReason.UNSAFE_FILE_NAME, shown, f"{stem!r} leaves the annotations folder")
        elif not xml.is_file():
            report.skip_image(SkipReason.MISSING_ANNOTATION, shown, f"no file {xml}")
        else:
            candidates = images_by_stem.get(stem, ())
            source = _read_xml(xml, shown, candidates, image_dir, one_based, skip_difficult, report)
            if source is not None:
                sources.append(source)
        seen.add(stem)
    return assemble(sources, report, options, progress)


def _images_by_stem(image_dir: Path) -> dict[str, list[Path]]:
    images: dict[str, list[Path]] = {}
    for path in files_below(image_dir, IMAGE_SUFFIXES):
        images.setdefault(path.relative_to(image_dir).with_suffix("").as_posix(), []).append(path)
    return images


def _all_stems(xml_dir: Path, images_by_stem: Images) -> list[str]:
    """Every annotation, and every image without one (so that it is counted)."""
    annotated = {path.relative_to(xml_dir).with_suffix("").as_posix() for path in files_below(xml_dir, (".xml",))}
    return sorted(annotated | images_by_stem.keys())


def _split_stems(path: Path, xml_dir: Path) -> list[str]:
    lines = [line.strip() for line in read_text(path).splitlines()]
    return [_stem_of(line, xml_dir) for line in lines if line]


def _stem_of(line: str, xml_dir: Path) -> str:
    """The annotation that a line of a split means. Lines of per-class files end in a presence flag (an image without
    the class is an example all the same), and some tools write the image's suffix; both only where the line is not
    itself the name of an annotation, such as ``photo 1``."""
    if unsafe_file_name(line) or (xml_dir / f"{line}.xml").is_file():
        return line
    head, _, flag = line.rpartition(" ")
    stem = head.strip() if head and flag in ("-1", "0", "1") else line
    without, dot, suffix = stem.rpartition(".")
    is_image = f"{dot}{suffix.lower()}" in IMAGE_SUFFIXES and (xml_dir / f"{without}.xml").is_file()
    return without if is_image else stem


def _read_xml(
    xml: Path,
    shown: str,
    candidates: Sequence[Path],
    image_dir: Path,
    one_based: bool,
    skip_difficult: bool,
    report: ConversionReport,
) -> SourceImage | None:
    """One annotation; ``shown`` names it in the report, ``candidates`` are the images that share its name."""
    try:
        tree = ET.parse(xml).getroot()
    except (ET.ParseError, OSError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, f"broken XML: {error}")
        return None
    named = with_slashes(_text(tree, "filename"))
    image = _find_image(named, xml.stem, candidates, image_dir)
    if named and xml.stem not in (PurePosixPath(named).name, PurePosixPath(named).stem):
        report.note(Note.FILENAME_MISMATCH, shown, None, f"<filename> is {named!r}; used {image.name!r}")
    objects: list[SourceObject] = []
    for index, node in enumerate(tree.findall("object")):
        with report.reading_object(shown, index):
            objects.append(_object(index, node, one_based, skip_difficult))
    return SourceImage(image.relative_to(image_dir).as_posix(), shown, image, _size(tree), tuple(objects))


def _find_image(named: str, stem: str, candidates: Sequence[Path], image_dir: Path) -> Path:
    """The image of the annotation's own name (of several the one that ``<filename>`` names), or else the one that
    ``<filename>`` names, whether or not it is there."""
    name = PurePosixPath(named).name
    if candidates:
        return next((path for path in candidates if path.name == name), candidates[0])
    return image_dir / (f"{stem}.jpg" if not named else name if unsafe_file_name(named) else named)


def _object(index: int, node: ET.Element, one_based: bool, skip_difficult: bool) -> SourceObject:
    desc = _text(node, "name")
    if skip_difficult and _text(node, "difficult") == "1":
        raise LeftOut(SkipReason.DIFFICULT, f"{desc} is marked difficult")
    texts = [_text(node, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    try:
        corners = [float(text) - one_based for text in texts]
    except ValueError:
        corners = [math.nan]
    if not all(math.isfinite(value) for value in corners):
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, f"{desc}: bndbox holds {texts}, not four numbers")
    return SourceObject(index, desc, "bbox_2d", tuple(corners))


def _size(tree: ET.Element) -> tuple[int, int] | None:
    """The declared (width, height), or None when it is missing or no positive numbers (some tools write 0)."""
    try:
        return declared_size(*(float(_text(tree, f"size/{side}")) for side in ("width", "height")))
    except ValueError:
        return None


def _text(node: ET.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()
