"""Pascal VOC (one XML an image) → JSONL.

VOC's own coordinates count from 1, but most tools that write VOC count from 0, so coordinates are taken as given;
``one_based=True`` subtracts 1 from all four.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from coordexp.data.convert.assemble import Progress, assemble
from coordexp.data.convert.prepare import ImageOptions
from coordexp.data.convert.report import ConversionReport, Note, SkipReason
from coordexp.data.convert.sources import (
    SourceImage,
    SourceObject,
    declared_size,
    files_below,
    unsafe_file_name,
    with_slashes,
)
from coordexp.data.convert.voc_layout import ANNOTATIONS, IMAGES, find_layout
from coordexp.data.images import IMAGE_SUFFIXES
from coordexp.files import read_text

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
            one whose XML files lie beside their images, Roboflow's exports among them.
        split: a name in ``ImageSets/Main`` (``train`` …), whose order is kept, or of a folder of XML files beside
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
            report.skip_image(SkipReason.DUPLICATE_IMAGE, shown, f"{stem!r} stands twice in the split; used once")
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
    except (ET.ParseError, OSError, ValueError, LookupError) as error:  # LookupError: an encoding nobody knows
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, f"broken XML: {error}")
        return None
    named = with_slashes(_text(tree, "filename"))
    image = _find_image(named, xml.stem, candidates, image_dir)
    if named and xml.stem not in (PurePosixPath(named).name, PurePosixPath(named).stem):
        report.note(Note.FILENAME_MISMATCH, shown, None, f"<filename> is {named!r}; used {image.name!r}")
    objects = [
        obj
        for index, node in enumerate(tree.findall("object"))
        if (obj := _object(index, node, shown, one_based, skip_difficult, report)) is not None
    ]
    return SourceImage(image.relative_to(image_dir).as_posix(), shown, image, _size(tree), tuple(objects))


def _find_image(named: str, stem: str, candidates: Sequence[Path], image_dir: Path) -> Path:
    """The image of the annotation's own name (of several the one that ``<filename>`` names), or else the one that
    ``<filename>`` names, whether or not it is there."""
    name = PurePosixPath(named).name
    if candidates:
        return next((path for path in candidates if path.name == name), candidates[0])
    return image_dir / (f"{stem}.jpg" if not named else name if unsafe_file_name(named) else named)


def _object(
    index: int, node: ET.Element, file: str, one_based: bool, skip_difficult: bool, report: ConversionReport
) -> SourceObject | None:
    report.objects_seen += 1
    desc = _text(node, "name")
    if skip_difficult and _text(node, "difficult") == "1":
        report.skip_object(SkipReason.DIFFICULT, file, index, f"{desc} is marked difficult")
        return None
    texts = [_text(node, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")]
    try:
        corners = [float(text) - one_based for text in texts]
    except ValueError:
        corners = [math.nan]
    if not all(math.isfinite(value) for value in corners):
        report.skip_object(
            SkipReason.MALFORMED_GEOMETRY, file, index, f"{desc}: bndbox holds {texts}, not four numbers"
        )
        return None
    return SourceObject(index, desc, "bbox_2d", tuple(corners))


def _size(tree: ET.Element) -> tuple[int, int] | None:
    """The declared (width, height), or None when it is missing or no positive numbers (some tools write 0)."""
    try:
        return declared_size(*(float(_text(tree, f"size/{side}")) for side in ("width", "height")))
    except ValueError:
        return None


def _text(node: ET.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()
