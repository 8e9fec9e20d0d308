"""The result of a :class:`~coordexp.inference.detector.Detector` for one image: objects in its pixels."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image

from coordexp.data.class_list import ClassList, ClassNumbers, choose_list
from coordexp.data.files import is_same_file
from coordexp.data.images import open_rgb
from coordexp.errors import DataError, require
from coordexp.evaluation.answers import ImageAnswer
from coordexp.evaluation.coco_results import coco_shape, to_coco, with_scores
from coordexp.evaluation.drawing import draw_detections
from coordexp.geometry import pixel_box, pixel_ring
from coordexp.printable import printable

_NOTEBOOK = 800  # pixels of the longer side of a picture in a notebook


@dataclass(frozen=True, slots=True)
class Detection:
    """One object. ``box`` is (x1, y1, x2, y2) and ``polygon`` its vertices (None if the model wrote a box), both in
    pixels of the given image. ``confidence``: the probability that the object is right; ``score``: its rank among
    others, for average precision. Both are 0..1, or None if it was not scored. ``answers``: number of the image's
    answers that contain the object, None for a single answer."""

    name: str
    score: float | None
    box: tuple[float, float, float, float]
    polygon: tuple[tuple[float, float], ...] | None = None
    confidence: float | None = None
    answers: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Detections:
    """The objects of one image of ``width`` x ``height`` pixels, in the model's order.

    ``found[0]`` is an object; ``found[:3]`` and ``found[found.confidences > 0.5]`` are Detections.

    ``truncated``: the answer reached its longest length; ``dropped`` counts unreadable entries by reason; ``text`` is
    the answer itself. ``image``: the given image if it was not a file. ``classes``: the names whose positions are class
    ids. ``error``: why the image could not be read, for an image of a list, which then has no objects.
    """

    source: str
    width: int
    height: int
    objects: tuple[Detection, ...]
    truncated: bool
    dropped: Mapping[str, int]
    text: str
    answer: ImageAnswer = field(compare=False)
    image: Image.Image | None = field(default=None, compare=False)
    classes: tuple[str, ...] = field(default=(), compare=False)
    error: str | None = None

    def __len__(self) -> int:
        return len(self.objects)

    def __iter__(self) -> Iterator[Detection]:
        return iter(self.objects)

    @overload
    def __getitem__(self, which: int) -> Detection: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int] | Sequence[bool] | np.ndarray) -> Detections: ...

    def __getitem__(self, which: Any) -> Detection | Detections:
        if isinstance(which, int | np.integer):
            return self.objects[which]
        if not isinstance(which, slice):
            which = np.asarray(which, dtype=None if len(which) else int)
        kept = np.arange(len(self))[which].tolist()
        answer = replace(self.answer, pred=tuple(self.answer.pred[k] for k in kept))
        return replace(self, objects=tuple(self.objects[k] for k in kept), answer=answer)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in Counter(self.names).most_common())
        problem = "" if self.problem is None else f"; {self.problem}"
        return printable(f"<Detections {self.source} {self.width}x{self.height}: {counts or 'nothing'}{problem}>")

    @property
    def problem(self) -> str | None:
        """Why objects may be missing: ``error``, or an answer that was cut off or has unreadable parts. None if nothing
        is wrong."""
        return self.error or self.answer.problem

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
        return [obj.name for obj in self.objects]

    @property
    def confidences(self) -> np.ndarray:
        """(N,) float32: the probability that each object is right; NaN where nothing was scored."""
        return np.array([np.nan if o.confidence is None else o.confidence for o in self.objects], dtype=np.float32)

    @property
    def scores(self) -> np.ndarray:
        """(N,) float32, to rank objects by; NaN where nothing was scored."""
        return np.array([np.nan if obj.score is None else obj.score for obj in self.objects], dtype=np.float32)

    def plot(self) -> Image.Image:
        """The image with its objects drawn over it. Raises DataError if its file is gone."""
        if self.error is not None:
            raise DataError(f"there is nothing to draw: {self.error}")
        image = self.image if self.image is not None else open_rgb(Path(self.answer.image))
        return draw_detections(image, self.answer.pred)

    def draw(self, path: str | Path | None = None) -> Image.Image:
        """As :meth:`plot`, also written to ``path``. Raises DataError if that is the image itself, or no picture's
        name."""
        if path is not None and Image.registered_extensions().get(Path(path).suffix.lower()) not in Image.SAVE:
            raise DataError("is not the name of a picture; end it in .png, .jpg or .webp", path=path)
        if path is not None and self.image is None and is_same_file(Path(path), Path(self.answer.image)):
            raise DataError("is the image that was answered; name another file for the drawn one", path=Path(path))
        drawn = self.plot()
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            drawn.save(path)
        return drawn

    def save(self, path: str | Path) -> None:
        """Write the drawn image to ``path``."""
        self.draw(path)

    def show(self) -> None:
        """Show the drawn image: in a notebook below the cell, else in the system's viewer."""
        ipython = sys.modules.get("IPython")
        if ipython is not None and ipython.get_ipython() is not None:
            require("IPython.display", "Detections.show()").display(self.plot())
        else:
            self.plot().show()

    def _repr_png_(self) -> bytes | None:
        try:
            drawn, data = self.plot(), io.BytesIO()
        except DataError:  # an answer's text has no image; a notebook shows the repr then
            return None
        drawn.thumbnail((_NOTEBOOK, _NOTEBOOK))
        drawn.save(data, "PNG")
        return data.getvalue()

    def to_json(self, indent: int | None = None) -> str:
        """The image, its size, its objects in pixels, and what may be missing, as text."""
        objects = [
            {"name": o.name, "confidence": o.confidence, "score": o.score, "box": o.box, "polygon": o.polygon}
            | ({} if o.answers is None else {"answers": o.answers})
            for o in self.objects
        ]
        fields = {"image": self.source, "width": self.width, "height": self.height, "objects": objects,
                  "truncated": self.truncated, "dropped": dict(self.dropped), "error": self.error}  # fmt: skip
        return json.dumps(fields, ensure_ascii=False, indent=indent)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row per object: image, name, confidence, score, x1, y1, x2, y2, polygon. Raises
        MissingDependency if pandas is not installed."""
        pandas = require("pandas", "Detections.to_pandas()")
        rows = [(self.source, o.name, o.confidence, o.score, *o.box, o.polygon) for o in self.objects]
        columns = ["image", "name", "confidence", "score", "x1", "y1", "x2", "y2", "polygon"]
        return pandas.DataFrame(rows, columns=columns)

    def to_coco(self, image_id: int = 1, category_ids: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Results in COCO's format: ``bbox`` as x, y, width, height in pixels, and ``segmentation`` of polygons.

        ``category_ids`` by name; None numbers :attr:`classes` from 1. All other names share the next number. Every
        result has its ``category_name`` too.

        Raises:
            DataError: neither the checkpoint nor the caller gives a class list, or the caller an empty one.
        """
        numbers = self._numbers(category_ids, 1, "category_ids={…}")
        results = to_coco([with_scores(self.answer)], None, numbers, [image_id]).results
        for result, name in zip(results, self.names, strict=True):
            result["category_name"] = name
            del result["area"]
        return results

    def _numbers(self, users: ClassList | None, first: int, option: str) -> ClassNumbers:
        listed = choose_list(users, checkpoint=self.classes)
        if not listed and self.objects:
            raise DataError(f"the checkpoint has no class list, so class ids would differ by image; give {option}")
        return ClassNumbers.of(listed, first)

    def to_supervision(self, classes: Sequence[str] | None = None, masks: bool | None = None) -> Any:
        """``supervision.Detections``: ``xyxy``, ``confidence`` (1 where nothing was scored), ``class_id``,
        ``class_name`` in ``data``, and with ``masks`` the masks of all objects, as pycocotools draws them. None: if the
        model wrote a polygon here. ``supervision.Detections.merge`` needs masks of all images or of none.

        A class id is the name's position in ``classes`` (None: :attr:`classes`), so it is the same for every image.
        All other names share the next id, ``len(classes)``.

        Raises:
            DataError: neither the checkpoint nor the caller gives a class list, or the caller an empty one.
            MissingDependency: the package supervision is not installed.
        """
        numbers = self._numbers(classes, 0, "classes=[…]")
        supervision = require("supervision", "Detections.to_supervision()")
        masks_NHW = None
        if any(self.polygons) if masks is None else masks:
            from pycocotools import mask as coco_mask

            rings = [coco_shape(obj, self.answer)["segmentation"][0] for obj in self.answer.pred]
            masks_HWN = np.zeros((self.height, self.width, 0))
            if rings:
                encoded: Any = coco_mask.frPyObjects(rings, self.height, self.width)
                masks_HWN = coco_mask.decode(encoded)
            masks_NHW = np.ascontiguousarray(masks_HWN.transpose(2, 0, 1).astype(bool))
        return supervision.Detections(
            xyxy=self.boxes,
            mask=masks_NHW,
            confidence=np.nan_to_num(self.confidences, nan=1.0),
            class_id=np.array([numbers[name] for name in self.names], dtype=int),
            data={"class_name": np.array(self.names, dtype=str)},
        )


def as_detections(answer: ImageAnswer, image: Image.Image | None = None, classes: Sequence[str] = ()) -> Detections:
    """A line of ``predictions.jsonl`` in pixels of its image; ``image`` if that is not a file."""
    width, height = answer.width, answer.height
    objects = []
    for obj in answer.pred:
        polygon = pixel_ring(obj, width, height) if obj.kind == "poly" else None
        box = pixel_box(obj, width, height)
        objects.append(Detection(obj.desc, obj.score, box, polygon, obj.confidence, obj.answers))
    return Detections(
        source=answer.sample_id if image is not None else answer.image,
        width=width,
        height=height,
        objects=tuple(objects),
        truncated=answer.truncated,
        dropped=answer.dropped,
        text=answer.text,
        answer=replace(answer, original=None),  # pixels are those of the given image
        image=image,
        classes=tuple(classes),
    )


def without_answer(source: str, error: str, classes: Sequence[str] = ()) -> Detections:
    """The result of an image that could not be read."""
    return replace(as_detections(ImageAnswer(source, source, 0, 0, None, ()), None, classes), error=error)
