"""COCO panoptic (one JSON, and per image a PNG with segments as colours) → JSONL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coordexp.data.convert.assemble import ImageOptions, Progress
from coordexp.data.convert.coco import convert_instances, open_instances
from coordexp.data.convert.masks import encode_runs
from coordexp.data.convert.report import ConversionReport, SkipReason
from coordexp.data.convert.source_image import Crowds, InstanceGeometry, check_choice, check_folder, unsafe_file_name
from coordexp.data.images import open_rgb
from coordexp.errors import DataError


def convert_panoptic(
    annotations_json: str | Path,
    images_dir: str | Path,
    out_dir: str | Path,
    *,
    segments_dir: str | Path | None = None,
    geometry: InstanceGeometry = "bbox",
    crowds: Crowds = "leave_out",
    stuff: bool = False,
    name: str | None = None,
    options: ImageOptions = ImageOptions(),  # noqa: B008 - frozen
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a COCO panoptic file as :func:`coordexp.data.convert.convert_coco` does a COCO file.

    Args:
        segments_dir: the folder of the PNGs, read for ``geometry="poly"``; None: next to the file, with its name
            without the suffix, as COCO has it.
        stuff: keep regions without instances (``isthing: 0``); they are left out, and counted, otherwise.

    Raises:
        DataError: the file is not a panoptic file, the PNGs are missing, or nothing usable is found.
    """
    path = Path(annotations_json)
    check_choice("crowds", crowds, Crowds)
    content = open_instances(path, Path(images_dir), geometry)
    segments = path.with_suffix("") if segments_dir is None else Path(segments_dir)
    if geometry == "poly":
        check_folder(segments, "folder of the segments' PNGs (--segments)")
    report = ConversionReport(Path(out_dir) / f"{name or path.stem}.jsonl")
    regions = set() if stuff else {
        category.get("id") for category in content["categories"]
        if isinstance(category, dict) and category.get("isthing") == 0 and isinstance(category.get("id"), int | str)
    }  # fmt: skip
    annotations: list[dict[str, Any]] = []
    for index, annotation in enumerate(content["annotations"]):
        infos = annotation.get("segments_info") if isinstance(annotation, dict) else None
        if not isinstance(infos, list):
            raise DataError(f"annotations[{index}] has no segments_info; expected a COCO panoptic file", path=path)
        kept = []
        for at, info in enumerate(infos):
            if isinstance(info, dict) and _key(info.get("category_id")) in regions:
                report.objects_seen += 1
                report.skip_object(SkipReason.STUFF, path.name, at, f"annotations[{index}]: a region, no instance")
            else:
                kept.append({**info, "image_id": annotation.get("image_id")} if isinstance(info, dict) else {})
        annotations += _with_masks(kept, annotation, segments) if geometry == "poly" else kept
    instances = {**content, "annotations": annotations}
    return convert_instances(instances, path, Path(images_dir), report, geometry, options, progress, crowds)


def _key(category: Any) -> Any:
    return category if isinstance(category, int | str) else None


def _with_masks(infos: Sequence[dict[str, Any]], annotation: dict[str, Any], segments: Path) -> list[dict[str, Any]]:
    """Each segment with its mask; without one where the PNG does not have it."""
    named = annotation.get("file_name")
    if not infos or not isinstance(named, str) or unsafe_file_name(named):
        return list(infos)
    try:
        rgb_HW3 = np.asarray(open_rgb(segments / named), dtype=np.int64)
    except DataError:
        return list(infos)  # each of them is counted as one without a segmentation
    ids_HW = rgb_HW3 @ np.array([1, 256, 65536])
    masked = []
    for info in infos:
        mask = ids_HW == info["id"] if type(info.get("id")) is int else np.zeros(ids_HW.shape, dtype=bool)
        masked.append({**info, "segmentation": encode_runs(mask)} if mask.any() else info)
    return masked
