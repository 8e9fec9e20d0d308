"""Objects drawn over images: answers one by one, runs side by side, and a sheet of a dataset's objects."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path, PurePosixPath

from PIL import ExifTags, Image, ImageDraw, ImageFont

from coordexp.coords import CoordVocab, serialize_objects
from coordexp.data.files import naming
from coordexp.data.images import JPEG_SUFFIXES, open_rgb, rgb_of
from coordexp.evaluation.answers import ImageAnswer, ScoredObject
from coordexp.evaluation.detection import judged, match_answer
from coordexp.geometry import pixel_box, pixel_ring
from coordexp.parsing import parse_rollout
from coordexp.printable import printable
from coordexp.reading import OWN_MARK
from coordexp.records import GTObject, ImageRecord, PredictedObject

_Point = tuple[float, float]
Drawable = GTObject | PredictedObject | ScoredObject

_DASH, _GAP = 6, 5  # pixels
_COLOURS = (
    "#e6194b", "#1f9d3a", "#4363d8", "#d95f02", "#911eb4", "#008080", "#9a6324", "#c71585", "#000075",
    "#5b7f00", "#0087c5", "#b8860b", "#7a3e9d", "#00795c", "#a0303f", "#555f6b", "#c2410c", "#2f4b9c",
)  # fmt: skip
_FOUND, _MISSED, _WRONG, _SOFT = "#189646", "#e68c00", "#cd1e2d", "#70757d"
_SMALLEST, _LARGEST = 320, 640  # pixels of a panel's longer side: thin outlines can be seen, photos do not fill a wall
_READABLE = 640  # pixels: images less than half as long are enlarged before names are drawn over them
_BAR = 26
_TILE, _CAPTION = 320, 16
_COVERED = 3  # heights of a name: an object that is lower is hidden by it
_TINY, _SEEN, _ZOOM = 20, 60, 8  # pixels on a tile: smaller objects are enlarged, to this size, by at most this factor
_NAME = 40  # characters of a file name that fit under a tile
_COMPRESSION = 1  # of PNG: the default takes four times as long for files a fifth smaller


def draw_detections(image: Image.Image, detections: Sequence[ScoredObject]) -> Image.Image:
    """A copy of ``image`` with an outline, a name and a confidence for each object; one colour per name. Small images
    are enlarged by a whole factor, so that names cover little of them."""
    factor = max(1, _READABLE // max(image.size))
    shown = rgb_of(image, "the image")
    drawn = shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(drawn)
    side = max(drawn.size)
    width, font = max(2, round(side / 250)), ImageFont.load_default(max(11, side / 45))
    colour_of = colours_by_name(detections)
    for obj in detections:
        colour = colour_of[obj.desc]
        ring = _draw_outline(draw, obj, drawn.size, colour, width)
        number = obj.score if obj.confidence is None else obj.confidence
        text = printable(obj.desc) if number is None else f"{printable(obj.desc)} {number:.2f}"
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        x = max(0.0, min(min(x for x, _ in ring), drawn.width - (right - left)))
        above = min(y for _, y in ring) - (bottom - top) - width
        y = max(0.0, min(above, drawn.height - (bottom - top)))
        draw.rectangle([x, y, x + right - left, y + bottom - top], fill=colour)
        draw.text((x - left, y - top), text, fill="white", font=font)
    return drawn


def colours_by_name(objects: Iterable[Drawable]) -> dict[str, str]:
    """A colour per description. A description keeps its colour from picture to picture, unless another one in the same
    picture has it already."""
    taken: set[int] = set()
    colour_of = {}
    for name in sorted({obj.desc for obj in objects}):
        preferred = zlib.crc32(name.encode()) % len(_COLOURS)
        free = (slot % len(_COLOURS) for slot in range(preferred, preferred + len(_COLOURS)))
        slot = next((slot for slot in free if slot not in taken), preferred)
        taken.add(slot)
        colour_of[name] = _COLOURS[slot]
    return colour_of


def draw_objects(
    image: Image.Image, coloured: Sequence[tuple[Drawable, str]], labels: bool = True, width: int = 2
) -> None:
    """Draw outlines over ``image``, soft objects dashed, and descriptions on white: for sheets of small images. A
    description is inside its object, or above or below one that it would cover."""
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(11)
    for obj, colour in coloured:
        ring = _draw_outline(draw, obj, image.size, colour, width)
        if labels:
            left, top = min(x for x, _ in ring), min(y for _, y in ring)
            name = printable(obj.desc)
            _, _, right, bottom = draw.textbbox((0, 0), name, font=font)
            far_right, low = max(x for x, _ in ring), max(y for _, y in ring)
            y = top + 1
            if far_right - left < right + 4 or low - top < _COVERED * bottom:
                y = top - bottom - 1 if top > bottom else low + 2
            corner = (max(0, min(left + 2, image.width - right)), max(0, min(y, image.height - bottom)))
            draw.rectangle(draw.textbbox(corner, name, font=font), fill="white")
            draw.text(corner, name, fill=colour, font=font)


def _draw_outline(
    draw: ImageDraw.ImageDraw, obj: Drawable, size: tuple[int, int], colour: str, width: int
) -> tuple[_Point, ...]:
    # Dashed if the object is soft. Returns its corners in pixels.
    right, bottom = size[0] - 1, size[1] - 1  # the outermost pixels are the last to be seen
    ring = tuple((min(x, right), min(y, bottom)) for x, y in pixel_ring(obj, *size))
    closed = [*ring, ring[0]]
    lines: list[Sequence[_Point]] = []
    if getattr(obj, "soft", None) is None:
        lines.append(closed)
    else:
        for (x1, y1), (x2, y2) in pairwise(closed):
            length = math.hypot(x2 - x1, y2 - y1)
            for start in range(0, math.ceil(length), _DASH + _GAP):
                a, b = start / length, min(length, start + _DASH) / length
                lines.append([(x1 + a * (x2 - x1), y1 + a * (y2 - y1)), (x1 + b * (x2 - x1), y1 + b * (y2 - y1))])
    for line in lines:
        draw.line(line, fill=colour, width=width, joint="curve")
    return ring


def save_drawings(answers: Sequence[ImageAnswer], folder: Path) -> list[Path]:
    """Each image with its answer, in ``folder`` by its own name (JPEG stays JPEG, the rest becomes PNG). Raises
    DataError if an image is gone since it was answered."""
    paths: dict[Path, None] = {}
    for number, answer in enumerate(answers):
        # The sample's own relative path, or its image's name for a line of a dataset.
        name, given = PurePosixPath(Path(answer.image).name), PurePosixPath(answer.sample_id)
        if given.name == name.name and not given.is_absolute() and ".." not in given.parts:
            name = given
        plain = path = folder / name.with_suffix(".jpg" if name.suffix.lower() in JPEG_SUFFIXES else ".png")
        while path in paths:
            path, number = plain.with_name(f"{plain.stem}.{number}{plain.suffix}"), number + 1
        path.parent.mkdir(parents=True, exist_ok=True)
        image = open_rgb(Path(answer.image))
        with naming(path):
            draw_detections(image, answer.pred).save(path, quality=90)  # PNG ignores it
        paths[path] = None
    return list(paths)


def most_informative_images(runs: Sequence[Sequence[ImageAnswer]], most: int) -> list[int]:
    """Indices of at most ``most`` images: those with most mistakes (missed or wrong) of one run, or those in which the
    runs' numbers of mistakes differ most. Ties go to the earlier image; images without either are left out."""

    def mistakes(answer: ImageAnswer) -> int:
        objects, truth, assign = judged(answer)
        return len(objects) + len(truth) - 2 * len(assign(True))

    mistakes_RN = [[mistakes(answer) for answer in run] for run in runs]
    spread_N = [max(column) - min(column) if len(runs) > 1 else column[0] for column in zip(*mistakes_RN, strict=True)]
    return [n for n in sorted(range(len(spread_N)), key=lambda n: -spread_N[n])[:most] if spread_N[n]]


def draw_comparison(
    columns: Mapping[str, Sequence[ImageAnswer]], path: Path, max_rows: int = 6, across: int = 1
) -> None:
    """A PNG: for each image ground truth at the left, then each run's answer; ``across`` images side by side, at most
    ``max_rows`` rows of them. Every column is as wide as the widest image.

    Green: found (equal description, IoU ≥ 0.5). Red: predicted, but not there. Orange, in the ground truth: missed by
    the last run. Grey: soft objects (dashed), and predictions that found one. Below each run are its numbers of found,
    wrong and missed objects in the picture. Raises ValueError for no run or no answer, DataError for an image that
    cannot be read.
    """
    runs = list(columns.values())
    if not runs or not runs[0]:
        raise ValueError("nothing to draw: pass at least one run with at least one answer")

    def colour(annotation: GTObject | None, is_matched: bool, otherwise: str) -> str:
        if annotation is not None and annotation.soft is not None:
            return _SOFT
        return _FOUND if is_matched else otherwise

    images = []
    counts = [Counter[str]() for _ in runs]  # of each run, by colour
    for answers in list(zip(*runs, strict=True))[: max_rows * across]:
        matches = [match_answer(answer) for answer in answers]
        found = {j for _, j, _ in matches[-1]}
        truth = [(obj, colour(obj, j in found, _MISSED)) for j, obj in enumerate(answers[-1].gt or ())]
        panels = [_panel(answers[-1], truth)]
        for answer, matched, count in zip(answers, matches, counts, strict=True):
            truth_of = {i: (answer.gt or ())[j] for i, j, _ in matched}
            coloured = [(obj, colour(truth_of.get(i), i in truth_of, _WRONG)) for i, obj in enumerate(answer.pred)]
            panels.append(_panel(answer, coloured))
            count.update(shade for _, shade in coloured)
            annotated = sum(obj.soft is None for obj in answer.gt or ())
            count[_MISSED] += annotated - sum(shade == _FOUND for _, shade in coloured)
        images.append(panels)
    across = min(across, len(images))
    rows = [list(chain.from_iterable(images[i : i + across])) for i in range(0, len(images), across)]
    width = max(panel.width for row in rows for panel in row)
    heights = [max(panel.height for panel in row) for row in rows]
    sheet = Image.new("RGB", (width * across * (1 + len(runs)), _BAR + sum(heights) + _BAR), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    for column, name in enumerate(["ground truth", *columns] * across):
        draw.text((column * width + 6, 5), name, fill="black", font=font)
    for column, count in enumerate(counts, start=1):
        x = column * width + 6.0
        for shade, what in ((_FOUND, "found"), (_WRONG, "wrong"), (_MISSED, "missed")):
            text = f"{count[shade]} {what}  "
            draw.text((x, sheet.height - _BAR + 5), text, fill=shade, font=font)
            x += draw.textlength(text, font)
    top = _BAR
    for row, height in zip(rows, heights, strict=True):
        for column, panel in enumerate(row):
            sheet.paste(panel, (column * width, top))
        top += height
    _save(sheet, path)


def _save(sheet: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    marked = Image.Exif()
    marked[ExifTags.Base.Software] = OWN_MARK
    with naming(path):
        sheet.save(path, compress_level=_COMPRESSION, exif=marked)


def _panel(answer: ImageAnswer, coloured: Sequence[tuple[GTObject | ScoredObject, str]]) -> Image.Image:
    image = open_rgb(Path(answer.image))
    factor = max(1, round(_SMALLEST / max(image.size)))
    image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((_LARGEST, _LARGEST))
    draw_objects(image, coloured, width=3)
    ImageDraw.Draw(image).rectangle([0, 0, image.width - 1, image.height - 1], outline="white", width=2)
    return image


def round_trip(objects: Sequence[GTObject], vocab: CoordVocab) -> list[GTObject]:
    """``objects`` serialised, tokenised and parsed again: a coordinate bug anywhere on that way becomes visible. The
    text does not mark soft objects: that is copied from the object at the same index."""
    parsed = parse_rollout(vocab.encode(serialize_objects(objects)), vocab, ended=True)
    softs = [obj.soft for obj in objects[: len(parsed.objects)]]
    softs += [None] * (len(parsed.objects) - len(softs))
    return [GTObject(obj.desc, obj.kind, obj.bins, soft) for obj, soft in zip(parsed.objects, softs, strict=True)]


def _tiniest(objects: Sequence[GTObject], size: tuple[int, int]) -> tuple[int, tuple[float, float]] | None:
    # How much to enlarge a tile for the smallest object that is tiny on it, and the object's middle there.
    found: tuple[int, tuple[float, float]] | None = None
    for obj in objects:
        x1, y1, x2, y2 = pixel_box(obj, *size)
        zoom = min(_ZOOM, math.ceil(_SEEN / max(x2 - x1, y2 - y1, 1)))
        if max(x2 - x1, y2 - y1) < _TINY and (found is None or zoom > found[0]):
            found = zoom, ((x1 + x2) / 2, (y1 + y2) / 2)
    return found


def draw_contact_sheet(
    records: Sequence[ImageRecord],
    vocab: CoordVocab,
    path: Path,
    columns: int = 4,
    images: Sequence[Image.Image] | None = None,
) -> Path:
    """A PNG with a tile per record: its image, its objects after the round trip, one colour per description, and the
    end of its line's and its file's name. If an object is tiny there, the next tile shows it enlarged.
    ``images`` replace the records' files. Raises DataError if an image cannot be read, ValueError without records."""
    if not records:
        raise ValueError("nothing to draw: pass at least one record")
    colour_of = colours_by_name(obj for record in records for obj in record.objects)
    tiles: list[tuple[Image.Image, str]] = []
    for k, record in enumerate(records):
        image = open_rgb(record.image) if images is None else images[k]
        coloured = [(obj, colour_of.get(obj.desc, "white")) for obj in round_trip(record.objects, vocab)]
        scale = (_TILE - 4) / max(image.size)
        tile = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
        draw_objects(tile, coloured)
        line, name = record.sample_id.rpartition(":")[2], record.image.name
        tiles.append((tile, f"{line}: {name if len(name) <= _NAME else '…' + name[-_NAME + 1 :]}"))
        tiny = _tiniest(record.objects, tile.size) if images is None else None
        if tiny is not None:
            zoom, middle = tiny
            enlarged = image.resize((tile.width * zoom, tile.height * zoom))
            draw_objects(enlarged, coloured)
            left, top = (max(0, round(m * zoom - _TILE / 2 + 2)) for m in middle)
            left, top = min(left, enlarged.width - tile.width), min(top, enlarged.height - tile.height)
            detail = enlarged.crop((left, top, left + tile.width, top + tile.height))
            tiles.append((detail, f"{line}: enlarged {zoom} times"))
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile, _ in row) + 4 + _CAPTION for row in rows]
    sheet = Image.new("RGB", (columns * _TILE, sum(heights)), "#202020")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    top = 0
    for row, height in zip(rows, heights, strict=True):
        for column, (tile, caption) in enumerate(row):
            sheet.paste(tile, (column * _TILE + 2, top + 2))
            draw.text((column * _TILE + 4, top + height - _CAPTION), caption, fill="white", font=font)
        top += height
    _save(sheet, path)
    return path
