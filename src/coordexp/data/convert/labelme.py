"""LabelMe (one JSON an image) → JSONL: polygons, rectangles, and circles as their bounding boxes."""

from __future__ import annotations

import base64
import math
import os
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from coordexp.data.convert.assemble import ImageOptions, Progress, assemble
from coordexp.data.convert.report import REPORT_SUFFIX, ConversionReport, LeftOut, SkipReason
from coordexp.data.convert.source_image import (
    ShapeGeometry,
    SourceImage,
    SourceObject,
    bounds,
    box_object,
    check_choice,
    check_folder,
    declared_size,
    finite_numbers,
    polygon_object,
    with_slashes,
)
from coordexp.data.files import read_json
from coordexp.errors import DataError

_CIRCLE = 24  # vertices: 99% of its area


def convert_labelme(
    folder: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    geometry: ShapeGeometry = "as_annotated",
    name: str | None = None,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a folder of LabelMe files to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    Args:
        folder: searched for ``*.json``, below it too.
        images_dir: the folder in which ``imagePath`` starts; each file's own when None. A path that is not there, the
            annotator's own ``C:\\photos\\a.jpg`` above all, is looked for by its last part.
        geometry: ``bbox`` writes the bounds of polygons, ``poly`` rectangles by their corners and circles by points.
        name: of the JSONL; the folder's when None.

    Raises:
        DataError: no such folder, no file in it, or nothing usable.
    """
    folder = Path(folder)
    check_choice("geometry", geometry, ShapeGeometry)
    check_folder(folder, "folder")
    files = sorted(file for file in folder.rglob("*.json") if not file.name.endswith(REPORT_SUFFIX))
    if not files:
        raise DataError("no *.json below this folder; LabelMe writes one next to each image", path=folder)
    report = ConversionReport(Path(out_dir) / f"{name or folder.resolve().name}.jsonl")
    sources = []
    for file in files:
        report.images_seen += 1
        source = _read_file(file, folder, None if images_dir is None else Path(images_dir), geometry, report)
        if source is not None:
            sources.append(source)
    return assemble(sources, report, options, progress)


def _read_file(
    file: Path, root: Path, images_dir: Path | None, geometry: ShapeGeometry, report: ConversionReport
) -> SourceImage | None:
    shown = file.relative_to(root).as_posix()
    try:
        content = read_json(file)
    except DataError as error:
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, str(error))
        return None
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, "no list 'shapes': not a LabelMe file")
        return None
    image_path = content.get("imagePath")
    if not isinstance(image_path, str) or not image_path.strip():
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, "no imagePath")
        return None
    base = file.parent if images_dir is None else images_dir
    image = _find_image(with_slashes(image_path), base)
    named = _name_below(image, root if images_dir is None else images_dir)
    objects = []
    for index, shape in enumerate(content["shapes"]):
        with report.reading_object(shown, index):
            objects.append(_read_shape(index, shape, geometry))
    size = declared_size(content.get("imageWidth"), content.get("imageHeight"))
    data = content.get("imageData")
    is_embedded = isinstance(data, str) and bool(data) and not image.is_file()
    # Read again when its turn comes: all images of a folder would not fit into memory.
    embedded = partial(_embedded_image, file) if is_embedded else None
    return SourceImage(named, shown, image, size, tuple(objects), embedded)


def _embedded_image(file: Path) -> bytes:
    try:
        return base64.b64decode(read_json(file)["imageData"], validate=True)
    except ValueError as error:
        raise DataError(f"no base64: {error}", path=file) from error


def _find_image(image_path: str, base: Path) -> Path:
    """``imagePath`` below ``base``; only its last part if that file is missing, e.g. a path of another machine."""
    led_to = Path(os.path.normpath(base / image_path.replace("\0", "")))
    return led_to if led_to.is_file() else base / PurePosixPath(image_path).name


def _name_below(image: Path, folder: Path) -> str:
    """The image's path from ``folder``, without the steps that lead out of it."""
    parts = PurePosixPath(Path(os.path.relpath(image, folder)).as_posix()).parts
    return "/".join(part for part in parts if part != "..")


def _read_shape(index: int, shape: Any, geometry: ShapeGeometry) -> SourceObject:
    fields = shape if isinstance(shape, dict) else {}
    kind, label = fields.get("shape_type") or "polygon", fields.get("label")
    desc = label if isinstance(label, str) else ""
    points = _points(fields.get("points"))
    needed = {"polygon": 3, "rectangle": 2, "circle": 2}.get(kind) if isinstance(kind, str) else None
    if needed is None:
        detail = f"{desc}: shape_type {kind!r} has no area, or is a mask; polygon, rectangle and circle are read"
        raise LeftOut(SkipReason.UNSUPPORTED_SHAPE, detail)
    if points is None or len(points) < 2 * needed or (kind != "polygon" and len(points) not in (4, 8)):
        detail = f"{desc}: {kind} with points {str(fields.get('points'))[:80]}; expected [[x, y], …]"
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
    if kind == "rectangle":  # two corners in any order; newer versions write all four
        return box_object(index, desc, bounds(points), geometry)
    if kind == "circle":  # its centre, and a point on it
        x, y, edge_x, edge_y = points[:4]
        radius = math.hypot(edge_x - x, edge_y - y)
        if geometry == "poly":
            return SourceObject(index, desc, "poly", _circle(x, y, radius))
        return SourceObject(index, desc, "bbox_2d", (x - radius, y - radius, x + radius, y + radius))
    return polygon_object(index, desc, points, geometry)


def _circle(x: float, y: float, radius: float) -> tuple[float, ...]:
    angles = [2 * math.pi * k / _CIRCLE for k in range(_CIRCLE)]
    return tuple(value for a in angles for value in (x + radius * math.cos(a), y + radius * math.sin(a)))


def _points(points: Any) -> tuple[float, ...] | None:
    """[[x, y], …] as a flat tuple; None when it is anything else."""
    if not isinstance(points, list) or any(not isinstance(point, list) or len(point) != 2 for point in points):
        return None
    return finite_numbers([value for point in points for value in point])
