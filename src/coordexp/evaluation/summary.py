"""Answers → figures of the set, by class and by density, and the files with them."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coordexp.evaluation.answers import PREDICTIONS, ImageAnswer, write_answers
from coordexp.evaluation.coco import average_precision, write_coco
from coordexp.evaluation.detection import (
    DENSITY_BINS,
    IOU_THRESHOLD,
    OTHER_DESC,
    ImageCounts,
    count_image,
    density_bin,
    detection_metrics,
    ignored_predictions,
    sum_counts,
)
from coordexp.evaluation.plots import save_plots

if TYPE_CHECKING:
    from coordexp.config.rollout import EvalDetectionConfig

METRICS, BY_CLASS, BY_DENSITY = "metrics.json", "per_class.csv", "per_density.csv"


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Which figures to compute.

    ``iou_thrs``: of precision, recall and F1; the first names the plain figures. ``coco``: average precision too, which
    needs scores; ``segm``: also of masks. ``coco_iou_thrs`` None means 0.50, 0.55, … 0.95. ``constant_score``: of
    predictions without one.
    """

    iou_thrs: tuple[float, ...] = (IOU_THRESHOLD,)
    coco: bool = True
    segm: bool = False
    coco_iou_thrs: tuple[float, ...] | None = None
    constant_score: float | None = None

    @classmethod
    def from_config(cls, config: EvalDetectionConfig) -> EvaluationOptions:
        """The keys of ``rollout_matching.eval_detection`` but ``enabled``."""
        return cls(
            iou_thrs=tuple(config.f1ish_iou_thrs),
            coco=config.metrics != "f1ish",
            segm=config.use_segm,
            coco_iou_thrs=None if config.iou_thrs is None else tuple(config.iou_thrs),
            constant_score=config.constant_score if config.score_mode == "constant" else None,
        )


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Figures of one description, or of the images of one density. ``images``: those with such an object, annotated or
    predicted. ``ap`` is None if it was not computed."""

    name: str
    images: int
    gt: int
    pred: int
    matched: int
    precision: float | None
    recall: float | None
    f1: float | None
    mean_matched_iou: float | None
    ap: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """``figures`` by name; ``by_class`` in order of frequency, ``by_density`` from empty to crowded."""

    figures: dict[str, float]
    by_class: tuple[GroupRow, ...]
    by_density: tuple[GroupRow, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)


def summarise(
    answers: Sequence[ImageAnswer], options: EvaluationOptions = EvaluationOptions(), notes: Sequence[str] = ()
) -> Summary:
    """All figures of a set of answers; ``notes`` precede those found here.

    Raises:
        DataError: an image has no annotations, or average precision was asked for and a prediction has no score.
    """
    first, *further = options.iou_thrs
    counted = [count_image(answer, first) for answer in answers]
    figures = detection_metrics(sum_counts(part.counts for part in counted))
    for threshold in further:
        at = detection_metrics(sum_counts(count_image(answer, threshold).counts for answer in answers))
        figures |= {f"{name}@{threshold:g}": at[name] for name in ("precision", "recall", "f1")}
    ap_of: dict[str, float] = {}
    ap_by_density: dict[str, float | None] = {}
    if options.coco:
        thresholds, constant = options.coco_iou_thrs, options.constant_score
        coco = average_precision(answers, "bbox", thresholds, constant)
        figures |= coco.figures
        ap_of = coco.by_class
        for name in {part.density for part in counted}:
            alone = [answer for answer, part in zip(answers, counted, strict=True) if part.density == name]
            ap_by_density[name] = average_precision(alone, "bbox", thresholds, constant).figures.get("AP")
        if options.segm:
            masks = average_precision(answers, "segm", thresholds, constant)
            figures |= {f"segm_{name}": value for name, value in masks.figures.items()}
    return Summary(
        figures,
        _class_rows(counted, ap_of),
        _density_rows(counted, ap_by_density),
        (*notes, *_notes(answers, figures, first)),
    )


def _class_rows(counted: Sequence[ImageCounts], ap_of: Mapping[str, float]) -> tuple[GroupRow, ...]:
    by_desc: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in counted:
        for desc, counts in part.by_desc.items():
            by_desc[desc].update(counts)
            by_desc[desc]["images"] += 1
    other: Counter[str] = Counter()
    for desc in [desc for desc, counts in by_desc.items() if not counts["gt"]]:
        other.update(by_desc.pop(desc))
    if other:
        known = by_desc.keys()
        other["images"] = sum(1 for part in counted if part.by_desc.keys() - known)  # not once for each description
    rows = [_row(desc, counts, ap_of.get(desc)) for desc, counts in by_desc.items()]
    rows.sort(key=lambda row: (-row.gt, row.name))
    if other:
        rows.append(_row(OTHER_DESC, other, None))
    return tuple(rows)


def _density_rows(counted: Sequence[ImageCounts], ap_of: Mapping[str, float | None]) -> tuple[GroupRow, ...]:
    groups: defaultdict[str, list[ImageCounts]] = defaultdict(list)
    for part in counted:
        groups[part.density].append(part)
    order = [density_bin(low) for low, _ in DENSITY_BINS]
    return tuple(
        _row(f"{name} objects", sum_counts(part.counts for part in groups[name]), ap_of.get(name))
        for name in order
        if name in groups
    )


def _row(name: str, counts: Mapping[str, float], ap: float | None) -> GroupRow:
    gt, pred, matched = int(counts.get("gt", 0)), int(counts.get("pred", 0)), int(counts.get("matched", 0))
    return GroupRow(
        name,
        int(counts.get("images", 0)),
        gt,
        pred,
        matched,
        precision=matched / pred if pred else None,
        recall=matched / gt if gt else None,
        f1=2 * matched / (pred + gt) if pred + gt else None,
        mean_matched_iou=counts.get("matched_iou_sum", 0) / matched if matched else None,
        ap=ap,
    )


def _notes(answers: Sequence[ImageAnswer], figures: Mapping[str, float], threshold: float) -> list[str]:
    notes = []
    if not figures["pred_objects"] and figures["gt_objects"]:
        notes.append("nothing was predicted: precision has nothing to be measured on and is written as 0")
    if not figures["gt_objects"]:
        notes.append("nothing is annotated: recall and average precision have nothing to be measured on")
    soft = sum(obj.soft is not None for answer in answers for obj in answer.gt or ())
    if soft:
        ignored = sum(len(ignored_predictions(answer, threshold)) for answer in answers)
        notes.append(
            f"{soft} soft objects are no ground truth; {ignored} predictions that found one are neither right nor wrong"
        )
    known = {obj.desc for answer in answers for obj in answer.gt or ()}
    unknown = Counter(obj.desc for answer in answers for obj in answer.pred if obj.desc not in known)
    if unknown:
        shown = ", ".join(f"{desc!r} ({count})" for desc, count in unknown.most_common(5))
        notes.append(
            f"{unknown.total()} predictions have a description that is annotated nowhere: {shown}; they are wrong in "
            "F1, and unseen by average precision, which knows only annotated classes. An alias table can map them"
        )
    return notes


def write_summary(
    folder: Path,
    summary: Summary,
    answers: Sequence[ImageAnswer],
    about: Mapping[str, object],
    options: EvaluationOptions,
) -> list[Path]:
    """The figures as JSON, CSV and pictures, the answers as JSONL and as COCO's files. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        **about,
        "metrics": summary.figures,
        "notes": list(summary.notes),
        "by_class": [asdict(row) for row in summary.by_class],
        "by_density": [asdict(row) for row in summary.by_density],
    }
    (folder / METRICS).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_rows(summary.by_class, folder / BY_CLASS)
    write_rows(summary.by_density, folder / BY_DENSITY)
    write_answers(answers, folder / PREDICTIONS)
    paths = [folder / METRICS, folder / BY_CLASS, folder / BY_DENSITY, folder / PREDICTIONS]
    if options.coco:
        paths += write_coco(answers, folder, "bbox", options.constant_score)
        if options.segm:
            paths += write_coco(answers, folder, "segm", options.constant_score)
    paths += save_plots(answers, folder, coco=options.coco, constant_score=options.constant_score)
    return list(dict.fromkeys(paths))


def write_rows(rows: Sequence[GroupRow], path: Path) -> None:
    """A CSV with one line per row; a figure without a value is an empty cell."""
    names = list(GroupRow.__dataclass_fields__)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([["" if value is None else value for value in asdict(row).values()] for row in rows])
