"""What a :class:`~coordexp.inference.detector.Detector` found in an image, in that image's own pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from coordexp.data.images import open_rgb
from coordexp.evaluation.answers import Detection, ImageAnswer
from coordexp.evaluation.coco import to_results
from coordexp.evaluation.drawing import draw_detections
from coordexp.extras import require
from coordexp.geometry import pixel_box, pixel_ring


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One object. ``box`` is (x1, y1, x2, y2) and ``polygon`` its vertices (None where the model wrote a box), both in
    pixels of the image as it was given; ``score`` 0..1, None where nothing was scored."""

    name: str
    score: float | None
    box: tuple[float, float, float, float]
    polygon: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Detections:
    """What was found in one image of ``width`` x ``height`` pixels, in the order in which the model wrote it.

    ``truncated``: the answer reached its longest length; ``dropped`` counts entries that could not be read, by reason;
    ``text`` is the answer as it was written.
    """

    source: str
    width: int
    height: int
    objects: tuple[FoundObject, ...]
    truncated: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
    text: str = ""
    answer: ImageAnswer | None = field(default=None, repr=False, compare=False)
    image: Image.Image | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.objects)

    def __iter__(self) -> Iterator[FoundObject]:
        return iter(self.objects)

    @property
    def boxes(self) -> np.ndarray:
        """(N, 4) float32: x1, y1, x2, y2 in pixels."""
        return np.array([obj.box for obj in self.objects], dtype=np.float32).reshape(-1, 4)

    @property
    def polygons(self) -> list[tuple[tuple[float, float], ...] | None]:
        """The vertices of each object in pixels; None for a box."""
        return [obj.polygon for obj in self.objects]

    @property
    def names(self) -> list[str]:
        """The objects' names, in the order of the answer."""
        return [obj.name for obj in self.objects]

    @property
    def scores(self) -> np.ndarray:
        """(N,) float32; NaN where nothing was scored."""
        return np.array([np.nan if obj.score is None else obj.score for obj in self.objects], dtype=np.float32)

    def draw(self, path: str | Path | None = None) -> Image.Image:
        """The image with its objects drawn over it; written to ``path`` where one is given.

        Raises:
            DataError: the image's file is gone.
        """
        drawn = draw_detections(self._image(), self._answer().pred)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            drawn.save(path)
        return drawn

    def to_coco(self, image_id: int = 1, category_ids: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Results in COCO's format: ``bbox`` as x, y, width, height in pixels, and ``segmentation`` of polygons.

        ``category_ids``: by name; names that it lacks, or all without it, are numbered behind it in order of
        appearance. Every result holds its ``category_name`` too.
        """
        return to_results(self._answer(), image_id, category_ids)

    def to_supervision(self) -> Any:
        """``supervision.Detections`` with ``xyxy``, ``confidence`` (1 where nothing was scored), ``class_id`` by
        name in alphabetical order, the names in ``data["class_name"]``, and masks where the model wrote polygons.

        Raises:
            MissingDependency: the package supervision is not installed.
        """
        supervision = require("supervision", "Detections.to_supervision()")
        number = {name: k for k, name in enumerate(sorted(set(self.names)))}
        masks = None
        if any(obj.polygon is not None for obj in self.objects):
            masks = np.stack([self._mask(detection) for detection in self._answer().pred])
        return supervision.Detections(
            xyxy=self.boxes,
            mask=masks,
            confidence=np.nan_to_num(self.scores, nan=1.0),
            class_id=np.array([number[name] for name in self.names], dtype=int),
            data={"class_name": np.array(self.names, dtype=str)},
        )

    def _mask(self, detection: Detection) -> np.ndarray:
        canvas = Image.new("1", (self.width, self.height))
        ImageDraw.Draw(canvas).polygon(list(pixel_ring(detection, self.width, self.height)), fill=1)
        return np.array(canvas, dtype=bool)

    def _answer(self) -> ImageAnswer:
        assert self.answer is not None, "made by a Detector"
        return self.answer

    def _image(self) -> Image.Image:
        return self.image if self.image is not None else open_rgb(Path(self._answer().image))


def as_detections(answer: ImageAnswer, image: Image.Image | None = None) -> Detections:
    """A line of ``predictions.jsonl`` in pixels of its image; ``image``: where it is no file."""
    width, height = answer.width, answer.height
    objects = tuple(
        FoundObject(
            obj.desc,
            obj.score,
            pixel_box(obj, width, height),
            pixel_ring(obj, width, height) if obj.kind == "poly" else None,
        )
        for obj in answer.pred
    )
    source = answer.sample_id if image is not None else answer.image
    return Detections(source, width, height, objects, answer.truncated, answer.dropped, answer.text, answer, image)
