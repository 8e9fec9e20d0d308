"""Objects drawn as a model would read them back: serialised, tokenised, parsed, decoded, drawn.

A coordinate bug anywhere on that way shows at a glance: what is drawn is not what was annotated, but what is left of it
after the whole way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.images import open_rgb
from coordexp.evaluation.drawing import colours_by_name, draw_objects
from coordexp.parsing import parse_rollout
from coordexp.records import GTObject, ImageRecord

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
    sheet.save(path)
    return path


def _tile(image: Image.Image, objects: Sequence[GTObject], colour_of: dict[str, str]) -> Image.Image:
    scale = (_TILE - 4) / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    draw_objects(image, [(obj, colour_of.get(obj.desc, "white")) for obj in objects])
    tile = Image.new("RGB", (_TILE, _TILE), "#202020")
    tile.paste(image, (2, 2))
    return tile
