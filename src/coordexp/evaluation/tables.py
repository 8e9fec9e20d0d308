"""Evaluations as tables for the terminal. Descriptions are data, never markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from coordexp.evaluation.compare import Difference
from coordexp.evaluation.summary import GroupRow, Summary

_AP = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR100")
_RATES = ("duplicate_rate", "giant_rate", "invalid_rate", "truncated_rate", "repeat_terminated_rate", "empty_rate",
          "pred_per_image", "gt_per_image", "tokens_per_image")  # fmt: skip


def summary_tables(summary: Summary, title: str, max_classes: int = 20) -> Iterable[Table]:
    """Figures of the set, by class (the ``max_classes`` most frequent), and by density."""
    figures = summary.figures
    table = Table(title=Text(title), title_justify="left")
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
    yield _rows("by class" + (f" ({more} more in per_class.csv)" if more else ""), "class", shown)
    yield _rows("by density", "image with", summary.by_density)


def _rows(title: str, first: str, rows: Sequence[GroupRow]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in ("gt", "pred", "right", "prec.", "recall", "F1", "IoU", "AP"):  # short: eight fit beside a name
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        rates = (row.precision, row.recall, row.f1, row.mean_matched_iou, row.ap)
        cells = ["–" if value is None else f"{value:.3f}" for value in rates]
        table.add_row(Text(row.name), str(row.gt), str(row.pred), str(row.matched), *cells)
    return table


def differences_table(differences: Sequence[Difference], names: tuple[str, str], confidence: float) -> Table:
    """Both runs' figures and the interval of their difference; bold where it leaves zero out."""
    table = Table(title=f"b − a, {confidence:.0%} of paired resamples; bold: zero is outside", title_justify="left")
    table.add_column("figure")
    for label, name in zip("ab", names, strict=True):
        table.add_column(Text(f"{label}: {name}"), justify="right")
    table.add_column("b − a", justify="right")
    table.add_column("interval", justify="right")
    for found in differences:
        style = "bold" if found.is_clear else ""
        table.add_row(
            found.name,
            f"{found.a:.3f}",
            f"{found.b:.3f}",
            Text(f"{found.b - found.a:+.3f}", style),
            Text(f"{found.low:+.3f} … {found.high:+.3f}", style),
        )
    return table


def differences_json(
    differences: Sequence[Difference], names: tuple[str, str], confidence: float
) -> Mapping[str, object]:
    """The same for machines."""
    return {
        "a": names[0],
        "b": names[1],
        "confidence": confidence,
        "figures": [
            {"name": d.name, "a": d.a, "b": d.b, "difference": d.b - d.a, "low": d.low, "high": d.high,
             "clear": d.is_clear}
            for d in differences
        ],
    }  # fmt: skip
