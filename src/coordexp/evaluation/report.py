"""Detection figures and comparisons as tables, answers as pictures, and a sheet of a dataset's objects,
drawn as a model would read them back.

Objects of that sheet were serialised, tokenised, parsed and decoded: a coordinate bug anywhere on that way shows at a
glance, as what is left of an object is not what was annotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.table import Table
from rich.text import Text

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.images import open_rgb
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.evaluation.compare import Comparison, Difference, GroupDifference
from coordexp.evaluation.detection import IOU_THRESHOLD, ignored_predictions, match_answer, match_by_desc
from coordexp.evaluation.drawing import colours_by_name, draw_objects
from coordexp.evaluation.summary import GroupRow, Summary
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject, ImageRecord

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

_FOUND, _MISSED, _WRONG, _SOFT = "#189646", "#e68c00", "#cd1e2d", "#70757d"
_SMALLEST, _LARGEST = 320, 640  # pixels of a panel's longer side: thin outlines can be seen, photos do not fill a wall
_BAR = 26
_COMPRESSION = 1  # of PNG: a sheet is looked at once, and the default takes four times as long for a fifth less


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


def telling_images(runs: Sequence[Sequence[ImageAnswer]], most: int) -> list[int]:
    """Indices of the images worth looking at: of one run those with most mistakes (missed or wrong), of several those
    in which the number of mistakes differs most. Of equal ones the earlier; none without a mistake."""
    mistakes_RN = [[_mistakes(answer) for answer in run] for run in runs]
    spread_N = [max(column) - min(column) if len(runs) > 1 else column[0] for column in zip(*mistakes_RN, strict=True)]
    return [n for n in sorted(range(len(spread_N)), key=lambda n: -spread_N[n])[:most] if spread_N[n]]


def _mistakes(answer: ImageAnswer) -> int:
    wrong = len(answer.pred) - len(ignored_predictions(answer))
    return len(answer.truth) + wrong - 2 * len(match_by_desc(answer.pred, answer.truth))


def draw_comparison(
    columns: Mapping[str, Sequence[ImageAnswer]], path: Path, max_rows: int = 6, across: int = 1
) -> None:
    """A PNG: for each image ground truth at the left, then each run's answer; ``across`` images side by side, at most
    ``max_rows`` rows of them.

    Green: found (equal description, IoU ≥ 0.5). Red: predicted, but not there. Orange, in the ground truth: missed by
    the last run. Grey: soft objects (dashed), and predictions that found one. Every column is as wide as the widest
    image.

    Raises:
        ValueError: there is no run, or no answer. DataError: an image cannot be read.
    """
    runs = list(columns.values())
    if not runs or not runs[0]:
        raise ValueError("nothing to draw: pass at least one run with at least one answer")
    images = [
        [_panel_truth(runs[-1][i]), *(_panel_prediction(run[i]) for run in runs)]
        for i in range(min(max_rows * across, len(runs[0])))
    ]
    across = min(across, len(images))
    rows = [list(chain.from_iterable(images[i : i + across])) for i in range(0, len(images), across)]
    width = max(panel.width for row in rows for panel in row)
    heights = [max(panel.height for panel in row) for row in rows]
    sheet = Image.new("RGB", (width * across * (1 + len(runs)), _BAR + sum(heights)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, name in enumerate(["ground truth", *columns] * across):
        draw.text((column * width + 6, 5), name, fill="black", font=_font(15))
    top = _BAR
    for row, height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            sheet.paste(panel, (column * width, top))
        top += height
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, compress_level=_COMPRESSION)


def _panel_truth(answer: ImageAnswer) -> Image.Image:
    matched = {j for _, j, _ in match_answer(answer)}
    return _panel(answer, [(obj, _colour(obj, j in matched, _MISSED)) for j, obj in enumerate(answer.gt or ())])


def _panel_prediction(answer: ImageAnswer) -> Image.Image:
    truth_of = {i: (answer.gt or ())[j] for i, j, _ in match_answer(answer)}
    return _panel(answer, [(obj, _colour(truth_of.get(i), i in truth_of, _WRONG)) for i, obj in enumerate(answer.pred)])


def _colour(annotation: GTObject | None, is_matched: bool, otherwise: str) -> str:
    if annotation is not None and annotation.soft is not None:
        return _SOFT
    return _FOUND if is_matched else otherwise


def _panel(answer: ImageAnswer, coloured: Sequence[tuple[GTObject | Detection, str]]) -> Image.Image:
    image = open_rgb(Path(answer.image))
    factor = max(1, round(_SMALLEST / max(image.size)))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((_LARGEST, _LARGEST))
    draw_objects(image, coloured, width=3)
    ImageDraw.Draw(image).rectangle([0, 0, image.width - 1, image.height - 1], outline="white", width=2)
    return image


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


_TILE = 320


def round_trip(objects: Sequence[GTObject], vocab: CoordVocab) -> list[GTObject]:
    """The objects that are read from the tokens of the text that is written for ``objects``. Text does not say which
    are soft: that is taken from the object of the same place."""
    parsed = parse_rollout(vocab.encode(serialize_objects(objects)), vocab, ended=True)
    softs = [obj.soft for obj in objects[: len(parsed.objects)]]
    softs += [None] * (len(parsed.objects) - len(softs))
    return [GTObject(obj.desc, obj.kind, obj.bins, soft) for obj, soft in zip(parsed.objects, softs, strict=True)]


def draw_contact_sheet(
    records: Sequence[ImageRecord],
    vocab: CoordVocab,
    path: Path,
    columns: int = 4,
    images: Sequence[Image.Image] | None = None,
) -> Path:
    """A PNG with a tile per record: its image, and its objects after the round trip, one colour per description.
    ``images``: in place of the records' files.

    Raises:
        DataError: an image cannot be read. ValueError: there is no record.
    """
    if not records:
        raise ValueError("nothing to draw: pass at least one record")
    colour_of = colours_by_name(obj for record in records for obj in record.objects)
    rows = -(-len(records) // columns)
    sheet = Image.new("RGB", (columns * _TILE, rows * _TILE), "#202020")
    for k, record in enumerate(records):
        image = open_rgb(record.image) if images is None else images[k]
        tile = _tile(image, round_trip(record.objects, vocab), colour_of)
        sheet.paste(tile, (k % columns * _TILE, k // columns * _TILE))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, compress_level=_COMPRESSION)
    return path


def _tile(image: Image.Image, objects: Sequence[GTObject], colour_of: dict[str, str]) -> Image.Image:
    scale = (_TILE - 4) / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    draw_objects(image, [(obj, colour_of.get(obj.desc, "white")) for obj in objects])
    tile = Image.new("RGB", (_TILE, _TILE), "#202020")
    tile.paste(image, (2, 2))
    return tile


_AP = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large", "AR100")
_RATES = ("duplicate_rate", "giant_rate", "invalid_rate", "truncated_rate", "repeat_terminated_rate", "empty_rate",
          "pred_per_image", "gt_per_image", "tokens_per_image")  # fmt: skip
_DIFFERENCE = ("a", "b", "b − a", "interval")


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
    """Eight short columns fit beside a name, with numbers of six digits: of images their number, else what is right."""
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
        Text(f"{difference.low:+.3f} … {difference.high:+.3f}", style),
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
    return {**asdict(difference), "difference": difference.b - difference.a, "clear": difference.is_clear}
