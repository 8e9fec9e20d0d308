"""Answers in COCO's formats, and their average precision.

faster-coco-eval computes it; its figures are pycocotools' own, which ``tests/unit/evaluation/test_coco.py`` checks.
Suffixes: T thresholds, R recalls, K classes, A ranges of areas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coordexp.data.class_list import ClassNumbers
from coordexp.data.files import write_atomically
from coordexp.data.polygons import shape_area
from coordexp.errors import DataError
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, each_changed
from coordexp.geometry import aabb, pixel_ring, to_pixel
from coordexp.records import GTObject

IouType = Literal["bbox", "segm"]

THRESHOLDS_T = np.linspace(0.5, 0.95, 10)
RECALLS_R = np.linspace(0.0, 1.0, 101)
AREAS = {"small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e5**2)}  # pixels, after "all"
COCO_FILES = ("coco_ground_truth.json", "coco_results_bbox.json", "coco_results_segm.json")
MAX_DETECTIONS = 100  # of a class in an image, highest scores first
_THINNEST = 0.5  # of a bin: COCO gives a box without area IoU 0 with everything, itself included
_THINNEST_FRACTION = 0.001  # in answers of tiles, in which half a bin of the photograph may be an object


@dataclass(frozen=True, slots=True)
class CocoData:
    """COCO's two files, in pixels: ground truth and results."""

    ground_truth: dict[str, Any]
    results: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class AveragePrecision:
    """``figures``: AP (mean over thresholds), AP50, AP75, AP_small, AP_medium, AP_large, AR100; those without ground
    truth are left out. ``precision_of``: precision (T, R) by annotated description."""

    figures: dict[str, float] = field(default_factory=dict)
    precision_of: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def by_class(self) -> dict[str, float]:
        """AP by annotated description."""
        return {name: float(precision_TR.mean()) for name, precision_TR in self.precision_of.items()}


def to_coco(
    answers: Sequence[ImageAnswer],
    iou_type: IouType | None = "bbox",
    numbers: ClassNumbers | None = None,
    image_ids: Sequence[int] | None = None,
) -> CocoData:
    """Answers as COCO's two files, in pixels of the users' images.

    Soft objects are crowds: predictions that find one are neither right nor wrong.

    Args:
        iou_type: of results: "bbox" gives them a ``bbox``, "segm" a mask as run lengths, None all of
            :func:`coco_shape`, but no ``segmentation`` of boxes.
        numbers: of the classes; None numbers the descriptions of the ground truth, or of the predictions for images
            without annotations, from 1.
        image_ids: one per answer instead of 1, 2, ….

    Raises:
        DataError: a prediction has no score.
    """
    if numbers is None:
        sources = [answer.pred if answer.gt is None else answer.gt for answer in answers]
        numbers = ClassNumbers.of(sorted({obj.desc for objects in sources for obj in objects}), 1)
    images, annotations, results = [], [], []
    for image_id, answer in zip(image_ids or range(1, len(answers) + 1), answers, strict=True):
        image = answer.users_image
        images.append({"id": image_id, "file_name": image.file, "width": image.width, "height": image.height})
        for obj in answer.gt or ():
            annotation = {"id": len(annotations) + 1, "image_id": image_id, "category_id": numbers[obj.desc]}
            annotation |= {"iscrowd": int(obj.soft is not None), **coco_shape(obj, answer)}
            annotations.append(annotation)
        for detection in answer.pred:
            if detection.score is None:
                raise DataError(
                    f"{answer.sample_id}: {detection.desc!r} has no score, and average precision needs one; "
                    "score with the model (coordexp predict does), or give all the same score: --constant-score 1.0"
                )
            shape = coco_shape(detection, answer)
            if iou_type == "bbox":
                shape = {"bbox": shape["bbox"]}
            elif iou_type == "segm":
                from pycocotools import mask as coco_mask

                (mask,) = coco_mask.frPyObjects(shape["segmentation"], image.height, image.width)
                shape = {"segmentation": {"size": mask["size"], "counts": mask["counts"].decode("ascii")}}
            elif detection.kind == "bbox_2d":
                del shape["segmentation"]
            result = {"image_id": image_id, "category_id": numbers[detection.desc], "score": detection.score}
            results.append(result | shape)
    used = (obj.desc for answer in answers for obj in (*(answer.gt or ()), *answer.pred))
    categories = [{"id": number, "name": name, "supercategory": ""} for number, name in numbers.names(used).items()]
    # All sections and fields of the format: pycocotools 2.0.9 and 2.0.10 need `info`, CVAT's reader `licenses`.
    truth = {"info": {}, "licenses": [], "images": images, "annotations": annotations, "categories": categories}
    return CocoData(truth, results)


def with_scores(answer: ImageAnswer) -> ImageAnswer:
    """The answer with score 1 for each prediction that has none: results need a number where nothing is ranked."""
    return replace(answer, pred=tuple(o if o.score is not None else replace(o, score=1.0) for o in answer.pred))


def with_constant_score(answers: Sequence[ImageAnswer], score: float | None) -> Sequence[ImageAnswer]:
    """The answers with ``score`` for every prediction, instead of its own; None: as they are."""
    if score is None:
        return answers
    return each_changed(answers, lambda obj: replace(obj, score=score))


def write_coco(
    answers: Sequence[ImageAnswer], folder: Path, segm: bool = False, classes: Sequence[str] = ()
) -> list[Path]:
    """:data:`COCO_FILES`, as other tools read them; the last one, of masks, only with ``segm``, without which an
    earlier one is removed. ``classes``: the class list; annotated names that it lacks follow it. Empty: as for
    :func:`to_coco`."""
    annotated = {obj.desc for answer in answers for obj in answer.gt or ()}
    listed = (*classes, *sorted(annotated.difference(classes)))
    numbers = ClassNumbers.of(listed, 1) if classes else None
    boxes = to_coco(answers, "bbox", numbers)
    contents: list[object] = [boxes.ground_truth, boxes.results]
    if segm:
        contents.append(to_coco(answers, "segm", numbers).results)
    else:
        (folder / COCO_FILES[-1]).unlink(missing_ok=True)
    paths = [folder / name for name in COCO_FILES[: len(contents)]]
    for path, content in zip(paths, contents, strict=True):
        write_atomically(path, json.dumps(content, ensure_ascii=False) + "\n")
    return paths


def coco_shape(obj: GTObject | ScoredObject, answer: ImageAnswer) -> dict[str, Any]:
    """``bbox`` (x, y, width, height), ``segmentation`` and ``area`` of an object of ``answer`` in pixels of the user's
    image; thinner sides become half a bin wide."""
    x1, y1, x2, y2 = aabb(obj)
    width, height = answer.users_image.width, answer.users_image.height
    x, y = to_pixel(x1, width), to_pixel(y1, height)
    thinnest = _THINNEST_FRACTION if any(isinstance(k, float) for k in obj.bins) else _THINNEST
    w, h = to_pixel(max(x2 - x1, thinnest), width), to_pixel(max(y2 - y1, thinnest), height)
    if obj.kind == "bbox_2d":
        ring, area = [x, y, x + w, y, x + w, y + h, x, y + h], w * h
    else:
        ring = [value for point in pixel_ring(obj, width, height) for value in point]
        area = shape_area("poly", ring)
    return {"bbox": [x, y, w, h], "segmentation": [ring], "area": area}


def average_precision(
    answers: Sequence[ImageAnswer] | CocoData,
    iou_type: IouType = "bbox",
    iou_thrs: Sequence[float] | None = None,
) -> AveragePrecision:
    """COCO's figures of answers, or of their :func:`to_coco` (whose errors it raises) with the same ``iou_type``.
    ``iou_thrs`` None means 0.50, 0.55, … 0.95."""
    data = answers if isinstance(answers, CocoData) else to_coco(answers, iou_type)
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
    parts = {"AP": precision_TRKA[..., 0]}
    for name, threshold in (("AP50", 0.5), ("AP75", 0.75)):
        parts[name] = precision_TRKA[np.abs(threshold_T - threshold) < 1e-9, ..., 0]
    parts |= {f"AP_{name}": precision_TRKA[..., a] for a, name in enumerate(AREAS, start=1)}
    parts["AR100"] = recall_TKA[..., 0]
    # COCO writes -1 where there is nothing to find.
    known = {name: values[values > -1] for name, values in parts.items()}
    precision_of = {
        category["name"]: precision_TRKA[..., k, 0]
        for k, category in enumerate(data.ground_truth["categories"])
        if (precision_TRKA[..., k, 0] > -1).all()
    }
    return AveragePrecision({name: float(values.mean()) for name, values in known.items() if values.size}, precision_of)
