"""Answers drawn over their images, lines and names as large as the image asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from PIL import Image, ImageDraw, ImageFont

from coordexp.data.convert.prepare import JPEG_SUFFIXES
from coordexp.data.images import IMAGE_SUFFIXES, open_rgb
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.geometry.pixels import pixel_ring

_COLOURS = ("#e6194b", "#1f9d3a", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#c71585", "#000075")


def draw_detections(image: Image.Image, detections: Sequence[Detection]) -> Image.Image:
    """A copy of ``image`` with an outline, a name and a score for each object; one colour per name."""
    drawn = image.convert("RGB")
    drawn = drawn.copy() if drawn is image else drawn
    draw = ImageDraw.Draw(drawn)
    side = max(drawn.size)
    width, font = max(2, round(side / 250)), ImageFont.load_default(max(11, side / 45))
    names = sorted({obj.desc for obj in detections})
    colour_of = {name: _COLOURS[k % len(_COLOURS)] for k, name in enumerate(names)}
    for obj in detections:
        ring = pixel_ring(obj, *drawn.size)
        colour = colour_of[obj.desc]
        draw.line([*ring, ring[0]], fill=colour, width=width, joint="curve")
        text = obj.desc if obj.score is None else f"{obj.desc} {obj.score:.2f}"
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        x = max(0.0, min(min(x for x, _ in ring), drawn.width - (right - left)))
        above = min(y for _, y in ring) - (bottom - top) - width
        y = max(0.0, min(above, drawn.height - (bottom - top)))
        draw.rectangle([x, y, x + right - left, y + bottom - top], fill=colour)
        draw.text((x - left, y - top), text, fill="white", font=font)
    return drawn


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
