"""Answers as pictures, and a sheet of a dataset's objects, drawn as a model would read them back.

Objects of that sheet were serialised, tokenised, parsed and decoded: a coordinate bug anywhere on that way shows at a
glance, as what is left of an object is not what was annotated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.images import open_rgb
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.evaluation.detection import ignored_predictions, match_answer, match_by_desc
from coordexp.evaluation.drawing import colours_by_name, draw_objects
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject, ImageRecord

_FOUND, _MISSED, _WRONG, _SOFT = "#189646", "#e68c00", "#cd1e2d", "#70757d"
_SMALLEST, _LARGEST = 320, 640  # pixels of a panel's longer side: thin outlines can be seen, photos do not fill a wall
_BAR = 26
_COMPRESSION = 1  # of PNG: a sheet is looked at once, and the default takes four times as long for a fifth less


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
