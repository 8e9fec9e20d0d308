"""Several answers of one image: all merged, only the objects of a majority, or the best answer; and figures of these
side by side. Torch-free.

Objects of different answers are the same object if their descriptions are equal and their mask IoU is at least 0.5,
assigned one to one. For an object that n of K answers contain,

    confidence = sqrt(n / K) · its mean confidence in those n answers

with each confidence calibrated if the checkpoint has a calibration. The score is computed from scores in the same way.
It is the square root of the share because the probability of an object's tokens already reflects how often sampling
finds it. Objects without a confidence get the share n / K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from coordexp.config.rollout import EvalDetectionConfig
from coordexp.evaluation.answers import ImageAnswer, ScoredObject, merged_counts
from coordexp.evaluation.coco_results import average_precision, with_constant_score
from coordexp.evaluation.detection import IOU_THRESHOLD, count_image, detection_metrics, match_by_desc, sum_counts
from coordexp.evaluation.summary import FIGURES, figures_table

ONE, UNION, MAJORITY, ORACLE = "one", "union", "majority", "oracle"
_ROWS = {
    name: FIGURES.get(name, (name, True))
    for name in ("precision", "recall", "f1", "mean_matched_iou", "AP", "AP50", "duplicate_rate", "pred_per_image")
} | {"f1": ("F1", True)}  # at the IoU that the options name


def merge_answers(answers: Sequence[ImageAnswer]) -> ImageAnswer:
    """One answer with every object of several answers for the same image, once, in the shape that the first answer with
    it gives. ``text`` is the first answer's; counts are sums over all answers. A single answer is returned as it is."""
    first, count = answers[0], len(answers)
    if count == 1:
        return first
    found: list[list[ScoredObject]] = []  # one list per object: its detections in different answers
    for answer in answers:
        known = {i: j for i, j, _ in match_by_desc(answer.pred, [same[0] for same in found])}
        for i, obj in enumerate(answer.pred):
            if i in known:
                found[known[i]].append(obj)
            else:
                found.append([obj])
    texts = tuple(answer.text for answer in answers[1:])
    pred = tuple(_merged(same, count) for same in found)
    return replace(first, pred=pred, further_texts=texts, **merged_counts(answers))


def _merged(same: Sequence[ScoredObject], count: int) -> ScoredObject:
    share = len(same) / count
    scores = [obj.score for obj in same if obj.score is not None]
    confidences = [obj.confidence for obj in same if obj.confidence is not None]
    score = math.sqrt(share) * sum(scores) / len(same) if len(scores) == len(same) else None
    confidence = math.sqrt(share) * sum(confidences) / len(same) if len(confidences) == len(same) else share
    return replace(same[0], score=score, confidence=confidence, answers=len(same))


def merge_all(answers: Sequence[ImageAnswer], count: int) -> list[ImageAnswer]:
    """:func:`merge_answers` of every ``count`` neighbours."""
    return [merge_answers(answers[start : start + count]) for start in range(0, len(answers), count)]


def of_majority(merged: ImageAnswer) -> ImageAnswer:
    """A merged answer with the objects that more than half of the answers contain."""
    kept = tuple(obj for obj in merged.pred if 2 * (obj.answers or 1) > merged.num_answers)
    return replace(merged, pred=kept)


def best_answer(answers: Sequence[ImageAnswer], threshold: float = IOU_THRESHOLD) -> ImageAnswer:
    """The answer of one image that finds most annotated objects; among equal ones, that with the fewest predictions,
    then the first. The choice uses the annotations, so its recall is a bound, not a result. Raises DataError without
    them."""
    counts = [count_image(answer, threshold).counts for answer in answers]
    best = max(range(len(answers)), key=lambda k: (counts[k]["matched"], -counts[k]["pred"], -k))
    return answers[best]


def side_by_side(
    answers: Sequence[ImageAnswer], merged: Sequence[ImageAnswer], options: EvalDetectionConfig
) -> dict[str, dict[str, float]]:
    """Figures of the first of each image's ``answers``, which follow each other, of all of them ``merged``, of the
    objects that a majority contains, and of the best answer; with average precision if ``options`` include it."""
    count = len(answers) // max(1, len(merged))
    groups = [answers[start : start + count] for start in range(0, len(answers), count)]
    threshold = options.f1ish_iou_thrs[0]
    columns: Mapping[str, Sequence[ImageAnswer]] = {
        ONE: [group[0] for group in groups],
        UNION: merged,
        MAJORITY: [of_majority(answer) for answer in merged],
        ORACLE: [best_answer(group, threshold) for group in groups],
    }
    figures = {}
    for name, column in columns.items():
        figures[name] = detection_metrics(sum_counts(count_image(answer, threshold).counts for answer in column))
        if options.metrics != "f1ish":
            coco = average_precision(with_constant_score(column, options.fixed_score), "bbox").figures
            figures[name] |= {key: coco[key] for key in ("AP", "AP50") if key in coco}
    return figures


def answers_table(figures: Mapping[str, Mapping[str, float]]) -> Table:
    """:func:`side_by_side` for the terminal."""
    rows = {name: row for name, row in _ROWS.items() if all(name in column for column in figures.values())}
    table = figures_table(figures, "several answers per image", rows)
    table.caption = Text(
        "one: the greedy answer; union: all merged; majority: objects in more than half of them; oracle: of each image "
        "the answer that finds most annotated objects, a bound"
    )
    return table
