"""How many objects do fixed boxes find? A baseline that does not look at images.

Chooses boxes, with their names, that as the answer to every image of TRAIN have the best F1 (greedily, one after the
other, until F1 no longer rises). Writes that answer for every image of PREDICTIONS, a model's answers by
``coordexp evaluate``; compare the two files with ``coordexp evaluate --compare``:

    answers=outputs/stage1/evaluation/predictions.jsonl
    python benchmarks/fixed_boxes.py data/white/train.jsonl $answers --out outputs/fixed.jsonl
    coordexp evaluate --compare outputs/fixed.jsonl $answers
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from coordexp.data import read_jsonl
from coordexp.errors import DataError
from coordexp.evaluation.answers import ScoredObject, read_answers, write_answers
from coordexp.evaluation.detection import count_image, detection_metrics, sum_counts
from coordexp.geometry import aabbs, box_iou
from coordexp.records import ImageRecord

_CANDIDATES = 1000  # training objects that are tried as boxes
_IOU = 0.5


def best_fixed_boxes(records: Sequence[ImageRecord]) -> list[ScoredObject]:
    """The boxes, best first; ``score`` is the share of images in which a box finds an object that no earlier one found.
    Raises DataError without objects."""
    objects = [obj for record in records for obj in record.objects if obj.soft is None]
    if not objects:
        raise DataError("no objects to choose boxes from")
    box_N4 = aabbs(objects)
    desc_N = np.array([obj.desc for obj in objects])
    image_N = np.repeat(
        np.arange(len(records)), [sum(obj.soft is None for obj in record.objects) for record in records]
    )
    starts = np.flatnonzero(np.diff(image_N, prepend=-1))  # the first object of each image that has any
    chosen_C = np.arange(0, len(objects), -(-len(objects) // _CANDIDATES) or 1)
    candidate_C4, desc_C = box_N4[chosen_C], desc_N[chosen_C]
    hit_CN = (box_iou(candidate_C4, box_N4) >= _IOU) & (desc_C[:, None] == desc_N)
    # Next to each object, the mean of all that its box finds: it often finds more.
    mean_C4 = np.rint(hit_CN @ box_N4.astype(float) / hit_CN.sum(axis=1, keepdims=True)).astype(int)
    candidate_C4, desc_C = np.concatenate([candidate_C4, mean_C4]), np.tile(desc_C, 2)
    hit_CN = np.concatenate([hit_CN, (box_iou(mean_C4, box_N4) >= _IOU) & (desc_C[: len(mean_C4), None] == desc_N)])
    found, best, boxes = 0, 0.0, []
    while True:
        gain_C = np.logical_or.reduceat(hit_CN, starts, axis=1).sum(axis=1)  # one object per image
        c = int(gain_C.argmax())
        f1 = 2 * (found + gain_C[c]) / ((len(boxes) + 1) * len(records) + len(objects))
        if f1 <= best:
            return boxes
        found, best = found + int(gain_C[c]), f1
        box = tuple(int(k) for k in candidate_C4[c])
        boxes.append(ScoredObject(str(desc_C[c]), "bbox_2d", box, score=float(gain_C[c]) / len(records)))
        taken = np.flatnonzero(hit_CN[c])
        first = taken[np.unique(image_N[taken], return_index=True)[1]]
        hit_CN[:, first] = False


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("train", type=Path, metavar="TRAIN", help="JSONL whose objects choose the boxes")
    flags.add_argument("predictions", type=Path, metavar="PREDICTIONS", help="a model's answers: images to answer")
    flags.add_argument("--out", type=Path, required=True, help="JSONL of the fixed boxes' answers")
    options = flags.parse_args(argv)
    boxes = best_fixed_boxes(read_jsonl(options.train))
    answer = {"pred": tuple(boxes), "dropped": {}, "truncated": False, "repeat_terminated": False, "num_tokens": 0,
              "further_texts": (), "valid": None}  # fmt: skip
    fixed = [replace(of_model, **answer, text="") for of_model in read_answers(options.predictions)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_answers(fixed, options.out)
    figures = detection_metrics(sum_counts(count_image(one).counts for one in fixed))
    for box in boxes:
        print(f"{box.desc} {list(box.bins)}: finds an object in {box.score:.1%} of the training images")
    print(f"{len(boxes)} fixed boxes: F1 {figures['f1']:.3f} on {len(fixed)} images; wrote {options.out}")


if __name__ == "__main__":
    main()
