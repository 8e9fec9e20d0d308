"""LabelMe (one JSON an image) → JSONL: polygons, rectangles, and circles as their bounding boxes."""

from __future__ import annotations

import base64
import math
import os
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from coordexp.data.convert.assemble import ImageOptions, assemble
from coordexp.data.convert.shapes import (
    REPORT_SUFFIX,
    ConversionReport,
    LeftOut,
    ShapeGeometry,
    SkipReason,
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
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
) -> ConversionReport:
    """Convert a folder of LabelMe files to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    Args:
        folder: searched for ``*.json``, below it too.
        images_dir: the folder in which ``imagePath`` starts; each file's own when None. If a path does not exist, such
            as the annotator's own ``C:\\photos\\a.jpg``, its last part is looked for.
        geometry: ``bbox`` writes the bounds of polygons, ``poly`` rectangles by their corners and circles by points.
    """
    folder = Path(folder)
    check_choice("geometry", geometry, ShapeGeometry)
    check_folder(folder, "folder")
    files = sorted(file for file in folder.rglob("*.json") if not file.name.endswith(REPORT_SUFFIX))
    if not files:
        raise DataError("no *.json below this folder; LabelMe writes one next to each image", path=folder)
    report = ConversionReport(Path(out_dir) / f"{options.name or folder.resolve().name}.jsonl")
    home = folder if images_dir is None else Path(images_dir)
    sources = []
    for file in files:
        report.images_seen += 1
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
        base = file.parent if images_dir is None else home
        image_path = with_slashes(content["imagePath"])
        image = Path(os.path.normpath(base / image_path.replace("\0", "")))
        if not image.is_file():  # a path of another machine, for instance
            image = base / PurePosixPath(image_path).name
        # The image's path from the folder, without the steps that lead out of it.
        parts = PurePosixPath(Path(os.path.relpath(image, home)).as_posix()).parts
        named = "/".join(part for part in parts if part != "..")
        objects = []
        for index, shape in enumerate(content["shapes"]):
            with report.reading_object(shown, index):
                objects.append(_read_shape(index, shape, geometry))
        size = declared_size(content.get("imageWidth"), content.get("imageHeight"))
        data = content.get("imageData")
        is_embedded = isinstance(data, str) and bool(data) and not image.is_file()
        # Read again when its turn comes: all images of a folder would not fit into memory.
        embedded = partial(_embedded_image, file) if is_embedded else None
        sources.append(SourceImage(named, shown, image, size, tuple(objects), embedded))
    return assemble(sources, report, options)


def _embedded_image(file: Path) -> bytes:
    try:
        return base64.b64decode(read_json(file)["imageData"], validate=True)
    except ValueError as error:
        raise DataError(f"no base64: {error}", path=file) from error


def _read_shape(index: int, shape: Any, geometry: ShapeGeometry) -> SourceObject:
    fields = shape if isinstance(shape, dict) else {}
    kind, label = fields.get("shape_type") or "polygon", fields.get("label")
    desc = label if isinstance(label, str) else ""
    needed = {"polygon": 3, "rectangle": 2, "circle": 2}.get(kind) if isinstance(kind, str) else None
    if needed is None:
        detail = f"{desc}: shape_type {kind!r} has no area, or is a mask; polygon, rectangle and circle are read"
        raise LeftOut(SkipReason.UNSUPPORTED_SHAPE, detail)
    given = fields.get("points")
    points = None
    if isinstance(given, list) and all(isinstance(point, list) and len(point) == 2 for point in given):
        points = finite_numbers([value for point in given for value in point])
    if points is None or len(points) < 2 * needed or (kind != "polygon" and len(points) not in (4, 8)):
        detail = f"{desc}: {kind} with points {str(given)[:80]}; expected [[x, y], …]"
        raise LeftOut(SkipReason.MALFORMED_GEOMETRY, detail)
    if kind == "rectangle":  # two corners in any order; newer versions write all four
        return box_object(index, desc, bounds(points), geometry)
    if kind == "circle":  # its centre, and a point on it
        x, y, edge_x, edge_y = points[:4]
        radius = math.hypot(edge_x - x, edge_y - y)
        if geometry != "poly":
            return SourceObject(index, desc, "bbox_2d", (x - radius, y - radius, x + radius, y + radius))
        angles = [2 * math.pi * k / _CIRCLE for k in range(_CIRCLE)]
        points = tuple(value for a in angles for value in (x + radius * math.cos(a), y + radius * math.sin(a)))
    return polygon_object(index, desc, points, geometry)
