"""Objects drawn over their image: in given colours and small letters on sheets, or as large as the image asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from PIL import Image, ImageDraw, ImageFont

from coordexp.data.images import IMAGE_SUFFIXES, JPEG_SUFFIXES, open_rgb
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.geometry.boxes import pixel_ring
from coordexp.records import GTObject, PredictedObject

_Point = tuple[float, float]
Drawable = GTObject | PredictedObject | Detection

_DASH, _GAP = 6, 5  # pixels
_COLOURS = ("#e6194b", "#1f9d3a", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#c71585", "#000075")


def draw_detections(image: Image.Image, detections: Sequence[Detection]) -> Image.Image:
    """A copy of ``image`` with an outline, a name and a score for each object; one colour per name."""
    drawn = image.convert("RGB")
    drawn = drawn.copy() if drawn is image else drawn
    draw = ImageDraw.Draw(drawn)
    side = max(drawn.size)
    width, font = max(2, round(side / 250)), ImageFont.load_default(max(11, side / 45))
    colour_of = colours_by_name(detections)
    for obj in detections:
        colour = colour_of[obj.desc]
        ring = _draw_outline(draw, obj, drawn.size, colour, width)
        text = obj.desc if obj.score is None else f"{obj.desc} {obj.score:.2f}"
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        x = max(0.0, min(min(x for x, _ in ring), drawn.width - (right - left)))
        above = min(y for _, y in ring) - (bottom - top) - width
        y = max(0.0, min(above, drawn.height - (bottom - top)))
        draw.rectangle([x, y, x + right - left, y + bottom - top], fill=colour)
        draw.text((x - left, y - top), text, fill="white", font=font)
    return drawn


def colours_by_name(objects: Iterable[Drawable]) -> dict[str, str]:
    """A colour for each description, in the order of the alphabet; they come again where there are many."""
    names = sorted({obj.desc for obj in objects})
    return {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(names)}


def draw_objects(
    image: Image.Image, coloured: Sequence[tuple[Drawable, str]], labels: bool = True, width: int = 2
) -> None:
    """Outlines over ``image``, each object in its colour, soft ones dashed, and their descriptions, moved to where they
    fit. For sheets of small images: names stand inside of their objects, on white, and hide little of the others."""
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(11)
    for obj, colour in coloured:
        ring = _draw_outline(draw, obj, image.size, colour, width)
        if labels:
            left, top = min(x for x, _ in ring), min(y for _, y in ring)
            _, _, right, bottom = draw.textbbox((0, 0), obj.desc, font=font)
            corner = (max(0, min(left + 2, image.width - right)), max(0, min(top + 1, image.height - bottom)))
            draw.rectangle(draw.textbbox(corner, obj.desc, font=font), fill="white")
            draw.text(corner, obj.desc, fill=colour, font=font)


def _draw_outline(
    draw: ImageDraw.ImageDraw, obj: Drawable, size: tuple[int, int], colour: str, width: int
) -> tuple[_Point, ...]:
    """Dashed where the object is soft. Returns: its corners in pixels."""
    ring = pixel_ring(obj, *size)
    closed = [*ring, ring[0]]
    for line in [closed] if getattr(obj, "soft", None) is None else _dashes(closed):
        draw.line(line, fill=colour, width=width, joint="curve")
    return ring


def _dashes(outline: Sequence[_Point]) -> list[tuple[_Point, _Point]]:
    """The drawn parts of a dashed line along ``outline``, each side beginning with one."""
    parts = []
    for (x1, y1), (x2, y2) in pairwise(outline):
        length = math.hypot(x2 - x1, y2 - y1)
        for start in range(0, math.ceil(length), _DASH + _GAP):
            a, b = start / length, min(length, start + _DASH) / length
            parts.append(((x1 + a * (x2 - x1), y1 + a * (y2 - y1)), (x1 + b * (x2 - x1), y1 + b * (y2 - y1))))
    return parts


def save_drawings(answers: Sequence[ImageAnswer], folder: Path) -> list[Path]:
    """Each image with its answer, in ``folder`` by its own name (JPEG stays JPEG, the rest becomes PNG).

    Raises:
        DataError: an image is gone since it was answered.
    """
    paths: list[Path] = []
    taken: set[Path] = set()
    for number, answer in enumerate(answers):
        path = folder / _file_name(answer)
        if path in taken:
            path = path.with_name(f"{path.stem}.{number}{path.suffix}")
        taken.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        image = open_rgb(Path(answer.image))
        draw_detections(image, answer.pred).save(path, quality=90)  # which PNG does not read
        paths.append(path)
    return paths


def _file_name(answer: ImageAnswer) -> Path:
    """The sample's own relative path where it has one; of a dataset's line its image's name."""
    name = PurePosixPath(answer.sample_id)
    is_file = name.suffix.lower() in IMAGE_SUFFIXES
    if not is_file or name.is_absolute() or ".." in name.parts:
        name = PurePosixPath(Path(answer.image).name)
    return Path(name.with_suffix(".jpg" if name.suffix.lower() in JPEG_SUFFIXES else ".png"))
