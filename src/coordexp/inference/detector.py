"""``from coordexp import Detector``: a checkpoint that answers for images, in the pixels of the images it was given."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from coordexp.data.dataset import Sample
from coordexp.data.image_sources import find_images
from coordexp.data.images import open_rgb
from coordexp.engine import check_backend
from coordexp.errors import DataError, require
from coordexp.evaluation.answers import ImageAnswer, answer_samples
from coordexp.evaluation.coco import to_coco
from coordexp.evaluation.drawing import draw_detections
from coordexp.geometry import pixel_box, pixel_ring
from coordexp.inference.session import (
    BATCH_SIZE,
    SEED,
    Backend,
    InferenceSession,
    PredictOptions,
    check_classes,
    inference_config,
    open_session,
)
from coordexp.records import ImageRecord
from coordexp.rollouts import DatasetSeeds

ImageLike = str | Path | Image.Image | np.ndarray
"""A file, a PIL image, or an array (height, width, 3) or (height, width) of uint8, in RGB order."""


class Detector:
    """A checkpoint, loaded once, that answers for any number of images.

    Images are resized to the resolution of the training data, if the checkpoint has it; answers are in the pixels of
    the given images. Prompt, number type and limits are those of the checkpoint's own run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: Backend = "hf",
        device: str | None = None,
        batch_size: int = BATCH_SIZE,
        max_new_tokens: int | None = None,
        prompt: str | None = None,
        dtype: str | None = None,
        scores: bool = True,
        classes: Sequence[str] = (),
        seed: int = SEED,
    ) -> None:
        """
        Args:
            model: a checkpoint's folder, or a run's output_dir (adapters too).
            backend: transformers ("hf") or vLLM in this process ("vllm").
            device: "cpu" never uses a GPU; None uses one if there is one.
            batch_size: images answered at once.
            max_new_tokens: longest answer; it, ``prompt`` and ``dtype`` are the run's own if None.
            classes: the only names that answers may contain; empty for any.
            scores: False skips the forward pass that scores an answer.

        Raises:
            CheckpointError, VocabError: no such checkpoint, or one without coordinate tokens.
            MissingDependency: vLLM is not installed.
        """
        options = PredictOptions(backend, batch_size, max_new_tokens, prompt, dtype, device == "cpu", seed)
        config = inference_config(model, options)
        check_backend(config.rollout_matching, bool(classes))
        self._seed = seed
        self._scores = scores
        self._open = ExitStack()
        self._session: InferenceSession = self._open.enter_context(
            open_session(config, Path(model), check_classes(classes))
        )

    @overload
    def predict(self, images: Image.Image | np.ndarray) -> Detections: ...
    @overload
    def predict(self, images: Sequence[ImageLike]) -> list[Detections]: ...
    @overload
    def predict(self, images: str | Path) -> Any: ...

    def predict(self, images: ImageLike | Sequence[ImageLike]) -> Detections | list[Detections]:
        """Find objects in one image, or in each of several.

        Args:
            images: a file, a PIL image or an array gives one :class:`Detections`; a folder, a pattern (``"*.jpg"``), a
                JSONL or a sequence gives a list, in order.

        Raises:
            DataError: an image that cannot be read, named. RolloutError: as the backend's.
        """
        if isinstance(images, str | Path):
            single = Path(images).is_file() and Path(images).suffix.lower() != ".jsonl"
            detections = self._answer(list(find_images([Path(images)]).records), {})
            return detections[0] if single else detections
        if isinstance(images, Image.Image | np.ndarray):
            return self._predict_each([images])[0]
        return self._predict_each(list(images))

    def close(self) -> None:
        self._open.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _predict_each(self, images: Sequence[ImageLike]) -> list[Detections]:
        given: dict[str, Image.Image] = {}
        records: list[ImageRecord] = []
        # Every backend reads files, also one that is another process; PNG keeps every pixel.
        with tempfile.TemporaryDirectory(prefix="coordexp-") as folder:
            for number, image in enumerate(images):
                if isinstance(image, str | Path):
                    (record,) = find_images([Path(image)]).records
                    records.append(replace(record, sample_id=f"{number}: {image}"))
                    continue
                name = f"image {number}"
                if isinstance(image, Image.Image):
                    pixels = (ImageOps.exif_transpose(image) or image).convert("RGB")
                elif image.dtype == np.uint8 and (image.ndim == 2 or (image.ndim == 3 and image.shape[2] in (3, 4))):
                    pixels = Image.fromarray(image).convert("RGB")
                else:
                    raise DataError(
                        f"{name}: an array of shape {image.shape} and type {image.dtype}; expected uint8 of (height, "
                        "width, 3), RGB"
                    )
                given[name] = pixels
                path = Path(folder) / f"{number}.png"
                pixels.save(path, compress_level=1)
                records.append(ImageRecord(name, path, *pixels.size, ()))
            return self._answer(records, given)

    def _answer(self, records: Sequence[ImageRecord], given: Mapping[str, Image.Image]) -> list[Detections]:
        session = self._session
        size, scorer = session.backend.batch_size, session.scorer if self._scores else None
        answers: list[ImageAnswer] = []
        for start in range(0, len(records), size):
            batch = [Sample(record, session.encoder.encode(record)) for record in records[start : start + size]]
            seeds = DatasetSeeds(self._seed, start)
            answers += answer_samples(batch, session.backend, session.vocab, seeds, scorer)
        return [as_detections(answer, given.get(answer.sample_id)) for answer in answers]


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One object. ``box`` is (x1, y1, x2, y2) and ``polygon`` its vertices (None if the model wrote a box), both in
    pixels of the given image; ``score`` is 0..1, or None if it was not scored."""

    name: str
    score: float | None
    box: tuple[float, float, float, float]
    polygon: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class Detections:
    """The objects of one image of ``width`` x ``height`` pixels, in the model's order.

    ``truncated``: the answer reached its longest length; ``dropped`` counts unreadable entries by reason; ``text`` is
    the answer itself. ``image``: the given image if it was not a file.
    """

    source: str
    width: int
    height: int
    objects: tuple[FoundObject, ...]
    truncated: bool
    dropped: Mapping[str, int]
    text: str
    answer: ImageAnswer = field(repr=False, compare=False)
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
        return [obj.name for obj in self.objects]

    @property
    def scores(self) -> np.ndarray:
        """(N,) float32; NaN where nothing was scored."""
        return np.array([np.nan if obj.score is None else obj.score for obj in self.objects], dtype=np.float32)

    def draw(self, path: str | Path | None = None) -> Image.Image:
        """The image with its objects drawn over it, also written to ``path``. Raises DataError if its file is gone."""
        image = self.image if self.image is not None else open_rgb(Path(self.answer.image))
        drawn = draw_detections(image, self.answer.pred)
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            drawn.save(path)
        return drawn

    def to_coco(self, image_id: int = 1, category_ids: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Results in COCO's format: ``bbox`` as x, y, width, height in pixels, and ``segmentation`` of polygons.

        ``category_ids`` by name; other names get the next numbers in order of appearance. Every result has its
        ``category_name`` too.
        """
        number = dict(category_ids or {})
        for name in self.names:
            number.setdefault(name, max(number.values(), default=0) + 1)
        results = to_coco([self.answer], None, 1.0, number, [image_id]).results
        for result, name in zip(results, self.names, strict=True):
            result["category_name"] = name
            del result["area"]
        return results

    def to_supervision(self) -> Any:
        """``supervision.Detections`` with ``xyxy``, ``confidence`` (1 where nothing was scored), ``class_id`` by name
        in alphabetical order, the names in ``data["class_name"]``, and masks where the model wrote polygons. Raises
        MissingDependency if the package supervision is not installed."""
        supervision = require("supervision", "Detections.to_supervision()")
        number = {name: k for k, name in enumerate(sorted(set(self.names)))}
        masks = None
        if any(self.polygons):
            masks = np.zeros((len(self), self.height, self.width), dtype=bool)
            for mask, obj in zip(masks, self.answer.pred, strict=True):
                canvas = Image.new("1", (self.width, self.height))
                ImageDraw.Draw(canvas).polygon(list(pixel_ring(obj, self.width, self.height)), fill=1)
                mask[:] = np.array(canvas)
        return supervision.Detections(
            xyxy=self.boxes,
            mask=masks,
            confidence=np.nan_to_num(self.scores, nan=1.0),
            class_id=np.array([number[name] for name in self.names], dtype=int),
            data={"class_name": np.array(self.names, dtype=str)},
        )


def as_detections(answer: ImageAnswer, image: Image.Image | None = None) -> Detections:
    """A line of ``predictions.jsonl`` in pixels of its image; ``image`` if that is not a file."""
    width, height = answer.width, answer.height
    objects = []
    for obj in answer.pred:
        polygon = pixel_ring(obj, width, height) if obj.kind == "poly" else None
        objects.append(FoundObject(obj.desc, obj.score, pixel_box(obj, width, height), polygon))
    source = answer.sample_id if image is not None else answer.image
    return Detections(
        source, width, height, tuple(objects), answer.truncated, answer.dropped, answer.text, answer, image
    )
