"""Plots of an evaluation: confusion matrix, precision over recall, average precision by object size."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordexp.evaluation.answers import ImageAnswer
from coordexp.evaluation.coco import AREAS, RECALLS_R, THRESHOLDS_T, average_precision, coco_shape
from coordexp.evaluation.detection import IOU_THRESHOLD, ignored_predictions, match_any_desc

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSED, INVENTED, OTHERS = "(missed)", "(nothing there)", "(other classes)"
CONFUSION, CURVES, SIZES = "confusion_matrix.png", "precision_recall.png", "average_precision_by_size.png"
_CLASSES = 20  # rows of the matrix
_NAMED = 8  # curves with a name
_THRESHOLDS = (0.5, 0.75, 0.9)
_LONGEST = 24  # characters of a class's name


@dataclass(frozen=True, slots=True, eq=False)
class Confusion:
    """``counts_AP[i, j]``: objects annotated as ``annotated[i]`` that were called ``predicted[j]``. The last column
    counts what was missed, the last row what was predicted where nothing is annotated."""

    annotated: tuple[str, ...]
    predicted: tuple[str, ...]
    counts_AP: np.ndarray


def confusion(answers: Sequence[ImageAnswer], most: int = _CLASSES) -> Confusion:
    """Objects matched one to one at mask IoU 0.5, regardless of descriptions. Soft objects and predictions that found
    one are not counted. Classes other than the ``most`` most frequent annotated ones are one.

    Raises:
        DataError: an image has no annotations.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    for answer in answers:
        ignored = ignored_predictions(answer)
        objects = [obj for i, obj in enumerate(answer.pred) if i not in ignored]
        truth = answer.truth
        matched = match_any_desc(objects, truth)
        pairs.update((truth[j].desc, objects[i].desc) for i, j in matched)
        matched_truth, used = {j for _, j in matched}, {i for i, _ in matched}
        pairs.update((obj.desc, MISSED) for j, obj in enumerate(truth) if j not in matched_truth)
        pairs.update((INVENTED, obj.desc) for i, obj in enumerate(objects) if i not in used)
    names = _by_frequency(answers)[:most]
    folded: Counter[tuple[str, str]] = Counter()
    for (row, column), count in pairs.items():
        folded[row if row in (*names, INVENTED) else OTHERS, column if column in (*names, MISSED) else OTHERS] += count
    rest = [OTHERS] if any(OTHERS in pair for pair in folded) else []
    annotated, predicted = (*names, *rest, INVENTED), (*names, *rest, MISSED)
    counts_AP = np.array([[folded[row, column] for column in predicted] for row in annotated], dtype=np.int64)
    return Confusion(annotated, predicted, counts_AP)


def _by_frequency(answers: Sequence[ImageAnswer]) -> list[str]:
    """Annotated classes, most frequent first."""
    count_of = Counter(obj.desc for answer in answers for obj in answer.truth)
    return sorted(count_of, key=lambda name: (-count_of[name], name))


def save_plots(
    answers: Sequence[ImageAnswer], folder: Path, *, coco: bool = True, constant_score: float | None = None
) -> list[Path]:
    """Write the plots as PNG; those of average precision only with ``coco``, none if nothing is annotated.

    Raises:
        DataError: an image has no annotations, or a prediction no score (:func:`~coordexp.evaluation.coco.to_coco`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    if any(answer.truth for answer in answers):
        figures[CONFUSION] = _draw_confusion(confusion(answers))
        if coco:
            precision = average_precision(answers, "bbox", constant_score=constant_score)
            areas = [coco_shape(obj, one.width, one.height)["area"] for one in answers for obj in one.truth]
            figures[CURVES] = _draw_curves(precision.precision_of, _by_frequency(answers)[:_NAMED])
            figures[SIZES] = _draw_sizes(precision.figures, areas)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)  # a script that the font lacks becomes boxes
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=120)
    return [folder / name for name in figures]


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    """Without pyplot, which would keep every figure and look for a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _shown(names: Iterable[str]) -> list[str]:
    """Names as plain text (a dollar sign would start a formula), long ones cut."""
    cut = (name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in names)
    return [name.replace("$", r"\$") for name in cut]


def _draw_confusion(counted: Confusion) -> Figure:
    side = 2.5 + 0.42 * len(counted.predicted)
    figure, axes = _figure(side + 1, side)
    totals_A = np.maximum(counted.counts_AP.sum(axis=1, keepdims=True), 1)
    share_AP = counted.counts_AP / totals_A
    axes.imshow(share_AP, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(counted.counts_AP > 0).tolist():
        colour = "white" if share_AP[row, column] > 0.5 else "black"
        axes.text(column, row, str(counted.counts_AP[row, column]), ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(counted.predicted)), _shown(counted.predicted), rotation=60, ha="right", fontsize=8)
    axes.set_yticks(range(len(counted.annotated)), _shown(counted.annotated), fontsize=8)
    axes.set(xlabel="predicted", ylabel="annotated", title=f"objects, matched at mask IoU {IOU_THRESHOLD:g}")
    return figure


def _draw_curves(precision_of: Mapping[str, np.ndarray], often: Sequence[str]) -> Figure:
    """Mean over classes at three thresholds; the most frequent classes at the lowest one, thin."""
    figure, axes = _figure(7, 5)
    if len(precision_of) > 1:
        for name, label in zip(often, _shown(often), strict=True):
            label = f"{label}, AP {precision_of[name].mean():.2f}"
            axes.plot(RECALLS_R, precision_of[name][0], linewidth=0.8, label=label)
    mean_TR = np.mean(list(precision_of.values()), axis=0)
    for threshold in _THRESHOLDS:
        at = int(np.abs(THRESHOLDS_T - threshold).argmin())
        axes.plot(RECALLS_R, mean_TR[at], color="black", linewidth=2.2 - at / 6, alpha=1 - at / 12,
                  label=f"all, IoU {threshold:g}: {mean_TR[at].mean():.2f}")  # fmt: skip
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02), title="boxes; classes at IoU 0.5")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _draw_sizes(figures: Mapping[str, float], areas: Sequence[float]) -> Figure:
    figure, axes = _figure(6, 4)
    objects = {name: sum(low <= area <= high for area in areas) for name, (low, high) in AREAS.items()}
    objects["all"] = len(areas)
    ranges = {"all": "all", "small": "small\n< 32² px", "medium": "medium\n32² – 96² px", "large": "large\n> 96² px"}
    for place, name in enumerate(ranges):
        value = figures.get("AP" if name == "all" else f"AP_{name}")
        axes.bar(place, value or 0.0, color="#7f8c9b" if name == "all" else "#4363d8")
        axes.text(place, (value or 0.0) + 0.01, "none annotated" if value is None else f"{value:.3f}", ha="center")
    labels = [f"{label}\n{objects[name]} objects" for name, label in ranges.items()]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set(ylabel="AP @ IoU 0.50:0.95", ylim=(0, 1.08), title="average precision by size of the annotated box")
    return figure
