"""Answers in COCO's formats, their average precision, and its value on any resample of the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coordexp.data.polygons import shape_area
from coordexp.errors import DataError
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.evaluation.average_precision import AREAS, THRESHOLDS_T, ClassCurve, class_curves
from coordexp.geometry import aabb, pixel_ring, to_pixel
from coordexp.records import GTObject

IouType = Literal["bbox", "segm"]

_THINNEST = 0.5  # of a bin: COCO gives a box without area IoU 0 with everything, itself included


@dataclass(frozen=True, slots=True)
class CocoData:
    """Ground truth and results in COCO's own formats, in pixels: the two files that other tools read."""

    ground_truth: dict[str, Any]
    results: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class CocoFigures:
    """``figures``: AP (mean over thresholds), AP50, AP75, AP_small, AP_medium, AP_large, AR100; those without any
    ground truth are left out. ``by_class``: AP of each annotated description; ``curve_of``: its detections."""

    figures: dict[str, float]
    by_class: dict[str, float]
    curve_of: dict[str, ClassCurve]

    @property
    def curves(self) -> tuple[ClassCurve, ...]:
        """What :func:`resampled_ap` needs."""
        return tuple(self.curve_of.values())


def to_coco(
    answers: Sequence[ImageAnswer], iou_type: IouType = "bbox", constant_score: float | None = None
) -> CocoData:
    """Answers as COCO's two files; results hold a ``bbox``, or for "segm" a mask.

    Soft objects are crowds there: what finds them is neither right nor wrong. Categories are the descriptions of the
    ground truth, or, where there is none, those that were predicted; predictions
    of other descriptions have no category to count in and are left out.

    Args:
        constant_score: of predictions without a score.

    Raises:
        DataError: a prediction has no score, and no ``constant_score`` was given.
    """
    sources = [answer.gt if answer.gt is not None else answer.pred for answer in answers]
    names = sorted({obj.desc for objects in sources for obj in objects})
    category_of = {name: number for number, name in enumerate(names, start=1)}
    images, annotations, results = [], [], []
    for image_id, answer in enumerate(answers, start=1):
        images.append({"id": image_id, "file_name": answer.image, "width": answer.width, "height": answer.height})
        for obj in answer.gt or ():
            shape = _pixels(obj, answer.width, answer.height)
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image_id, "category_id": category_of[obj.desc],
                 "iscrowd": int(obj.soft is not None), **shape}
            )  # fmt: skip
        for detection in answer.pred:
            score = detection.score if detection.score is not None else constant_score
            if score is None:
                raise DataError(
                    f"{answer.sample_id}: {detection.desc!r} has no score, and average precision is nothing without; "
                    "score with the model (coordexp predict does), or ask for one score for all: --constant-score 1.0"
                )
            if detection.desc in category_of:
                result = {"image_id": image_id, "category_id": category_of[detection.desc], "score": score}
                results.append(result | _result_shape(detection, answer.width, answer.height, iou_type))
    categories = [{"id": number, "name": name} for name, number in category_of.items()]
    return CocoData({"images": images, "annotations": annotations, "categories": categories}, results)


def to_results(
    answer: ImageAnswer, image_id: int, category_ids: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """One image's predictions as COCO results in its pixels, polygons with their outline. ``category_ids`` by name;
    names that it lacks are numbered behind it in order of appearance. A score that nobody gave is 1."""
    number = dict(category_ids or {})
    results = []
    for detection in answer.pred:
        category = number.setdefault(detection.desc, max(number.values(), default=0) + 1)
        result = {"image_id": image_id, "category_id": category, "category_name": detection.desc}
        result |= {"score": 1.0 if detection.score is None else detection.score}
        result |= {"bbox": _pixel_box(detection, answer.width, answer.height)}
        if detection.kind == "poly":
            result["segmentation"] = _pixels(detection, answer.width, answer.height)["segmentation"]
        results.append(result)
    return results


def _pixels(obj: GTObject | Detection, width: int, height: int) -> dict[str, Any]:
    """An object's box, outline and area."""
    x, y, w, h = _pixel_box(obj, width, height)
    if obj.kind == "bbox_2d":
        ring, area = [x, y, x + w, y, x + w, y + h, x, y + h], w * h
    else:
        ring = [value for point in pixel_ring(obj, width, height) for value in point]
        area = shape_area("poly", ring)
    return {"bbox": [x, y, w, h], "segmentation": [ring], "area": area}


def _pixel_box(obj: GTObject | Detection, width: int, height: int) -> list[float]:
    """x, y, width, height; thinner sides become half a bin wide."""
    x1, y1, x2, y2 = aabb(obj)
    sides = to_pixel(max(x2 - x1, _THINNEST), width), to_pixel(max(y2 - y1, _THINNEST), height)
    return [to_pixel(x1, width), to_pixel(y1, height), *sides]


def _result_shape(detection: Detection, width: int, height: int, iou_type: IouType) -> dict[str, Any]:
    if iou_type == "bbox":
        return {"bbox": _pixel_box(detection, width, height)}
    from pycocotools import mask as coco_mask

    rings: Any = _pixels(detection, width, height)["segmentation"]
    (mask,) = coco_mask.frPyObjects(rings, height, width)
    return {"segmentation": {"size": mask["size"], "counts": mask["counts"].decode("ascii")}}


def coco_figures(
    answers: Sequence[ImageAnswer],
    iou_type: IouType = "bbox",
    iou_thrs: Sequence[float] | None = None,
    constant_score: float | None = None,
) -> CocoFigures:
    """Average precision as pycocotools computes it; ``iou_thrs`` None stands for 0.50, 0.55, … 0.95."""
    return figures_of_coco(to_coco(answers, iou_type, constant_score), iou_type, iou_thrs)


def figures_of_coco(data: CocoData, iou_type: IouType, iou_thrs: Sequence[float] | None = None) -> CocoFigures:
    """:func:`coco_figures` of what :func:`to_coco` made with the same ``iou_type``."""
    if not data.ground_truth["annotations"]:
        return CocoFigures({}, {}, {})
    thresholds = THRESHOLDS_T if iou_thrs is None else np.array(sorted(iou_thrs), dtype=np.float64)
    curves = class_curves(data.ground_truth, data.results, iou_type, thresholds)
    by_description = [curve.precision_TR() for curve in curves["all"]]
    precisions = [precision_TR for precision_TR in by_description if precision_TR is not None]
    figures = {"AP": _mean(precisions)}
    for name, threshold in (("AP50", 0.5), ("AP75", 0.75)):
        at = np.flatnonzero(np.abs(thresholds - threshold) < 1e-9)
        figures[name] = _mean([precision_TR[at[0]] for precision_TR in precisions]) if at.size else None
    for area in [name for name in AREAS if name != "all"]:
        figures[f"AP_{area}"] = _mean([curve.precision_TR() for curve in curves[area]])
    figures["AR100"] = _mean([curve.recall_T() for curve in curves["all"]])
    names = [category["name"] for category in data.ground_truth["categories"]]
    by_class = {name: float(part.mean()) for name, part in zip(names, by_description, strict=True) if part is not None}
    curve_of = dict(zip(names, curves["all"], strict=True))
    return CocoFigures(
        {name: value for name, value in figures.items() if value is not None},
        by_class,
        {name: curve_of[name] for name in by_class},
    )


def _mean(parts: Sequence[np.ndarray | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return float(np.mean(known)) if known else None


def resampled_ap(curves: Sequence[ClassCurve], weight_N: np.ndarray) -> float:
    """AP where image n stands ``weight_N[n]`` times; weights of 1 give :func:`coco_figures`' own AP."""
    return _mean([curve.precision_TR(weight_N) for curve in curves]) or 0.0
