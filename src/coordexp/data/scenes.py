"""Generated scenes for the demo and the tests: coloured shapes on a textured ground, with boxes and polygons.

A scene is a pure function of (``SCENES_VERSION``, spec, seed, index): the same on every machine, in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from coordexp.data.jsonl import write_jsonl
from coordexp.geometry import to_bin
from coordexp.records import GTObject, ImageRecord

JSONL = "scenes.jsonl"
SCENES_VERSION = 2  # in version 1 the boxes of the same objects were up to a pixel off

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 48, 49),
    "green": (38, 166, 91),
    "blue": (52, 101, 214),
    "yellow": (240, 196, 25),
    "purple": (142, 68, 173),
}
SHAPES = ("circle", "square", "triangle")

_OVERSAMPLE = 2  # drawn at twice the size and halved, so that edges are smooth


@dataclass(frozen=True, slots=True)
class SceneSpec:
    """The look of one family of scenes. Sizes are pixels of the finished image."""

    size: int = 128
    min_objects: int = 1
    max_objects: int = 4
    min_side: int = 24
    max_side: int = 56
    max_overlap: float = 0.05  # intersection over the smaller box, for any two objects
    same_class: float = 0.0  # chance that an object repeats the class of an earlier one
    max_kinds: int | None = None  # classes of one scene; all further objects repeat one of them
    empty: float = 0.05  # chance of a scene without objects
    margin: float = 0.0  # annotations are drawn wider than the object, by this share of its sides, on every side


SPARSE = SceneSpec()
MODERATE = SceneSpec(max_objects=6, min_side=22, max_side=52)
DENSE = SceneSpec(min_objects=3, max_objects=7, min_side=20, max_side=48, max_overlap=0.25, same_class=0.35)
# A crowd of similar objects, like cells, people or cars, on which long answers loop, repeat themselves and stop early;
# small enough for a model of a few million parameters to learn within an hour of one core.
_SMALL_CROWD = SceneSpec(
    min_objects=6, max_objects=14, min_side=16, max_side=30, max_overlap=0.3, same_class=0.85, max_kinds=2
)
SPECS = {
    "sparse": SPARSE,
    "moderate": MODERATE,
    "framed": SceneSpec(min_objects=2, max_objects=5, max_overlap=0.15, same_class=0.35, margin=0.22),
    "dense": DENSE,
    "crowd": replace(_SMALL_CROWD, size=192, min_objects=10, max_objects=40),
    "small_crowd": _SMALL_CROWD,
}


def make_scene(spec: SceneSpec, seed: int, index: int) -> tuple[Image.Image, tuple[GTObject, ...]]:
    """Draw scene ``index`` of the stream ``seed``. Triangles carry ``poly`` geometry, other shapes ``bbox_2d``."""
    rng = np.random.default_rng([1, seed, index])  # as version 1 drew its scenes
    # The ground is a dull two-colour gradient with noise: never as saturated as an object.
    size = spec.size * _OVERSAMPLE
    corners = rng.integers(90, 235, size=(2, 1, 1, 1)) + rng.integers(-18, 19, size=(2, 1, 1, 3))
    ramp = np.linspace(0.0, 1.0, size)
    ramp = ramp[None, :, None] if rng.random() < 0.5 else ramp[:, None, None]
    ground = corners[0] * (1 - ramp) + corners[1] * ramp + rng.normal(0, 6, size=(size, size, 1))
    canvas = Image.fromarray(np.clip(np.broadcast_to(ground, (size, size, 3)), 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(canvas)
    objects: list[GTObject] = []
    boxes: list[tuple[float, ...]] = []
    wanted = 0 if rng.random() < spec.empty else int(rng.integers(spec.min_objects, spec.max_objects + 1))
    for _ in range(40 * wanted):  # a crowded scene may end with fewer objects than wanted, never with more overlap
        if len(objects) == wanted:
            break
        side = rng.uniform(spec.min_side, spec.max_side)
        aspect = rng.uniform(0.8, 1.25)
        w, h = side * math.sqrt(aspect), side / math.sqrt(aspect)
        x, y = rng.uniform(1, spec.size - 2 - w), rng.uniform(1, spec.size - 2 - h)
        # On the grid of the drawing: an annotated edge is the drawn one, not near it.
        box = x1, y1, x2, y2 = tuple(round(v * _OVERSAMPLE) / _OVERSAMPLE for v in (x, y, x + w, y + h))
        overlaps = (  # intersection over the smaller box
            max(0.0, min(x2, c) - max(x1, a))
            * max(0.0, min(y2, d) - max(y1, b))
            / min((x2 - x1) * (y2 - y1), (c - a) * (d - b))
            for a, b, c, d in boxes
        )
        if any(overlap > spec.max_overlap for overlap in overlaps):
            continue
        if objects and (len({obj.desc for obj in objects}) == spec.max_kinds or rng.random() < spec.same_class):
            colour, shape = objects[int(rng.integers(len(objects)))].desc.split()
        else:
            colour, shape = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))
        boxes.append(box)
        shade = tuple(int(np.clip(c + rng.integers(-12, 13), 0, 255)) for c in COLOURS[colour])
        # PIL includes the last pixels that it is given: the box goes to their outer edges.
        left, top, right, bottom = (round(v * _OVERSAMPLE) - i // 2 for i, v in enumerate(box))
        outline: tuple[float, ...] = box
        if shape == "triangle":
            apex = x1 + (x2 - x1) * rng.uniform(0.3, 0.7)
            outline = (apex, y1, x2, y2, x1, y2)  # top-most vertex first, clockwise
            draw.polygon([math.floor(apex * _OVERSAMPLE), top, right, bottom, left, bottom], fill=shade)
        elif shape == "circle":
            draw.ellipse((left, top, right, bottom), fill=shade)
        else:
            draw.rectangle((left, top, right, bottom), fill=shade)
        # The annotation is wider than the outline by the spec's margin, about the middle of the box.
        middle = ((x1 + x2) / 2, (y1 + y2) / 2)
        grown = (middle[i % 2] + (v - middle[i % 2]) * (1 + 2 * spec.margin) for i, v in enumerate(outline))
        kind = "poly" if shape == "triangle" else "bbox_2d"
        objects.append(GTObject(f"{colour} {shape}", kind, tuple(to_bin(v, spec.size) for v in grown)))
    return canvas.resize((spec.size, spec.size), Image.Resampling.BOX), tuple(objects)


def write_scenes(folder: Path, count: int, spec: SceneSpec, seed: int) -> Path:
    """Write scenes 0..count−1 as ``images/*.png`` and ``scenes.jsonl`` below ``folder``; return the JSONL's path. An
    older JSONL is removed first: its images are replaced."""
    jsonl = folder / JSONL
    (folder / "images").mkdir(parents=True, exist_ok=True)
    jsonl.unlink(missing_ok=True)
    records = []
    for index in range(count):
        image, objects = make_scene(spec, seed, index)
        path = folder / "images" / f"{index:06d}.png"
        image.save(path, compress_level=1)
        records.append(ImageRecord(f"scene-{seed}-{index}", path, spec.size, spec.size, objects))
    write_jsonl(records, jsonl)
    return jsonl
