"""Pascal VOC (one XML an image) → JSONL.

VOC's own coordinates count from 1, but most tools that write VOC count from 0, so coordinates are taken as given;
``one_based=True`` subtracts 1 from all four.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

from coordexp.data.convert.assemble import (
    IMAGE_SUFFIXES,
    ImageOptions,
    Progress,
    SourceImage,
    SourceObject,
    assemble,
    unsafe_file_name,
)
from coordexp.data.convert.report import ConversionReport, Note, SkipReason
from coordexp.errors import DataError


def convert_voc(
    root: str | Path,
    out_dir: str | Path,
    *,
    split: str | None = None,
    annotations_dir: str | Path = "Annotations",
    images_dir: str | Path = "JPEGImages",
    name: str | None = None,
    one_based: bool = False,
    skip_difficult: bool = False,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a VOC folder to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    Args:
        root: the folder with ``Annotations``, ``JPEGImages`` and ``ImageSets/Main``.
        split: a name in ``ImageSets/Main`` (``train`` …); its order is kept. None takes every XML, by file name.
        annotations_dir, images_dir: other folder names, relative to ``root``, or absolute.
        name: of the JSONL; the split's name, or ``data``, when None.

    Raises:
        DataError: a folder or the split is missing, or nothing usable is found.
    """
    root = Path(root)
    xml_dir, image_dir = root / annotations_dir, root / images_dir
    for folder in (xml_dir, image_dir):
        if not folder.is_dir():
            raise DataError(
                f"no folder {folder}; give the folder that holds {annotations_dir} and {images_dir}", path=root
            )
    report = ConversionReport(Path(out_dir) / f"{name or split or 'data'}.jsonl")
    images_by_stem = _images_by_stem(image_dir)
    sources: list[SourceImage] = []
    seen: set[str] = set()
    stems = _split_stems(root, split) if split is not None else _all_stems(xml_dir, images_by_stem)
    for stem in stems:
        report.images_seen += 1
        xml = xml_dir / f"{stem}.xml"
        if stem in seen:
            report.skip_image(SkipReason.DUPLICATE_IMAGE, xml.name, f"{stem!r} stands twice in the split; used once")
        elif unsafe_file_name(stem):
            report.skip_image(SkipReason.UNSAFE_FILE_NAME, xml.name, f"{stem!r} leaves the annotations folder")
        elif not xml.is_file():
            report.skip_image(SkipReason.MISSING_ANNOTATION, xml.name, f"no file {xml}")
        else:
            source = _read_xml(xml, images_by_stem.get(stem), image_dir, one_based, skip_difficult, report)
            if source is not None:
                sources.append(source)
        seen.add(stem)
    return assemble(sources, report, options, progress)


def _images_by_stem(image_dir: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(image_dir.iterdir()):
        if path.suffix.lower() in IMAGE_SUFFIXES:
            found.setdefault(path.stem, path)
    return found


def _all_stems(xml_dir: Path, images_by_stem: dict[str, Path]) -> list[str]:
    """Every annotation, and every image without one (so that it is counted)."""
    return sorted({path.stem for path in xml_dir.glob("*.xml")} | images_by_stem.keys())


def _split_stems(root: Path, split: str) -> list[str]:
    folder = root / "ImageSets" / "Main"
    path = folder / f"{split}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.txt"))) or "none"
        raise DataError(f"no split {split!r} (no file {path}); found: {known}", path=root)
    stems: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        head, _, flag = text.rpartition(" ")
        # Per-class split files carry a presence flag; an image without the class is an example all the same.
        stem = head.strip() if head and flag in ("-1", "0", "1") else text
        if stem:
            stems.append(stem)
    return stems


def _read_xml(
    xml: Path, image: Path | None, image_dir: Path, one_based: bool, skip_difficult: bool, report: ConversionReport
) -> SourceImage | None:
    try:
        tree = ET.parse(xml).getroot()
    except (ET.ParseError, OSError, ValueError, LookupError) as error:  # LookupError: an encoding nobody knows
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, xml.name, f"broken XML: {error}")
        return None
    named = _text(tree, "filename")
    if image is None and named and not unsafe_file_name(named):
        image = image_dir / named
    if image is None:
        image = image_dir / f"{xml.stem}.jpg"
    if named and Path(named).stem not in (xml.stem, ""):
        report.note(Note.FILENAME_MISMATCH, xml.name, None, f"<filename> is {named!r}; used {image.name!r}")
    objects = [
        obj
        for index, node in enumerate(tree.findall("object"))
        if (obj := _object(index, node, xml.name, one_based, skip_difficult, report)) is not None
    ]
    return SourceImage(image.name, xml.name, image, _size(tree), tuple(objects))


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
        width, height = (int(float(_text(tree, f"size/{side}"))) for side in ("width", "height"))
    except (ValueError, OverflowError):
        return None
    return (width, height) if min(width, height) >= 1 else None


def _text(node: ET.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()
