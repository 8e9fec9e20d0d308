"""LabelMe (one JSON an image) → JSONL: polygons, rectangles, and circles as their bounding boxes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from coordexp.data.convert.assemble import (
    ImageOptions,
    Progress,
    SourceImage,
    SourceObject,
    assemble,
    bounds,
    unsafe_file_name,
)
from coordexp.data.convert.report import ConversionReport, SkipReason
from coordexp.errors import DataError

Geometry = Literal["as_annotated", "bbox"]


def convert_labelme(
    folder: str | Path,
    out_dir: str | Path,
    *,
    images_dir: str | Path | None = None,
    geometry: Geometry = "as_annotated",
    name: str | None = None,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a folder of LabelMe files to ``out_dir/{name}.jsonl`` with its images in ``out_dir/images/{name}/``.

    Args:
        folder: searched for ``*.json``, below it too.
        images_dir: the folder in which ``imagePath`` starts; each file's own when None.
        geometry: ``bbox`` writes the bounds of polygons.
        name: of the JSONL; the folder's when None.

    Raises:
        DataError: no such folder, no file in it, or nothing usable.
    """
    folder = Path(folder)
    files = sorted(folder.rglob("*.json"))
    if not files:
        raise DataError("no *.json below this folder; LabelMe writes one beside each image", path=folder)
    report = ConversionReport(Path(out_dir) / f"{name or folder.resolve().name}.jsonl")
    sources = []
    for file in files:
        report.images_seen += 1
        source = _read_file(file, folder, None if images_dir is None else Path(images_dir), geometry, report)
        if source is not None:
            sources.append(source)
    return assemble(sources, report, options, progress)


def _read_file(
    file: Path, root: Path, images_dir: Path | None, geometry: Geometry, report: ConversionReport
) -> SourceImage | None:
    shown = file.relative_to(root).as_posix()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, f"not readable as JSON: {error}")
        return None
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, "no list 'shapes': not a LabelMe file")
        return None
    image_path = content.get("imagePath")
    if not isinstance(image_path, str) or not image_path.strip():
        report.skip_image(SkipReason.UNREADABLE_ANNOTATION, shown, "no imagePath")
        return None
    # LabelMe on Windows writes backslashes.
    relative = image_path.replace("\\", "/")
    base = images_dir if images_dir is not None else file.parent
    if unsafe_file_name(relative):
        # It points at where the image lay on the annotator's machine; beside the file is where people keep it.
        relative = Path(relative).name
    image = base / relative
    named = image.relative_to(root).as_posix() if image.is_relative_to(root) else relative
    objects = []
    for index, shape in enumerate(content["shapes"]):
        report.objects_seen += 1
        obj = _read_shape(index, shape, geometry, shown, report)
        if obj is not None:
            objects.append(obj)
    return SourceImage(named, shown, image, _size(content), tuple(objects))


def _size(content: dict[str, Any]) -> tuple[int, int] | None:
    width, height = content.get("imageWidth"), content.get("imageHeight")
    return (width, height) if type(width) is int and type(height) is int and min(width, height) >= 1 else None


def _read_shape(index: int, shape: Any, geometry: Geometry, file: str, report: ConversionReport) -> SourceObject | None:
    fields = shape if isinstance(shape, dict) else {}
    kind, label = fields.get("shape_type") or "polygon", fields.get("label")
    desc = label if isinstance(label, str) else ""
    points = _points(fields.get("points"))
    needed = {"polygon": 3, "rectangle": 2, "circle": 2}.get(kind) if isinstance(kind, str) else None
    if needed is None:
        detail = f"{desc}: shape_type {kind!r} has no area, or is a mask; polygon, rectangle and circle are read"
        report.skip_object(SkipReason.UNSUPPORTED_SHAPE, file, index, detail)
        return None
    if points is None or len(points) < 2 * needed or (kind != "polygon" and len(points) not in (4, 8)):
        detail = f"{desc}: {kind} with points {str(fields.get('points'))[:80]}; expected [[x, y], …]"
        report.skip_object(SkipReason.MALFORMED_GEOMETRY, file, index, detail)
        return None
    if kind == "rectangle":  # two corners in any order; newer versions write all four
        return SourceObject(index, desc, "bbox_2d", bounds(points))
    if kind == "circle":  # its centre, and a point on it
        x, y, edge_x, edge_y = points[:4]
        radius = math.hypot(edge_x - x, edge_y - y)
        return SourceObject(index, desc, "bbox_2d", (x - radius, y - radius, x + radius, y + radius))
    if geometry == "bbox":
        return SourceObject(index, desc, "bbox_2d", bounds(points))
    return SourceObject(index, desc, "poly", points)


def _points(points: Any) -> tuple[float, ...] | None:
    """[[x, y], …] as a flat tuple; None when it is anything else."""
    if not isinstance(points, list) or any(not isinstance(point, list) or len(point) != 2 for point in points):
        return None
    flat = [value for point in points for value in point]
    if any(type(value) not in (int, float) or not math.isfinite(value) for value in flat):
        return None
    return tuple(float(value) for value in flat)
