"""COCO instances JSON → JSONL. Boxes are ``[x, y, width, height]`` in pixels from 0.

LVIS is the same format, but an image names its file by ``coco_url`` only, and a class is ``baby_buggy``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any

from coordexp.data.convert.assemble import ImageOptions, Progress, assemble
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason
from coordexp.data.convert.source_image import (
    Crowds,
    InstanceGeometry,
    SourceImage,
    SourceObject,
    check_choice,
    check_folder,
    declared_size,
    finite_numbers,
    unsafe_file_name,
    with_slashes,
)
from coordexp.data.files import read_json
from coordexp.data.polygons import shape_area
from coordexp.errors import DataError

ROBOFLOW = "_annotations.coco.json"


def convert_coco(
    annotations_json: str | Path,
    images_dir: str | Path | None,
    out_dir: str | Path,
    *,
    geometry: InstanceGeometry = "bbox",
    crowds: Crowds = "leave_out",
    name: str | None = None,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a COCO file to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``, by file name.

    Args:
        annotations_json: the file, or a folder with Roboflow's ``_annotations.coco.json``.
        images_dir: the folder that ``file_name`` starts in; None: the annotation file's own.
        geometry: ``bbox`` writes boxes; ``poly`` writes segmentation polygons (of several parts, the largest) and the
            outlines of run-length masks. Objects without a segmentation are left out and counted.
        crowds: groups (``iscrowd``) are left out, or kept as one object each; counted either way.
        name: of the JSONL; the annotation file's own when None, the folder's for ``_annotations.coco.json``.

    Raises:
        DataError: the file is not a COCO instances file, or nothing usable is found.
    """
    file = annotation_file(Path(annotations_json))
    images = file.parent if images_dir is None else Path(images_dir)
    coco = open_instances(file, images, geometry)
    check_choice("crowds", crowds, Crowds)
    report = ConversionReport(Path(out_dir) / f"{name or name_of(file)}.jsonl")
    return convert_instances(coco, file, images, report, geometry, options, progress, crowds)


def annotation_file(path: Path) -> Path:
    """The annotation file: ``path``, or Roboflow's file in the folder ``path``."""
    inside = path / ROBOFLOW
    return inside if inside.is_file() else path


def name_of(annotations_json: Path) -> str:
    """The default name of the dataset."""
    return annotations_json.absolute().parent.name if annotations_json.name == ROBOFLOW else annotations_json.stem


def open_instances(annotations_json: Path, images_dir: Path, geometry: str) -> dict[str, Any]:
    """Check the arguments and read a COCO instances file.

    Raises:
        DataError: an unknown geometry, no images folder, or not a COCO instances file.
    """
    check_choice("geometry", geometry, InstanceGeometry)
    check_folder(images_dir, "images folder")
    if not annotations_json.is_file():
        raise DataError("annotation file not found; check the path", path=annotations_json)
    coco = read_json(annotations_json)
    for key in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(key), list):
            raise DataError(f"no list {key!r} at the top level; expected a COCO instances file", path=annotations_json)
    return coco


def convert_instances(
    coco: dict[str, Any],
    annotations_json: Path,
    images_dir: Path,
    report: ConversionReport,
    geometry: InstanceGeometry,
    options: ImageOptions,
    progress: Progress | None,
    crowds: Crowds = "leave_out",
) -> ConversionReport:
    """:func:`convert_coco` of a file's content; ``annotations_json`` names it in errors."""
    descs = _categories(coco["categories"], annotations_json)
    usable = _images(coco["images"], annotations_json, report)
    objects: dict[Any, list[SourceObject]] = defaultdict(list)
    for index, annotation in enumerate(coco["annotations"]):
        image = annotation.get("image_id") if isinstance(annotation, dict) else None
        known = isinstance(image, int | str) and image in usable
        with report.reading_object(usable[image][0] if known else annotations_json.name, index):
            if not known:
                raise LeftOut(SkipReason.UNKNOWN_IMAGE, f"no usable image has the id {image!r}")
            objects[image].append(_object(index, annotation, descs, geometry, crowds, usable[image], report))
    sources = [
        SourceImage(file, file, images_dir / file, size, tuple(objects[image_id]))
        for image_id, (file, size) in usable.items()
    ]
    return assemble(sorted(sources, key=lambda source: source.file), report, options, progress)


def _categories(categories: list[Any], path: Path) -> dict[Any, str]:
    descs: dict[Any, str] = {}
    for index, category in enumerate(categories):
        if not isinstance(category, dict) or not isinstance(category.get("id"), int | str):
            raise DataError(f"categories[{index}] has no id; expected {{'id': 1, 'name': 'cat'}}", path=path)
        if category["id"] in descs:
            raise DataError(
                f"categories[{index}]: the id {category['id']!r} is used twice, so objects are ambiguous",
                path=path,
            )
        name = category.get("name")
        descs[category["id"]] = name if isinstance(name, str) else ""
    return descs


def _images(images: list[Any], path: Path, report: ConversionReport) -> dict[Any, tuple[str, tuple[int, int] | None]]:
    """File name and declared size of each usable image, by id. Objects find their image by id, so one that is used
    twice is fatal."""
    usable: dict[Any, tuple[str, tuple[int, int] | None]] = {}
    files: set[str] = set()
    for index, image in enumerate(images):
        report.images_seen += 1
        where = f"images[{index}]"
        if not isinstance(image, dict) or not isinstance(image.get("id"), int | str):
            report.skip_image(SkipReason.UNREADABLE_ANNOTATION, path.name, f"{where} has no id")
            continue
        if image["id"] in usable:
            raise DataError(
                f"{where}: the id {image['id']!r} is used twice; objects cannot be assigned to images", path=path
            )
        named = image.get("file_name")
        if not isinstance(named, str) or not named.strip():
            report.skip_image(SkipReason.UNREADABLE_ANNOTATION, path.name, f"{where} has no file_name")
            continue
        file = str(PurePosixPath(with_slashes(named)))
        if unsafe_file_name(file):
            report.skip_image(SkipReason.UNSAFE_FILE_NAME, path.name, f"{where}: {named!r} leaves the images folder")
        elif file in files:
            report.skip_image(
                SkipReason.DUPLICATE_IMAGE, path.name, f"{where}: {named!r} is listed twice; kept the first"
            )
        else:
            files.add(file)
            usable[image["id"]] = file, declared_size(image.get("width"), image.get("height"))
    return usable


def _object(
    index: int,
    annotation: dict[str, Any],
    descs: dict[Any, str],
    geometry: InstanceGeometry,
    crowds: Crowds,
    image: tuple[str, tuple[int, int] | None],
    report: ConversionReport,
) -> SourceObject:
    file, size = image
    category = annotation.get("category_id")
    if not isinstance(category, int | str) or category not in descs:
        raise LeftOut(SkipReason.UNKNOWN_CATEGORY, f"category_id {category!r} is not in categories")
    desc = descs[category]
    is_crowd = bool(annotation.get("iscrowd"))
    if is_crowd and crowds == "leave_out":
        raise LeftOut(SkipReason.CROWD, f"{desc}: iscrowd marks a group, not an object")
    if geometry == "bbox":
        obj = SourceObject(index, desc, "bbox_2d", _box(annotation.get("bbox"), desc))
    else:
        segmentation = annotation.get("segmentation")
        if isinstance(segmentation, dict):
            ring, parts = _traced(segmentation, desc, size)
            report.note(Note.MASK_TRACED, file, index, f"{desc}: {len(ring) // 2} vertices along its mask")
        else:
            ring, parts = _largest_part(segmentation, desc)
        if parts > 1:
            report.note(Note.MULTIPART_POLYGON, file, index, f"{desc}: kept the largest of {parts} parts")
        obj = SourceObject(index, desc, "poly", ring)
    if is_crowd:
        report.note(Note.CROWD_KEPT, file, index, f"{desc}: a group, kept as one object")
    return obj


def _box(bbox: Any, desc: str) -> tuple[float, ...]:
    box = finite_numbers(bbox)
    if box is None or len(box) != 4:
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, f"{desc}: bbox is {bbox!r}, not [x, y, width, height]")
    x, y, width, height = box
    return x, y, x + width, y + height


def _traced(segmentation: dict[str, Any], desc: str, size: tuple[int, int] | None) -> tuple[tuple[float, ...], int]:
    """The outline of a run-length mask, and how many parts the mask has."""
    from coordexp.data.convert.masks import decode_runs, outline

    try:
        return outline(decode_runs(segmentation, size))
    except ValueError as error:
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, f"{desc}: run-length mask: {error}") from error


def _largest_part(segmentation: Any, desc: str) -> tuple[tuple[float, ...], int]:
    """The largest of an object's polygons, and how many it has."""
    if not isinstance(segmentation, list) or not segmentation:
        raise LeftOut(SkipReason.NO_SEGMENTATION, f"{desc}: no segmentation; use geometry='bbox'")
    rings = [finite_numbers(part) for part in segmentation]
    sound = [ring for ring in rings if ring is not None and len(ring) >= 6 and len(ring) % 2 == 0]
    if len(sound) != len(rings):
        detail = f"{desc}: expected polygons [x, y, …] of at least 3 points, got {str(segmentation)[:80]}"
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
    return max(sound, key=lambda ring: shape_area("poly", ring)), len(sound)


def convert_lvis(
    annotations_json: str | Path,
    images_dir: str | Path | None,
    out_dir: str | Path,
    *,
    geometry: InstanceGeometry = "bbox",
    crowds: Crowds = "leave_out",
    name: str | None = None,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert an LVIS file as :func:`coordexp.data.convert.convert_coco` does a COCO file.

    Args:
        images_dir: the folder with the images, or with COCO's ``train2017`` and ``val2017``; None: the file's own.

    Raises:
        DataError: the file is not an LVIS file, or nothing usable is found.
    """
    annotations_json = Path(annotations_json)
    images_dir = annotations_json.parent if images_dir is None else Path(images_dir)
    content = open_instances(annotations_json, images_dir, geometry)
    check_choice("crowds", crowds, Crowds)
    lvis = {
        **content,
        "images": [_with_file(image, images_dir) for image in content["images"]],
        "categories": [_with_spaces(category) for category in content["categories"]],
    }
    report = ConversionReport(Path(out_dir) / f"{name or annotations_json.stem}.jsonl")
    return convert_instances(lvis, annotations_json, images_dir, report, geometry, options, progress, crowds)


def _with_file(image: Any, images_dir: Path) -> Any:
    url = image.get("coco_url") if isinstance(image, dict) else None
    if not isinstance(url, str) or image.get("file_name"):
        return image
    folder, file = PurePosixPath(url).parts[-2:]
    return {**image, "file_name": f"{folder}/{file}" if (images_dir / folder).is_dir() else file}


def _with_spaces(category: Any) -> Any:
    if not isinstance(category, dict) or not isinstance(category.get("name"), str):
        return category
    return {**category, "name": category["name"].replace("_", " ")}
