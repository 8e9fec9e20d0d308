"""COCO's average precision, by pycocotools on the same predictions, and its value on any resample of the images."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coordexp.errors import DataError
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.geometry import aabb
from coordexp.records import NUM_BINS, GTObject

IouType = Literal["bbox", "segm"]

_MAX_DETECTIONS = 100
_RECALLS_R = np.linspace(0.0, 1.0, 101)
_THINNEST = 0.5  # of a bin: COCO gives a box without area IoU 0 with everything, itself included
_AREAS = ("all", "small", "medium", "large")


@dataclass(frozen=True, slots=True)
class CocoData:
    """Ground truth and results in COCO's own formats, in pixels: the two files that other tools read."""

    ground_truth: dict[str, Any]
    results: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class CocoFigures:
    """``figures``: AP (mean over thresholds), AP50, AP75, AP_small, AP_medium, AP_large, AR100; those without any
    ground truth are left out. ``by_class``: AP of each description. ``curves``: what :func:`resampled_ap` needs."""

    figures: dict[str, float]
    by_class: dict[str, float]
    curves: tuple[ClassCurve, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ClassCurve:
    """All detections of a class, best score first: D detections at T thresholds, N images."""

    image_D: np.ndarray
    right_TD: np.ndarray
    ignored_TD: np.ndarray
    num_gt_N: np.ndarray


def to_coco(
    answers: Sequence[ImageAnswer], iou_type: IouType = "bbox", constant_score: float | None = None
) -> CocoData:
    """Answers as COCO's two files; results hold a ``bbox``, or for "segm" a mask.

    Categories are the descriptions of the ground truth, or, where there is none, those that were predicted; predictions
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
                 "iscrowd": 0, **shape}
            )  # fmt: skip
        for found in answer.pred:
            score = found.score if found.score is not None else constant_score
            if score is None:
                raise DataError(
                    f"{answer.sample_id}: {found.desc!r} has no score, and average precision is nothing without; score "
                    "with the model (coordexp predict does), or ask for one score for all: --constant-score 1.0"
                )
            if found.desc in category_of:
                result = {"image_id": image_id, "category_id": category_of[found.desc], "score": score}
                results.append(result | _result_shape(found, answer.width, answer.height, iou_type))
    categories = [{"id": number, "name": name} for name, number in category_of.items()]
    return CocoData({"images": images, "annotations": annotations, "categories": categories}, results)


def _pixels(obj: GTObject | Detection, width: int, height: int) -> dict[str, Any]:
    """Bin k is pixel k / 999 · (side − 1), as in preparation; thinner sides become half a bin wide."""
    per_bin = max(1, width - 1) / (NUM_BINS - 1), max(1, height - 1) / (NUM_BINS - 1)
    x1, y1, x2, y2 = aabb(obj)
    w, h = max(x2 - x1, _THINNEST) * per_bin[0], max(y2 - y1, _THINNEST) * per_bin[1]
    x, y = x1 * per_bin[0], y1 * per_bin[1]
    if obj.kind == "bbox_2d":
        ring, area = [x, y, x + w, y, x + w, y + h, x, y + h], w * h
    else:
        ring = [k * per_bin[at % 2] for at, k in enumerate(obj.bins)]
        xs, ys = np.array(ring[::2]), np.array(ring[1::2])
        area = abs(float(xs @ np.roll(ys, -1) - ys @ np.roll(xs, -1))) / 2
    return {"bbox": [x, y, w, h], "segmentation": [ring], "area": area}


def _result_shape(found: Detection, width: int, height: int, iou_type: IouType) -> dict[str, Any]:
    shape = _pixels(found, width, height)
    if iou_type == "bbox":
        return {"bbox": shape["bbox"]}
    from pycocotools import mask as coco_mask

    rings: Any = shape["segmentation"]
    (mask,) = coco_mask.frPyObjects(rings, height, width)
    return {"segmentation": {"size": mask["size"], "counts": mask["counts"].decode("ascii")}}


def coco_figures(
    answers: Sequence[ImageAnswer],
    iou_type: IouType = "bbox",
    iou_thrs: Sequence[float] | None = None,
    constant_score: float | None = None,
) -> CocoFigures:
    """Average precision as pycocotools computes it; ``iou_thrs`` None stands for 0.50, 0.55, … 0.95."""
    data = to_coco(answers, iou_type, constant_score)
    if not data.ground_truth["annotations"]:
        return CocoFigures({}, {}, ())
    evaluation = _run_pycocotools(data, iou_type, iou_thrs)
    precision = evaluation.eval["precision"]  # thresholds, recalls, classes, areas, limits
    recall = evaluation.eval["recall"]
    thresholds = list(evaluation.params.iouThrs)

    def mean(values: np.ndarray) -> float | None:
        known = values[values > -1]
        return float(known.mean()) if known.size else None

    figures = {"AP": mean(precision[:, :, :, 0, -1])}
    for name, threshold in (("AP50", 0.5), ("AP75", 0.75)):
        at = [k for k, other in enumerate(thresholds) if abs(other - threshold) < 1e-9]
        figures[name] = mean(precision[at[0], :, :, 0, -1]) if at else None
    for index, area in enumerate(_AREAS[1:], start=1):
        figures[f"AP_{area}"] = mean(precision[:, :, :, index, -1])
    figures["AR100"] = mean(recall[:, :, 0, -1])
    names = [category["name"] for category in data.ground_truth["categories"]]
    by_class = {name: mean(precision[:, :, k, 0, -1]) for k, name in enumerate(names)}
    return CocoFigures(
        {name: value for name, value in figures.items() if value is not None},
        {name: value for name, value in by_class.items() if value is not None},
        _curves(evaluation, len(answers)),
    )


def _run_pycocotools(data: CocoData, iou_type: IouType, iou_thrs: Sequence[float] | None) -> Any:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress, and has no way to ask it not to
        truth: Any = COCO()
        truth.dataset = data.ground_truth
        truth.createIndex()
        found = truth.loadRes(data.results) if data.results else _no_results(truth)
        evaluation = COCOeval(truth, found, iou_type)
        if iou_thrs is not None:
            evaluation.params.iouThrs = np.array(sorted(iou_thrs), dtype=np.float64)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _no_results(truth: Any) -> Any:
    from pycocotools.coco import COCO

    empty: Any = COCO()
    empty.dataset = {**truth.dataset, "annotations": []}
    empty.createIndex()
    return empty


def _curves(evaluation: Any, num_images: int) -> tuple[ClassCurve, ...]:
    params = evaluation.params
    curves = []
    images = sorted(params.imgIds)
    for k in range(len(params.catIds)):
        first = k * len(params.areaRng) * len(images)  # the first area range is "all"
        parts = [(i, part) for i, part in enumerate(evaluation.evalImgs[first : first + len(images)]) if part]
        num_gt_N = np.zeros(num_images, dtype=np.int64)
        for i, part in parts:
            num_gt_N[i] = np.count_nonzero(np.asarray(part["gtIgnore"]) == 0)
        counts = [min(_MAX_DETECTIONS, len(part["dtScores"])) for _, part in parts]
        score_D = np.concatenate([part["dtScores"][:_MAX_DETECTIONS] for _, part in parts] or [np.zeros(0)])
        order_D = np.argsort(-score_D, kind="mergesort")
        empty = np.zeros((len(params.iouThrs), 0))
        curves.append(
            ClassCurve(
                image_D=np.repeat([i for i, _ in parts], counts)[order_D].astype(np.int64),
                right_TD=np.concatenate(
                    [part["dtMatches"][:, :_MAX_DETECTIONS] > 0 for _, part in parts] or [empty], axis=1
                )[:, order_D].astype(bool),
                ignored_TD=np.concatenate(
                    [part["dtIgnore"][:, :_MAX_DETECTIONS] for _, part in parts] or [empty], axis=1
                )[:, order_D].astype(bool),
                num_gt_N=num_gt_N,
            )
        )
    return tuple(curves)


def resampled_ap(curves: Sequence[ClassCurve], weight_N: np.ndarray) -> float:
    """AP where image n stands ``weight_N[n]`` times; weights of 1 give :func:`coco_figures`' own AP."""
    precisions = []
    for curve in curves:
        num_gt = int(curve.num_gt_N @ weight_N)
        if num_gt == 0:
            continue
        weight_D = weight_N[curve.image_D]
        right_TD = np.cumsum((curve.right_TD & ~curve.ignored_TD) * weight_D, axis=1)
        wrong_TD = np.cumsum((~curve.right_TD & ~curve.ignored_TD) * weight_D, axis=1)
        for right_D, wrong_D in zip(right_TD, wrong_TD, strict=True):
            precision_D = right_D / (right_D + wrong_D + np.spacing(1))
            precision_D = np.maximum.accumulate(precision_D[::-1])[::-1]
            at_R = np.searchsorted(right_D / num_gt, _RECALLS_R, side="left")
            precisions.append(np.append(precision_D, 0.0)[np.minimum(at_R, len(precision_D))])
    return float(np.mean(precisions)) if precisions else 0.0
