"""Answers in COCO's formats, and their average precision.

faster-coco-eval computes it; its figures are pycocotools' own, which ``tests/unit/evaluation/test_coco.py`` checks.
Suffixes: T thresholds, R recalls, K classes, A ranges of areas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coordexp.data.polygons import shape_area
from coordexp.errors import DataError
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.geometry import aabb, pixel_ring, to_pixel
from coordexp.records import GTObject

IouType = Literal["bbox", "segm"]

THRESHOLDS_T = np.linspace(0.5, 0.95, 10)
RECALLS_R = np.linspace(0.0, 1.0, 101)
AREAS = {"small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e5**2)}  # pixels, after "all"
MAX_DETECTIONS = 100  # of a class in an image, highest scores first
_THINNEST = 0.5  # of a bin: COCO gives a box without area IoU 0 with everything, itself included


@dataclass(frozen=True, slots=True)
class CocoData:
    """Ground truth and results in COCO's own formats, in pixels: the two files that other tools read."""

    ground_truth: dict[str, Any]
    results: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class AveragePrecision:
    """``figures``: AP (mean over thresholds), AP50, AP75, AP_small, AP_medium, AP_large, AR100; those without ground
    truth are left out. By annotated description: ``by_class`` its AP, ``precision_of`` its precision (T, R)."""

    figures: dict[str, float] = field(default_factory=dict)
    by_class: dict[str, float] = field(default_factory=dict)
    precision_of: dict[str, np.ndarray] = field(default_factory=dict)


def to_coco(
    answers: Sequence[ImageAnswer], iou_type: IouType = "bbox", constant_score: float | None = None
) -> CocoData:
    """Answers as COCO's two files; results have a ``bbox``, or for "segm" a mask.

    Soft objects are crowds: predictions that find one are neither right nor wrong. Categories are the descriptions of
    the ground truth, or of the predictions for images without annotations; other predictions are left out.

    Args:
        constant_score: of predictions without a score.

    Raises:
        DataError: a prediction has no score, and no ``constant_score`` was given.
    """
    sources = [answer.pred if answer.gt is None else answer.gt for answer in answers]
    descs = sorted({obj.desc for objects in sources for obj in objects})
    category_of = {desc: number for number, desc in enumerate(descs, start=1)}
    images, annotations, results = [], [], []
    for image_id, answer in enumerate(answers, start=1):
        images.append({"id": image_id, "file_name": answer.image, "width": answer.width, "height": answer.height})
        for obj in answer.gt or ():
            annotation = {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_of[obj.desc]}
            annotation |= {"iscrowd": int(obj.soft is not None), **coco_shape(obj, answer.width, answer.height)}
            annotations.append(annotation)
        for detection in answer.pred:
            score = detection.score if detection.score is not None else constant_score
            if score is None:
                raise DataError(
                    f"{answer.sample_id}: {detection.desc!r} has no score, and average precision needs one; "
                    "score with the model (coordexp predict does), or give all the same score: --constant-score 1.0"
                )
            if detection.desc in category_of:
                result = {"image_id": image_id, "category_id": category_of[detection.desc], "score": score}
                shape = coco_shape(detection, answer.width, answer.height)
                if iou_type == "bbox":
                    result["bbox"] = shape["bbox"]
                else:
                    result["segmentation"] = _run_lengths(shape["segmentation"], answer.width, answer.height)
                results.append(result)
    categories = [{"id": number, "name": name} for name, number in category_of.items()]
    return CocoData({"images": images, "annotations": annotations, "categories": categories}, results)


def write_coco(
    answers: Sequence[ImageAnswer], folder: Path, iou_type: IouType, constant_score: float | None
) -> list[Path]:
    """``coco_ground_truth.json`` and ``coco_results_{iou_type}.json``, as other tools read them."""
    data = to_coco(answers, iou_type, constant_score)
    paths = [folder / "coco_ground_truth.json", folder / f"coco_results_{iou_type}.json"]
    for path, content in zip(paths, (data.ground_truth, data.results), strict=True):
        path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def to_results(
    answer: ImageAnswer, image_id: int, category_ids: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """One image's predictions as COCO results in its pixels, polygons with their outline.

    ``category_ids`` by name; other names get the next numbers in order of appearance. Predictions without a score get
    a score of 1.
    """
    number = dict(category_ids or {})
    results = []
    for detection in answer.pred:
        category = number.setdefault(detection.desc, max(number.values(), default=0) + 1)
        result = {"image_id": image_id, "category_id": category, "category_name": detection.desc}
        shape = coco_shape(detection, answer.width, answer.height)
        result |= {"score": 1.0 if detection.score is None else detection.score, "bbox": shape["bbox"]}
        if detection.kind == "poly":
            result["segmentation"] = shape["segmentation"]
        results.append(result)
    return results


def coco_shape(obj: GTObject | Detection, width: int, height: int) -> dict[str, Any]:
    """``bbox`` (x, y, width, height), ``segmentation`` and ``area`` in pixels; thinner sides become half a bin wide."""
    x1, y1, x2, y2 = aabb(obj)
    x, y = to_pixel(x1, width), to_pixel(y1, height)
    w, h = to_pixel(max(x2 - x1, _THINNEST), width), to_pixel(max(y2 - y1, _THINNEST), height)
    if obj.kind == "bbox_2d":
        ring, area = [x, y, x + w, y, x + w, y + h, x, y + h], w * h
    else:
        ring = [value for point in pixel_ring(obj, width, height) for value in point]
        area = shape_area("poly", ring)
    return {"bbox": [x, y, w, h], "segmentation": [ring], "area": area}


def _run_lengths(rings: Any, width: int, height: int) -> dict[str, Any]:
    from pycocotools import mask as coco_mask

    (mask,) = coco_mask.frPyObjects(rings, height, width)
    return {"size": mask["size"], "counts": mask["counts"].decode("ascii")}


def average_precision(
    answers: Sequence[ImageAnswer],
    iou_type: IouType = "bbox",
    iou_thrs: Sequence[float] | None = None,
    constant_score: float | None = None,
) -> AveragePrecision:
    """COCO's figures; ``iou_thrs`` None means 0.50, 0.55, … 0.95.

    Raises:
        DataError: as :func:`to_coco`.
    """
    return average_precision_of(to_coco(answers, iou_type, constant_score), iou_type, iou_thrs)


def average_precision_of(
    data: CocoData, iou_type: IouType, iou_thrs: Sequence[float] | None = None
) -> AveragePrecision:
    """:func:`average_precision` of what :func:`to_coco` made with the same ``iou_type``."""
    if not data.ground_truth["annotations"]:
        return AveragePrecision()
    from faster_coco_eval import COCO, COCOeval_faster

    truth = COCO(data.ground_truth)
    found = truth.loadRes(data.results) if data.results else COCO({**data.ground_truth, "annotations": []})
    ranges: Any = {name: list(bounds) for name, bounds in AREAS.items()}
    evaluation = COCOeval_faster(truth, found, iou_type, ranges=ranges)
    threshold_T = THRESHOLDS_T if iou_thrs is None else np.array(sorted(iou_thrs), dtype=np.float64)
    evaluation.params.iouThrs, evaluation.params.maxDets = threshold_T, [MAX_DETECTIONS]
    evaluation.evaluate()
    evaluation.accumulate()
    precision_TRKA, recall_TKA = evaluation.eval["precision"][..., -1], evaluation.eval["recall"][..., -1]
    figures = {"AP": _mean(precision_TRKA[..., 0])}
    for name, threshold in (("AP50", 0.5), ("AP75", 0.75)):
        figures[name] = _mean(precision_TRKA[np.abs(threshold_T - threshold) < 1e-9, ..., 0])
    for a, name in enumerate(AREAS, start=1):
        figures[f"AP_{name}"] = _mean(precision_TRKA[..., a])
    figures["AR100"] = _mean(recall_TKA[..., 0])
    precision_of = {
        category["name"]: precision_TRKA[..., k, 0]
        for k, category in enumerate(data.ground_truth["categories"])
        if (precision_TRKA[..., k, 0] > -1).all()
    }
    return AveragePrecision(
        {name: value for name, value in figures.items() if value is not None},
        {name: float(precision_TR.mean()) for name, precision_TR in precision_of.items()},
        precision_of,
    )


def _mean(values: np.ndarray) -> float | None:
    """COCO writes -1 where there is no object."""
    known = values[values > -1]
    return float(known.mean()) if known.size else None
