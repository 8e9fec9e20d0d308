"""Objects drawn as a model would read them back: serialised, tokenised, parsed, decoded, drawn.

A coordinate bug anywhere on that way shows at a glance: what is drawn is not what was annotated, but what is left of it
after the whole way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.images import open_rgb
from coordexp.evaluation.answers import Detection
from coordexp.parsing import parse_rollout
from coordexp.records import NUM_BINS, GTObject, ImageRecord, PredictedObject

_Point = tuple[float, float]

_TILE = 320
_DASH, _GAP = 6, 5  # pixels
_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000", "#000075")


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
    names = sorted({obj.desc for record in records for obj in record.objects})
    colour_of = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(names)}
    rows = -(-len(records) // columns)
    sheet = Image.new("RGB", (columns * _TILE, rows * _TILE), "#202020")
    for k, record in enumerate(records):
        image = open_rgb(record.image) if images is None else images[k]
        tile = _tile(image, round_trip(record.objects, vocab), colour_of)
        sheet.paste(tile, (k % columns * _TILE, k // columns * _TILE))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path


def _tile(image: Image.Image, objects: Sequence[GTObject], colour_of: dict[str, str]) -> Image.Image:
    scale = (_TILE - 4) / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    draw_objects(image, [(obj, colour_of.get(obj.desc, "white")) for obj in objects])
    tile = Image.new("RGB", (_TILE, _TILE), "#202020")
    tile.paste(image, (2, 2))
    return tile


def draw_objects(
    image: Image.Image,
    coloured: Sequence[tuple[GTObject | PredictedObject | Detection, str]],
    labels: bool = True,
    width: int = 2,
) -> None:
    """Outlines over ``image``, each object in its colour, soft ones dashed, and their descriptions, moved to where they
    fit."""
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(11)
    for obj, colour in coloured:
        xs = [k / (NUM_BINS - 1) * (image.width - 1) for k in obj.bins[0::2]]
        ys = [k / (NUM_BINS - 1) * (image.height - 1) for k in obj.bins[1::2]]
        points = list(zip(xs, ys, strict=True))
        if obj.kind == "bbox_2d":
            (x1, y1), (x2, y2) = points
            points = [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
        outline = [*points, points[0]]
        for line in [outline] if getattr(obj, "soft", None) is None else _dashes(outline):
            draw.line(line, fill=colour, width=width, joint="curve")
        if labels:
            _, _, right, bottom = draw.textbbox((0, 0), obj.desc, font=font)
            corner = (max(0, min(min(xs) + 2, image.width - right)), max(0, min(min(ys) + 1, image.height - bottom)))
            draw.rectangle(draw.textbbox(corner, obj.desc, font=font), fill="white")
            draw.text(corner, obj.desc, fill=colour, font=font)


def _dashes(outline: Sequence[_Point]) -> list[tuple[_Point, _Point]]:
    """The drawn parts of a dashed line along ``outline``, each side beginning with one."""
    parts = []
    for (x1, y1), (x2, y2) in pairwise(outline):
        length = math.hypot(x2 - x1, y2 - y1)
        for start in range(0, math.ceil(length), _DASH + _GAP):
            a, b = start / length, min(length, start + _DASH) / length
            parts.append(((x1 + a * (x2 - x1), y1 + a * (y2 - y1)), (x1 + b * (x2 - x1), y1 + b * (y2 - y1))))
    return parts
