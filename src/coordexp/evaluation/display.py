"""Evaluations as tables for the terminal. Descriptions are data, never markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.table import Table
from rich.text import Text

from coordexp.evaluation.compare import Comparison, Difference, GroupDifference
from coordexp.evaluation.detection import IOU_THRESHOLD
from coordexp.evaluation.summary import GroupRow, Summary

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
_DIFFERENCE = ("a", "b", "b − a", "interval")


def figures_table(columns: Mapping[str, Mapping[str, float]], title: str) -> Table:
    """One row per figure, one column per run; in each row the best run is bold."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(Text(name), justify="right")
    for key, (label, more_is_better) in FIGURES.items():
        values = [run[key] for run in columns.values()]
        best = None if more_is_better is None or len(values) < 2 else (max if more_is_better else min)(values)
        cells = [Text(f"{value:.3f}", "bold" if value == best else "") for value in values]
        table.add_row(label, *cells)
    return table


def summary_tables(summary: Summary, title: str, max_classes: int = 20) -> Iterable[Table]:
    """Figures of the set, by class (the ``max_classes`` most frequent), and by density."""
    figures = summary.figures
    table = _table(title)
    table.caption = Text(f"f1 to mean_matched_iou: matched one to one, mask IoU ≥ {IOU_THRESHOLD:g}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name in ("f1", "precision", "recall", *(n for n in figures if "@" in n), "f1_any_desc", "mean_matched_iou"):
        # Nothing below the line: the figure is written as a number for machines, and shown as none.
        below = {"precision": figures["pred_objects"], "recall": figures["gt_objects"]}.get(name, 1)
        table.add_row(name, f"{figures[name]:.3f}" if below else "–")
    table.add_section()
    for prefix in ("", "segm_"):
        for name in _AP:
            if prefix + name in figures:
                table.add_row(prefix + name, f"{figures[prefix + name]:.3f}")
    table.add_section()
    for name in _RATES:
        table.add_row(name, f"{figures[name]:.3f}")
    yield table
    shown = summary.by_class[:max_classes]
    more = len(summary.by_class) - len(shown)
    yield _rows("by class" + (f" ({more} more in per_class.csv of --output)" if more else ""), "class", shown)
    by_density = [replace(row, name=row.name.removesuffix(" objects")) for row in summary.by_density]
    yield _rows("by density: images with so many annotated objects", "with", by_density, of_images=True)


def _rows(title: str, first: str, rows: Sequence[GroupRow], of_images: bool = False) -> Table:
    """A name and eight columns fit a terminal. By density there is the number of images, by class that of matches."""
    table = _table(title)
    table.add_column(first)
    columns = ("images", "gt", "pred") if of_images else ("gt", "pred", "right")
    for name in (*columns, "prec.", "recall", "F1", "IoU", "AP"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = (row.images, row.gt, row.pred) if of_images else (row.gt, row.pred, row.matched)
        rates = (row.precision, row.recall, row.f1, row.mean_matched_iou, row.ap)
        cells = ["–" if value is None else f"{value:.3f}" for value in rates]
        table.add_row(Text(row.name), *map(str, counts), *cells)
    return table


def comparison_tables(comparison: Comparison, names: tuple[str, str], max_classes: int = 20) -> Iterable[Table]:
    """Both runs' figures and the intervals of their differences, bold where zero is outside: of all images, by class
    (the ``max_classes`` most frequent), and by density."""
    table = _table(
        f"a: {names[0]}\nb: {names[1]}\n{comparison.images} images; interval: {_share(comparison)}; "
        "bold: zero is outside"
    )
    table.add_column("figure")
    for name in _DIFFERENCE:
        table.add_column(name, justify="right", no_wrap=True)
    for one in comparison.figures:
        table.add_row(one.name, *_cells(one))
    yield table
    more = len(comparison.by_class) - max_classes
    title = "F1 by class" + (f" ({more} more with --json)" if more > 0 else "")
    yield _groups(title, "class", comparison.by_class[:max_classes], comparison)
    yield _groups("F1 by density", "image with", comparison.by_density, comparison)


def _groups(title: str, first: str, rows: Sequence[GroupDifference], comparison: Comparison) -> Table:
    table = _table(title)
    lucky = (1 - comparison.confidence) * len(rows)
    if lucky >= 0.5:  # many intervals, some of which leave zero out although nothing differs
        table.caption = Text(f"of {len(rows)} rows, {lucky:.0f} would be bold by luck alone")
    table.add_column(first)
    for name in ("gt", *_DIFFERENCE):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row.name), str(row.gt), *_cells(row.f1))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", caption_justify="left")


def _share(comparison: Comparison) -> str:
    return f"{comparison.confidence:.0%} of {comparison.resamples} paired resamples"


def _cells(difference: Difference) -> tuple[str, str, Text, Text]:
    style = "bold" if difference.is_clear else ""
    return (
        f"{difference.a:.3f}",
        f"{difference.b:.3f}",
        Text(f"{difference.b - difference.a:+.3f}", style),
        Text("–" if difference.interval is None else "{:+.3f} … {:+.3f}".format(*difference.interval), style),
    )


def comparison_json(comparison: Comparison, names: tuple[str, str]) -> Mapping[str, object]:
    """The same for machines."""
    return {
        "a": names[0],
        "b": names[1],
        "images": comparison.images,
        "confidence": comparison.confidence,
        "resamples": comparison.resamples,
        "seed": comparison.seed,
        "figures": [_difference(one) for one in comparison.figures],
        "by_class": [_group(row) for row in comparison.by_class],
        "by_density": [_group(row) for row in comparison.by_density],
    }


def _group(row: GroupDifference) -> Mapping[str, object]:
    figures = [one for one in (row.f1, row.ap) if one is not None]
    return {"name": row.name, "gt": row.gt, "figures": [_difference(one) for one in figures]}


def _difference(difference: Difference) -> Mapping[str, object]:
    low, high = difference.interval or (None, None)
    return {"name": difference.name, "a": difference.a, "b": difference.b, "low": low, "high": high,
            "difference": difference.b - difference.a, "clear": difference.is_clear}  # fmt: skip
