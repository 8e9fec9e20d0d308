"""Answers → figures of the set, by class and by density; their files, plots, and tables for the terminal."""

from __future__ import annotations

import csv
import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from coordexp.config.rollout import EvalDetectionConfig
from coordexp.data.files import check_writable, whole_file, write_atomically
from coordexp.errors import DataError
from coordexp.evaluation.answers import CLASS_LIST, METRICS, PREDICTIONS, SETTINGS, ImageAnswer, write_answers
from coordexp.evaluation.coco_results import (
    AREAS,
    COCO_FILES,
    RECALLS_R,
    THRESHOLDS_T,
    average_precision,
    coco_shape,
    with_constant_score,
    write_coco,
)
from coordexp.evaluation.confidence import Reliability, Threshold, best_thresholds, reliability
from coordexp.evaluation.detection import (
    DENSITIES,
    IOU_THRESHOLD,
    OTHER_DESC,
    count_image,
    detection_metrics,
    ignored_predictions,
    judged,
    sum_counts,
)
from coordexp.evaluation.export import cell_text
from coordexp.printable import printable
from coordexp.reading import read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BY_CLASS, BY_DENSITY = "per_class.csv", "per_density.csv"


COUNTS_ONLY = EvalDetectionConfig(metrics="f1ish")
WITH_OWN_SCORES = EvalDetectionConfig().scored(None)


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
    """``figures`` by name; ``by_class`` in order of frequency, ``by_density`` from empty to crowded;
    ``thresholds``: the confidence with the best F1, of all classes together and of each; ``reliability``: what
    confidences were worth (right means mask IoU 0.5, as for calibrations); ``iou``: mask IoU from which a prediction is
    matched in the others."""

    figures: dict[str, float]
    by_class: tuple[GroupRow, ...]
    by_density: tuple[GroupRow, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)
    thresholds: tuple[Threshold, ...] = ()
    reliability: tuple[Reliability, ...] = ()
    iou: float = IOU_THRESHOLD


def summarise(
    answers: Sequence[ImageAnswer],
    options: EvalDetectionConfig = WITH_OWN_SCORES,
    notes: Sequence[str] = (),
    *,
    with_confidences: bool = False,
) -> Summary:
    """All figures of a set of answers. Raises DataError if an image has no annotations, or a prediction no score and
    ``options`` include average precision.

    Args:
        notes: come before those found here.
        with_confidences: also the thresholds and reliability of confidences.
    """
    first, *further = options.f1ish_iou_thrs
    counted = [count_image(answer, first) for answer in answers]
    figures = detection_metrics(sum_counts(part.counts for part in counted))
    for threshold in further:
        at = detection_metrics(sum_counts(count_image(answer, threshold).counts for answer in answers))
        figures |= {f"{name}@{threshold:g}": at[name] for name in ("precision", "recall", "f1")}
    ap_of: dict[str, float] = {}
    ap_by_density: dict[str, float | None] = {}
    if options.metrics != "f1ish":
        ranked = with_constant_score(answers, options.fixed_score)
        coco = average_precision(ranked, "bbox")
        figures |= coco.figures
        ap_of = coco.by_class
        for name in {part.density for part in counted}:
            alone = [answer for answer, part in zip(ranked, counted, strict=True) if part.density == name]
            ap_by_density[name] = average_precision(alone, "bbox").figures.get("AP")
        if options.use_segm:
            masks = average_precision(ranked, "segm")
            figures |= {f"segm_{name}": value for name, value in masks.figures.items()}
    annotated = {obj.desc for answer in answers for obj in answer.truth}
    by_name: defaultdict[str, Counter[str]] = defaultdict(Counter)
    by_density: defaultdict[str, list[Mapping[str, float]]] = defaultdict(list)
    for part in counted:
        by_density[part.density].append(part.counts)
        name_of = {desc: desc if desc in annotated else OTHER_DESC for desc in part.by_desc}
        for desc, counts in part.by_desc.items():
            by_name[name_of[desc]].update(counts)
        for name in set(name_of.values()):  # an image counts once for all other descriptions
            by_name[name]["images"] += 1
    by_class = [_row(name, counts, ap_of.get(name)) for name, counts in by_name.items()]
    by_class.sort(key=lambda row: (-row.gt, row.name))
    densities = [name for name in DENSITIES if name in by_density]

    found = list(notes)
    if not figures["pred_objects"] and figures["gt_objects"]:
        found.append("nothing was predicted: precision has nothing to be measured on and is written as 0")
    if not figures["gt_objects"]:
        found.append("nothing is annotated: recall and average precision have nothing to be measured on")
    soft = sum(obj.soft is not None for answer in answers for obj in answer.gt or ())
    if soft:
        ignored = sum(len(ignored_predictions(answer, first)) for answer in answers)
        found.append(
            f"{soft} soft objects do not count as ground truth; {ignored} predictions that found one are ignored"
        )
    unknown = unknown_names(answers)
    if unknown is not None:
        found.append(
            f"{unknown}; they are wrong in F1, and unseen by average precision, which has only annotated classes. "
            "--classes allows only the names that you list, --aliases maps one name to another"
        )
    return Summary(
        figures,
        tuple(by_class),
        tuple(_row(f"{name} objects", sum_counts(by_density[name]), ap_by_density.get(name)) for name in densities),
        tuple(found),
        tuple(best_thresholds(answers, first)) if with_confidences else (),
        tuple(reliability(answers)) if with_confidences else (),
        first,
    )


def unknown_names(answers: Sequence[ImageAnswer]) -> str | None:
    """A sentence about predictions whose name is annotated in none of ``answers``; None if there are none."""
    known = {obj.desc for answer in answers for obj in answer.gt or ()}
    unknown = Counter(obj.desc for answer in answers for obj in answer.pred if obj.desc not in known)
    if not unknown:
        return None
    shown = ", ".join(f"{desc!r} ({count})" for desc, count in unknown.most_common(5))
    return f"{unknown.total()} predictions have names that are annotated nowhere: {shown}"


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


def check_replaced(folder: Path, about: Mapping[str, object], overwrite: bool) -> None:
    """Raise DataError if :func:`write_summary` would replace other answers or an evaluation of something else in
    ``folder``; ``overwrite`` allows it; or could not write there."""
    check_writable(folder, "name another folder with --out")
    if overwrite or not folder.exists():
        return
    if not (folder / METRICS).is_file():
        if (folder / PREDICTIONS).is_file():
            raise DataError(
                f"its {PREDICTIONS} is of no evaluation; name another folder with --out, or add --overwrite",
                path=folder,
            )
        return
    earlier, now = read_json(folder / METRICS), json.loads(json.dumps(dict(about)))
    other = next((name for name in now if earlier.get(name) != now[name]), None)
    if other is not None:
        raise DataError(
            f"holds an evaluation with another {other} ({earlier.get(other)}, now {now[other]}); name another folder "
            "with --out, or add --overwrite",
            path=folder,
        )


def write_summary(
    folder: Path,
    summary: Summary,
    answers: Sequence[ImageAnswer],
    about: Mapping[str, object],
    options: EvalDetectionConfig,
    classes: Sequence[str] = (),
) -> list[Path]:
    """The figures as JSON, CSV and pictures, the answers as JSONL and as COCO's files. ``classes``: the class list of
    the checkpoint that answered, empty if it has none. What an earlier evaluation wrote there and this one does not
    have is removed, and so are the settings of a prediction, whose answers are replaced. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).unlink(missing_ok=True)
    content = {
        **about,
        CLASS_LIST: list(classes),
        "metrics": summary.figures,
        "iou": summary.iou,
        "notes": list(summary.notes),
        "by_class": [asdict(row) for row in summary.by_class],
        "by_density": [asdict(row) for row in summary.by_density],
        "thresholds": [asdict(row) for row in summary.thresholds],
        "reliability": [asdict(row) for row in summary.reliability],
    }
    write_atomically(folder / METRICS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    for name, rows in ((BY_CLASS, summary.by_class), (BY_DENSITY, summary.by_density)):
        with whole_file(folder / name) as file:
            writer = csv.DictWriter(file, GroupRow.__dataclass_fields__)
            writer.writeheader()
            writer.writerows(asdict(row) | {"name": cell_text(row.name)} for row in rows)  # None: an empty cell
    write_answers(answers, folder / PREDICTIONS)
    paths = [folder / METRICS, folder / BY_CLASS, folder / BY_DENSITY, folder / PREDICTIONS]
    with_coco = options.metrics != "f1ish"
    ranked = with_constant_score(answers, options.fixed_score)
    if with_coco:
        paths += write_coco(ranked, folder, options.use_segm, classes)
    paths += save_plots(ranked, folder, coco=with_coco)
    for old in {folder / name for name in (*COCO_FILES, CONFUSION, CURVES, SIZES)}.difference(paths):
        old.unlink(missing_ok=True)
    return paths


# Metric → (label, whether more is better); None where neither is.
FIGURES: dict[str, tuple[str, bool | None]] = {
    "precision": ("precision", True),
    "recall": ("recall", True),
    "f1": ("F1 @ IoU 0.5", True),
    "mean_matched_iou": ("mean matched IoU", True),
    "duplicate_rate": ("duplicate rate", False),
    "invalid_rate": ("invalid rate", False),
    "truncated_rate": ("truncated rate", False),
    "pred_per_image": ("objects / image", None),
}
_AP = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR100")
_RATES = ("duplicate_rate", "giant_rate", "invalid_rate", "truncated_rate", "repeat_terminated_rate", "empty_rate",
          "pred_per_image", "gt_per_image", "tokens_per_image")  # fmt: skip


def text_table(title: str | Text, first: str, *numbers: str) -> Table:
    """An empty table: a column of texts, and columns of numbers. Descriptions are data, never markup. A ``title`` of
    several lines is a Text, whose names are printable already."""
    shown = title if isinstance(title, Text) else Text(printable(title))
    table = Table(title=shown, title_justify="left", caption_justify="left")
    table.add_column(first)
    for name in numbers:
        table.add_column(Text(printable(name)), justify="right", no_wrap=True)
    return table


def figures_table(
    columns: Mapping[str, Mapping[str, float]], title: str, rows: Mapping[str, tuple[str, bool | None]] = FIGURES
) -> Table:
    """One row per figure of ``rows``, one column per run; in each row the best run is bold."""
    table = text_table(title, "", *columns)
    for key, (label, more_is_better) in rows.items():
        values = [run[key] for run in columns.values()]
        best = None if more_is_better is None or len(values) < 2 else (max if more_is_better else min)(values)
        table.add_row(label, *(Text(f"{value:.3f}", "bold" if value == best else "") for value in values))
    return table


def summary_tables(summary: Summary, title: str, max_classes: int = 20) -> Iterable[Table]:
    """Figures of the set, by class (the ``max_classes`` most frequent), and by density."""
    figures = summary.figures
    table = text_table(title, "figure", "value")
    table.caption = Text(f"f1 to mean_matched_iou: matched one to one, mask IoU ≥ {summary.iou:g}")
    for name in ("f1", "precision", "recall", *(n for n in figures if "@" in n), "f1_any_desc", "mean_matched_iou"):
        # Without objects to divide by, files have a number and the table has none.
        below = {"precision": figures["pred_objects"], "recall": figures["gt_objects"]}.get(name, 1)
        table.add_row(name, f"{figures[name]:.3f}" if below else "–")
    for names in ([prefix + name for prefix in ("", "segm_") for name in _AP], _RATES):
        table.add_section()
        for name in names:
            if name in figures:
                table.add_row(name, f"{figures[name]:.3f}")
    yield table
    shown = summary.by_class[:max_classes]
    more = len(summary.by_class) - len(shown)
    by_class = "by class" + (f" ({more} more in per_class.csv of --out)" if more else "")
    by_density = "by density: images by their number of annotated objects"
    # A name and eight columns fit a terminal.
    for heading, first, third, rows in (
        (by_class, "class", ("gt", "pred", "right"), shown),
        (by_density, "with", ("images", "gt", "pred"), summary.by_density),
    ):
        table = text_table(heading, first, *third, "prec.", "recall", "F1", "IoU", "AP")
        for row in rows:
            counts = (row.gt, row.pred, row.matched) if rows is shown else (row.images, row.gt, row.pred)
            rates = (row.precision, row.recall, row.f1, row.mean_matched_iou, row.ap)
            cells = ["–" if value is None else f"{value:.3f}" for value in rates]
            name = row.name if rows is shown else row.name.removesuffix(" objects")
            table.add_row(Text(printable(name)), *map(str, counts), *cells)
        yield table
    if summary.thresholds:
        table = text_table("best F1, if less confident predictions are left out", "class", "confidence ≥", "prec.",
                           "recall", "F1")  # fmt: skip
        for row in summary.thresholds[: max_classes + 1]:
            rates = (f"{value:.3f}" for value in (row.precision, row.recall, row.f1))
            table.add_row(Text(printable(row.name)), f"{row.confidence:.4f}", *rates)
        yield table


# -- plots: confusion matrix, precision over recall, average precision by object size --------------------------------

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
    one are not counted. Classes other than the ``most`` most frequent annotated ones are one. Raises DataError if an
    image has no annotations."""
    names = _by_frequency(answers)[:most]
    pairs: Counter[tuple[str, str]] = Counter()
    for answer in answers:
        objects, truth, assign = judged(answer)
        matched = assign(False)
        rows = [obj.desc if obj.desc in names else OTHERS for obj in truth]
        columns = [obj.desc if obj.desc in names else OTHERS for obj in objects]
        pairs.update((rows[j], columns[i]) for i, j, _ in matched)
        matched_truth, used = {j for _, j, _ in matched}, {i for i, _, _ in matched}
        pairs.update((row, MISSED) for j, row in enumerate(rows) if j not in matched_truth)
        pairs.update((INVENTED, column) for i, column in enumerate(columns) if i not in used)
    rest = [OTHERS] if any(OTHERS in pair for pair in pairs) else []
    annotated, predicted = (*names, *rest, INVENTED), (*names, *rest, MISSED)
    counts_AP = np.array([[pairs[row, column] for column in predicted] for row in annotated], dtype=np.int64)
    return Confusion(annotated, predicted, counts_AP)


def _by_frequency(answers: Sequence[ImageAnswer]) -> list[str]:
    count_of = Counter(obj.desc for answer in answers for obj in answer.truth)
    return sorted(count_of, key=lambda name: (-count_of[name], name))


def save_plots(answers: Sequence[ImageAnswer], folder: Path, *, coco: bool = True) -> list[Path]:
    """Write the plots as PNG; those of average precision only with ``coco``, none if nothing is annotated. Raises
    DataError if an image has no annotations, or with ``coco`` a prediction no score."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    if any(answer.truth for answer in answers):
        figures[CONFUSION] = _draw_confusion(confusion(answers))
        if coco:
            precision = average_precision(answers)
            areas = [coco_shape(obj, one)["area"] for one in answers for obj in one.truth]
            figures[CURVES] = _draw_curves(precision.precision_of, _by_frequency(answers)[:_NAMED])
            figures[SIZES] = _draw_sizes(precision.figures, areas)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+", UserWarning)  # a script that the font lacks becomes boxes
        for name, figure in figures.items():
            figure.savefig(folder / name, dpi=120)
    return [folder / name for name in figures]


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    # Without pyplot, which would keep every figure and look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _shown(names: Iterable[str]) -> list[str]:
    # As plain text: a dollar sign would start a formula.
    cut = (name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name in map(printable, names))
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
    # The mean over classes at three thresholds; the most frequent classes at the lowest one, thin.
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
    axes.set(ylabel="AP @ IoU 0.50:0.95", ylim=(0, 1.08), title="average precision by area of the annotated object")
    return figure
