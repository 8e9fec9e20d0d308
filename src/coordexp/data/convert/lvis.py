"""LVIS JSON → JSONL: COCO's format, but an image names its file by ``coco_url`` only, and a class is ``baby_buggy``."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from coordexp.data.convert.assemble import Progress
from coordexp.data.convert.coco import convert_instances, open_instances
from coordexp.data.convert.prepare import ImageOptions
from coordexp.data.convert.report import ConversionReport
from coordexp.data.convert.sources import Crowds, InstanceGeometry, check_choice


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
        DataError: the file is no LVIS file, or nothing usable is found.
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
