"""COCO's average precision by pycocotools' rules, for a whole data set at once.

pycocotools walks through every class of every image four times, once for each range of areas. Here whole arrays are
compared, and only detections that compete for an object are walked through; overlaps are pycocotools' own. The figures
are the same to the last bit, which ``tests/unit/evaluation/test_average_precision.py`` checks. By hand, because
comparing two runs weighs images anew a thousand times (:meth:`ClassCurve.precision_TR`), for which neither pycocotools
nor faster-coco-eval, which recount, has a counterpart. Crowds are the soft
objects of a JSONL: what lies in one is ignored, however much of it.

Suffixes: D detections, G objects, P pairs of them, T thresholds, R recalls, N images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_DETECTIONS = 100  # of a class in an image, best scores first
AREAS: Mapping[str, tuple[float, float]] = {
    "all": (0.0, 1e5**2),
    "small": (0.0, 32.0**2),
    "medium": (32.0**2, 96.0**2),
    "large": (96.0**2, 1e5**2),
}
THRESHOLDS_T = np.linspace(0.5, 0.95, 10)
RECALLS_R = np.linspace(0.0, 1.0, 101)
_MASKS = 255  # whose areas pycocotools counts in one call: it writes their number into a byte


@dataclass(frozen=True, slots=True, eq=False)
class ClassCurve:
    """All detections of a class, best score first: what they are at each threshold, and where they stand."""

    image_D: np.ndarray
    right_TD: np.ndarray
    ignored_TD: np.ndarray
    num_gt_N: np.ndarray

    def precision_TR(self, weight_N: np.ndarray | None = None) -> np.ndarray | None:
        """Precision at each recall, where image n stands ``weight_N[n]`` times; None where there is no object."""
        weight_N = np.ones(len(self.num_gt_N), dtype=np.int64) if weight_N is None else weight_N
        num_gt = int(self.num_gt_N @ weight_N)
        if num_gt == 0:
            return None
        weight_D = weight_N[self.image_D]
        right_TD = np.cumsum((self.right_TD & ~self.ignored_TD) * weight_D, axis=1)
        wrong_TD = np.cumsum((~self.right_TD & ~self.ignored_TD) * weight_D, axis=1)
        precision_TD = right_TD / (right_TD + wrong_TD + np.spacing(1))
        best_TD = np.maximum.accumulate(precision_TD[:, ::-1], axis=1)[:, ::-1]
        best_TD = np.concatenate([best_TD, np.zeros((len(best_TD), 1))], axis=1)  # of a recall that is not reached
        curves = [
            best_D[np.searchsorted(recall_D, RECALLS_R, side="left")]
            for best_D, recall_D in zip(best_TD, right_TD / num_gt, strict=True)
        ]
        return np.array(curves)

    def recall_T(self) -> np.ndarray | None:
        """The share of objects found at each threshold; None where there is no object."""
        num_gt = int(self.num_gt_N.sum())
        return (self.right_TD & ~self.ignored_TD).sum(axis=1) / num_gt if num_gt else None


def class_curves(
    ground_truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], iou_type: str, thr_T: np.ndarray
) -> dict[str, list[ClassCurve]]:
    """For each range of areas a curve per category, in the categories' order.

    Args:
        ground_truth, results: as :class:`~coordexp.evaluation.coco.CocoData` holds them; ids count from 1.
        thr_T: IoU thresholds, ascending.
    """
    num_images, num_classes = len(ground_truth["images"]), len(ground_truth["categories"])
    truth = _Objects.from_dicts(ground_truth["annotations"])
    predicted = _Objects.from_dicts(results)
    score_D = np.array([result["score"] for result in results], dtype=np.float64)
    order_D = np.lexsort((-score_D, predicted.image_N, predicted.class_N))
    order_D = order_D[
        _rank_in_group(predicted.class_N[order_D] * num_images + predicted.image_N[order_D]) < MAX_DETECTIONS
    ]
    predicted, score_D = predicted.taken(order_D), score_D[order_D]
    sizes = [(image["height"], image["width"]) for image in ground_truth["images"]]
    compare = _box_overlaps if iou_type == "bbox" else _mask_overlaps
    thr_T = np.minimum(thr_T, 1 - 1e-10)
    crowd_G = np.array([annotation["iscrowd"] for annotation in ground_truth["annotations"]], dtype=bool)
    pairs = _Pairs.from_overlaps(predicted, truth, list(_overlaps(predicted, truth, sizes, compare)), thr_T)
    area_G = np.array([annotation["area"] for annotation in ground_truth["annotations"]], dtype=np.float64)
    area_D = _areas(predicted.shapes, iou_type)
    of_class = np.searchsorted(predicted.class_N, np.arange(num_classes + 1))
    curves: dict[str, list[ClassCurve]] = {}
    for name, (low, high) in AREAS.items():
        out_G, out_D = crowd_G | (area_G < low) | (area_G > high), (area_D < low) | (area_D > high)
        right_TD, ignored_TD = pairs.matched(out_G, crowd_G, thr_T)
        ignored_TD |= ~right_TD & out_D
        num_gt_KN = np.zeros((num_classes, num_images), dtype=np.int64)
        np.add.at(num_gt_KN, (truth.class_N[~out_G], truth.image_N[~out_G]), 1)
        curves[name] = []
        for k in range(num_classes):
            of_k = np.arange(of_class[k], of_class[k + 1])
            of_k = of_k[np.argsort(-score_D[of_k], kind="stable")]
            curves[name].append(
                ClassCurve(predicted.image_N[of_k], right_TD[:, of_k], ignored_TD[:, of_k], num_gt_KN[k])
            )
    return curves


@dataclass(frozen=True, slots=True, eq=False)
class _Objects:
    """Annotations or results: the index of each one's image and category, and the dict itself."""

    image_N: np.ndarray
    class_N: np.ndarray
    shapes: list[Mapping[str, Any]]

    @classmethod
    def from_dicts(cls, objects: Sequence[Mapping[str, Any]]) -> _Objects:
        image_N = np.array([obj["image_id"] for obj in objects], dtype=np.int64) - 1
        return cls(image_N, np.array([obj["category_id"] for obj in objects], dtype=np.int64) - 1, list(objects))

    def taken(self, which_N: np.ndarray) -> _Objects:
        return _Objects(self.image_N[which_N], self.class_N[which_N], [self.shapes[i] for i in which_N.tolist()])


def _rank_in_group(group_N: np.ndarray) -> np.ndarray:
    """The place of each element in its run of equal ones."""
    starts = np.flatnonzero(np.diff(group_N, prepend=-1))
    return np.arange(len(group_N)) - np.repeat(starts, np.diff(starts, append=len(group_N)))


def _overlaps(predicted: _Objects, truth: _Objects, sizes: Sequence[tuple[int, int]], compare: Any) -> Iterator[Any]:
    """Of each image that has both: detections, objects, and their IoU as a matrix."""
    of_D, of_G = (np.argsort(objects.image_N, kind="stable") for objects in (predicted, truth))
    images = np.arange(len(sizes) + 1)
    at_D, at_G = np.searchsorted(predicted.image_N[of_D], images), np.searchsorted(truth.image_N[of_G], images)
    for image, size in enumerate(sizes):
        d, g = of_D[at_D[image] : at_D[image + 1]], of_G[at_G[image] : at_G[image + 1]]
        if len(d) and len(g):
            yield d, g, compare([predicted.shapes[i] for i in d.tolist()], [truth.shapes[i] for i in g.tolist()], size)


def _box_overlaps(predicted: Sequence[Any], truth: Sequence[Any], size: tuple[int, int]) -> np.ndarray:
    from pycocotools import mask as coco_mask

    box_D4: Any = np.array([obj["bbox"] for obj in predicted], dtype=np.float64)
    box_G4: Any = np.array([obj["bbox"] for obj in truth], dtype=np.float64)
    return np.asarray(coco_mask.iou(box_D4, box_G4, _crowds(truth)))


def _mask_overlaps(predicted: Sequence[Any], truth: Sequence[Any], size: tuple[int, int]) -> np.ndarray:
    from pycocotools import mask as coco_mask

    rings: Any = [obj["segmentation"][0] for obj in truth]
    masks: Any = [obj["segmentation"] for obj in predicted]
    return np.asarray(coco_mask.iou(masks, coco_mask.frPyObjects(rings, *size), _crowds(truth)))


def _crowds(truth: Sequence[Any]) -> list[int]:
    return [obj["iscrowd"] for obj in truth]


def _areas(shapes: Sequence[Mapping[str, Any]], iou_type: str) -> np.ndarray:
    """Pixels of each detection: of its box, or of its mask."""
    if iou_type == "bbox":
        return np.array([obj["bbox"][2] * obj["bbox"][3] for obj in shapes], dtype=np.float64)
    from pycocotools import mask as coco_mask

    masks: Any = [obj["segmentation"] for obj in shapes]
    parts = [coco_mask.area(masks[start : start + _MASKS]) for start in range(0, len(masks), _MASKS)]
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts] or [np.zeros(0)])


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """A detection and an object of its class and image that overlap enough for the lowest threshold."""

    detection_P: np.ndarray
    object_P: np.ndarray
    iou_P: np.ndarray
    num_detections: int

    @classmethod
    def from_overlaps(cls, predicted: _Objects, truth: _Objects, overlaps: Sequence[Any], thr_T: np.ndarray) -> _Pairs:
        nothing = np.zeros(0, dtype=np.int64)
        detections, objects, ious = [nothing], [nothing], [np.zeros(0)]
        for d, g, iou_DG in overlaps:
            rows, columns = np.nonzero((iou_DG >= thr_T[0]) & (predicted.class_N[d][:, None] == truth.class_N[g]))
            detections.append(d[rows])
            objects.append(g[columns])
            ious.append(iou_DG[rows, columns])
        return cls(np.concatenate(detections), np.concatenate(objects), np.concatenate(ious), len(predicted.shapes))

    def matched(self, out_G: np.ndarray, crowd_G: np.ndarray, thr_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each detection is matched, and whether to an object that does not count (outside of the area range,
        or a crowd, which takes any number of detections): (T, D) twice."""
        right_TD = np.zeros((len(thr_T), self.num_detections), dtype=bool)
        ignored_TD = np.zeros_like(right_TD)
        rivals_D = np.bincount(self.detection_P, minlength=self.num_detections)
        rivals_G = np.bincount(self.object_P, minlength=len(out_G))
        alone_P = (rivals_D[self.detection_P] == 1) & (rivals_G[self.object_P] == 1)
        d, g = self.detection_P[alone_P], self.object_P[alone_P]
        right_TD[:, d] = self.iou_P[alone_P] >= thr_T[:, None]
        ignored_TD[:, d] = right_TD[:, d] & out_G[g]
        choices: defaultdict[int, list[tuple[bool, int, float]]] = defaultdict(list)
        for d, g, iou in zip(*(column[~alone_P].tolist() for column in (self.detection_P, self.object_P, self.iou_P)),
                             strict=True):  # fmt: skip
            choices[d].append((bool(out_G[g]), g, iou))
        in_turn = [(d, sorted(choices[d])) for d in sorted(choices)]  # detections stand in the order of their scores
        for t, threshold in enumerate(thr_T.tolist()):
            taken: set[int] = set()
            for d, objects in in_turn:
                chosen = _choice(objects, taken, threshold)
                if chosen is not None:
                    if not crowd_G[chosen]:
                        taken.add(chosen)
                    right_TD[t, d], ignored_TD[t, d] = True, out_G[chosen]
        return right_TD, ignored_TD


def _choice(objects: Sequence[tuple[bool, int, float]], taken: set[int], threshold: float) -> int | None:
    """The best object that is left for a detection; of equally good ones the last. One inside the area range goes
    before all outside, which stand last in ``objects``."""
    best, best_iou, best_is_out = None, threshold, True
    for is_out, g, iou in objects:
        if g in taken:
            continue
        if best is not None and is_out and not best_is_out:
            break
        if iou >= best_iou:
            best, best_iou, best_is_out = g, iou, is_out
    return best
