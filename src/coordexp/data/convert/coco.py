"""COCO instances, LVIS and COCO panoptic JSON → JSONL. Boxes are ``[x, y, width, height]`` in pixels from 0.

LVIS is the format of COCO instances, but an image names its file by ``coco_url`` only, and a class is ``baby_buggy``.
Panoptic has, per image, a list of segments and a PNG with the segments as colours. Masks become their outlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from pycocotools import mask as coco_mask

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.numbers import Meaning, refuse_unlabelled
from coordexp.data.convert.report import ConversionReport, LeftOut, Note, SkipReason, SourceImage, SourceShape
from coordexp.data.convert.shapes import (
    BoxFields,
    Crowds,
    InstanceGeometry,
    check_choice,
    declared_size,
    finite_numbers,
    shape_of,
)
from coordexp.data.find_images import (
    ImageFolder,
    check_folder,
    images_folder,
    only_file,
    stem_of,
    unsafe_file_name,
    with_slashes,
)
from coordexp.data.images import open_rgb
from coordexp.data.polygons import signed_ring_area
from coordexp.errors import DataError
from coordexp.reading import read_json

_LARGEST = 1 << 28  # pixels


def convert_coco(
    annotations_json: str | Path,
    images_dir: str | Path | None,
    out_dir: str | Path,
    *,
    geometry: InstanceGeometry = "bbox",
    crowds: Crowds = "leave_out",
    boxes: BoxFields = "auto",
    lvis: bool = False,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a COCO file, or with ``lvis`` one of LVIS; images are sorted by file name.

    ``geometry="poly"`` writes segmentation polygons (of several parts, the largest) and the outlines of run-length
    masks; objects without a segmentation are left out. Groups (``iscrowd``) are counted either way.
    """
    file = only_file(Path(annotations_json), ".json")
    meaning = Meaning(file, boxes=boxes)
    coco, images = _read(file, images_dir, geometry, crowds)
    if lvis:
        name_as_lvis(coco, images)
    report = ConversionReport(Path(out_dir) / f"{options.name or stem_of(file)}.jsonl")
    return _convert(coco, meaning, images, report, geometry, crowds, options)


def name_as_lvis(coco: dict[str, Any], images_dir: Path | None = None) -> None:
    """Give images of LVIS without a ``file_name`` the end of their ``coco_url``, ``train2017/NAME`` or, if
    ``images_dir`` has no such folder, ``NAME``; and classes spaces in place of ``_``."""
    for image in coco["images"]:
        url = image.get("coco_url") if isinstance(image, dict) else None
        parts = PurePosixPath(url).parts if isinstance(url, str) else ()
        if parts and not image.get("file_name"):
            has_folder = len(parts) > 1 and (images_dir is None or (images_dir / parts[-2]).is_dir())
            image["file_name"] = "/".join(parts[-2:] if has_folder else parts[-1:])
    for category in coco["categories"]:
        if isinstance(category, dict) and isinstance(category.get("name"), str):
            category["name"] = category["name"].replace("_", " ")


def convert_panoptic(
    annotations_json: str | Path,
    images_dir: str | Path,
    out_dir: str | Path,
    *,
    segments_dir: str | Path | None = None,
    geometry: InstanceGeometry = "bbox",
    crowds: Crowds = "leave_out",
    stuff: bool = False,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a COCO panoptic file as :func:`convert_coco` does a COCO file. Regions without instances (``isthing: 0``)
    are left out, and counted, without ``stuff``."""
    file = only_file(Path(annotations_json), ".json")
    content, images = _read(file, images_dir, geometry, crowds)
    segments = file.with_suffix("") if segments_dir is None else Path(segments_dir)
    if geometry == "poly":
        check_folder(segments, "folder of the segments' PNGs (--segments)")
    report = ConversionReport(Path(out_dir) / f"{options.name or file.stem}.jsonl")
    regions = [_id_of(c, "id") for c in content["categories"] if isinstance(c, dict) and c.get("isthing") == 0]
    annotations: list[dict[str, Any]] = []
    for index, annotation in enumerate(content["annotations"]):
        infos = annotation.get("segments_info") if isinstance(annotation, dict) else None
        if not isinstance(infos, list):
            raise DataError(f"annotations[{index}] has no segments_info; expected a COCO panoptic file", path=file)
        kept = []
        for at, info in enumerate(infos):
            if not stuff and isinstance(info, dict) and _id_of(info, "category_id") in regions:
                report.objects_seen += 1
                report.skip_object(SkipReason.STUFF, file.name, at, f"annotations[{index}]: a region, no instance")
            else:
                kept.append({**info, "image_id": annotation.get("image_id")} if isinstance(info, dict) else {})
        annotations += kept if geometry == "bbox" else _with_masks(kept, annotation.get("file_name"), segments)
    instances = {**content, "annotations": annotations}
    return _convert(instances, Meaning(file), images, report, geometry, crowds, options)


def _with_masks(infos: Sequence[dict[str, Any]], named: Any, segments: Path) -> list[dict[str, Any]]:
    # A segment that is not in the PNG stays without a mask, and is counted as an object without a segmentation.
    if not infos or not isinstance(named, str) or unsafe_file_name(named):
        return list(infos)
    try:
        rgb_HW3 = np.asarray(open_rgb(segments / named), dtype=np.int64)
    except DataError:
        return list(infos)
    ids_HW = rgb_HW3 @ np.array([1, 256, 65536])
    masked = []
    for info in infos:
        mask_HW = ids_HW == info["id"] if type(info.get("id")) is int else np.zeros(ids_HW.shape, dtype=bool)
        if mask_HW.any():
            runs: Any = coco_mask.encode(np.asfortranarray(mask_HW, dtype=np.uint8))  # its stubs call bytes text
            info = {**info, "segmentation": {"size": runs["size"], "counts": runs["counts"].decode()}}
        masked.append(info)
    return masked


def _read(file: Path, images_dir: str | Path | None, geometry: str, crowds: str) -> tuple[dict[str, Any], Path]:
    # The file's content, and the folder of its images.
    check_choice("geometry", geometry, InstanceGeometry)
    check_choice("crowds", crowds, Crowds)
    images = images_folder(images_dir, file)
    coco = read_json(file)
    for key in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(key), list):
            raise DataError(f"no list {key!r} at the top level; expected a COCO instances file", path=file)
    return coco, images


def _convert(
    coco: dict[str, Any],
    meaning: Meaning,
    images_dir: Path,
    report: ConversionReport,
    geometry: InstanceGeometry,
    crowds: Crowds,
    options: ImageOptions,
) -> ConversionReport:
    file = meaning.file
    descs: dict[str, str] = {}
    for index, category in enumerate(coco["categories"]):
        category_id = _id_of(category, "id")
        if category_id is None:
            raise DataError(f"categories[{index}] has no id; expected {{'id': 1, 'name': 'cat'}}", path=file)
        if category_id in descs:
            detail = f"categories[{index}]: the id {category_id} is used twice, so objects are ambiguous"
            raise DataError(detail, path=file)
        desc = category.get("name")
        descs[category_id] = desc if isinstance(desc, str) else ""
    report.note_shared_names(descs, file.name)
    report.images_seen = len(coco["images"])
    listed: dict[str, tuple[str, dict[str, Any]]] = {}  # by id; one that is used twice is fatal
    for index, image in enumerate(coco["images"]):
        where = f"images[{index}]"
        image_id = _id_of(image, "id")
        if image_id is None:
            report.skip_image(SkipReason.UNREADABLE_ANNOTATION, file.name, f"{where} has no id")
            continue
        if image_id in listed:
            detail = f"{where}: the id {image_id} is used twice; objects cannot be assigned to images"
            raise DataError(detail, path=file)
        if not isinstance(image.get("file_name"), str) or not image["file_name"].strip():
            report.skip_image(SkipReason.UNREADABLE_ANNOTATION, file.name, f"{where} has no file_name")
            continue
        listed[image_id] = where, image
    images = ImageFolder(images_dir)
    found = report.find_all(images, [[image["file_name"]] for _, image in listed.values()], file.name)
    report.note_unnamed(images, found, file.name)
    usable: dict[str | None, SourceImage] = {}
    for (image_id, (where, image)), source in zip(listed.items(), found, strict=True):
        given = image["file_name"]
        if source.problem is not None and unsafe_file_name(with_slashes(given)):
            detail = f"{where}: {given!r} leaves the images folder, or is not a file's name: {source.problem}"
            report.skip_image(SkipReason.UNSAFE_FILE_NAME, file.name, detail)
        else:
            source.declared_size = declared_size(image.get("width"), image.get("height"))
            usable[image_id] = source
    there = sum(source.problem is None for source in usable.values())
    if there and not coco["annotations"] and not options.keep_emptied:
        cure = "give the file with the objects (image_info_*.json has none); --keep-emptied reads them as such images"
        refuse_unlabelled(there, "has an annotation", file, cure)
    for index, annotation in enumerate(coco["annotations"]):
        entry = annotation if isinstance(annotation, dict) else {}
        source = usable.get(_id_of(entry, "image_id"))
        if source is None:
            report.objects_seen += 1
            detail = f"no usable image has the id {entry.get('image_id')!r}"
            report.skip_object(SkipReason.UNKNOWN_IMAGE, file.name, index, detail)
            continue
        with report.reading_object(source, index):
            category = _id_of(annotation, "category_id")
            if category is None or category not in descs:
                raise LeftOut(
                    SkipReason.UNKNOWN_CATEGORY, f"category_id {annotation.get('category_id')!r} is not in categories"
                )
            desc = descs[category]
            is_crowd = _is_set(annotation, "iscrowd")
            if is_crowd and crowds == "leave_out":
                raise LeftOut(SkipReason.CROWD, f"{desc}: iscrowd marks a group, not an object")
            if not is_crowd and _is_set(annotation, "ignore"):
                raise LeftOut(SkipReason.IGNORED, f"{desc}: marked to be ignored")
            if geometry == "bbox":
                box = annotation.get("bbox")
                has_ring = not box and annotation.get("segmentation")
                given = f"bbox is {box!r}" + ("; its segmentation is read with --geometry poly" if has_ring else "")
                source.objects.append([shape_of(index, desc, "size", box, given)])
            else:
                source.objects.append(_parts(index, annotation.get("segmentation"), desc, source, report))
            if is_crowd:
                report.note(Note.CROWD_KEPT, source.file, index, f"{desc}: a group, kept as one object")
    return assemble(sorted(usable.values(), key=lambda source: source.file), report, options, meaning)


def _is_set(annotation: dict[str, Any], key: str) -> bool:
    # Tables of Python and R write text.
    return str(annotation.get(key)).strip().lower() not in ("", "none", "false", "0", "0.0")


def _id_of(entry: Any, key: str) -> str | None:
    # Ids compare as text: some tools write numbers as text, or whole numbers as 1.0.
    value = entry.get(key) if isinstance(entry, dict) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else None


def _parts(
    index: int, segmentation: Any, desc: str, source: SourceImage, report: ConversionReport
) -> list[SourceShape]:
    # The polygons of an object, or the outline of the largest part of its run-length mask.
    if isinstance(segmentation, dict):
        try:
            ring, parts, holes = outline(decode_runs(segmentation, source.declared_size))
        except ValueError as error:
            raise LeftOut(SkipReason.MALFORMED_GEOMETRY, f"{desc}: run-length mask: {error}") from error
        report.note(Note.MASK_TRACED, source.file, index, f"{desc}: {len(ring) // 2} vertices along its mask")
        if parts > 1:
            report.note(Note.MULTIPART_POLYGON, source.file, index, f"{desc}: kept the largest of {parts} parts")
        if holes:
            detail = f"{desc}: its mask has {holes} holes, the polygon has none"
            report.note(Note.FILLED_HOLES, source.file, index, detail)
        return [shape_of(index, desc, "ring", ring)]
    if not isinstance(segmentation, list) or not segmentation:
        raise LeftOut(SkipReason.NO_SEGMENTATION, f"{desc}: no segmentation")
    if finite_numbers(segmentation) is not None:  # a polygon without the list around it, as VIA exports it
        segmentation = [segmentation]
    return [shape_of(index, desc, "ring", part, segmentation) for part in segmentation]


def decode_runs(segmentation: dict[str, Any], size: tuple[int, int] | None) -> np.ndarray:
    """A COCO run-length mask, compressed or as a list of counts → (height, width) of bool.

    ``size``: the (width, height) of the image in its annotation; None without one. Raises ValueError for other masks.
    """
    shape, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(shape, list) or len(shape) != 2 or any(type(side) is not int or side < 1 for side in shape):
        raise ValueError(f"size is {shape!r}, not [height, width]")
    height, width = shape
    if height * width > _LARGEST or (size is not None and (width, height) != size):
        raise ValueError(f"the mask is {width}x{height}, the image {'of another size' if size is None else size}")
    runs = counts
    if isinstance(counts, str):
        from faster_coco_eval.mask_api_new_cpp import toUncompressedRLE

        try:
            runs = toUncompressedRLE([{"size": shape, "counts": counts.encode()}])[0]["counts"]
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"counts are no COCO text: {error}") from error
    if not isinstance(runs, list) or any(type(run) is not int or run < 0 for run in runs):
        raise ValueError("counts are neither a list of numbers nor COCO's text")
    if sum(runs) != height * width:
        raise ValueError(f"the runs add up to {sum(runs)} pixels, and the mask has {height * width}")
    values = np.arange(len(runs)) % 2 == 1  # the first run is outside
    return np.repeat(values, runs).reshape(width, height).T  # column by column


def outline(mask: np.ndarray) -> tuple[tuple[float, ...], int, int]:
    """The outer ring of the largest part of ``mask`` (height, width) of bool, in pixels from the image's corner, and
    the mask's numbers of parts and of holes, which the ring lacks. Raises ValueError for an empty mask."""
    from contourpy import contour_generator

    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        raise ValueError("the mask is empty")
    top, left = int(rows[0]), int(columns[0])
    part = mask[top : rows[-1] + 1, left : columns[-1] + 1]
    # A line along the pixels' edges would be a stair; one half-way between inside and outside cuts their corners.
    lines = contour_generator(z=np.pad(part, 1).astype(np.float64), name="serial").lines(0.5)
    rings: list[tuple[float, ...]] = []
    for line in lines:
        points_N2 = np.asarray(line)[:-1] + np.array([left - 0.5, top - 0.5])
        # Points on a straight stretch are dropped.
        before_N2, after_N2 = points_N2 - np.roll(points_N2, 1, axis=0), np.roll(points_N2, -1, axis=0) - points_N2
        turns_N = before_N2[:, 0] * after_N2[:, 1] != before_N2[:, 1] * after_N2[:, 0]
        rings.append(tuple(points_N2[turns_N].ravel().tolist()))
    areas = [signed_ring_area(ring) for ring in rings]
    largest = max(range(len(rings)), key=lambda k: abs(areas[k]))  # the outermost ring is larger than any hole
    parts = sum((area > 0) == (areas[largest] > 0) for area in areas)  # holes turn the other way
    return rings[largest], parts, len(rings) - parts
