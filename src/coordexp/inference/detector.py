"""``from coordexp import Detector``: a checkpoint that answers for images, in the pixels of the images it was given."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from PIL import Image, ImageOps

from coordexp.config import resolved_rollout
from coordexp.data.image_sources import find_images
from coordexp.errors import DataError
from coordexp.evaluation.answers import make_answer
from coordexp.inference.asking import BATCH_SIZE, SEED, Asking, Backend, asking_config
from coordexp.inference.class_list import check_classes
from coordexp.inference.detections import Detections, as_detections
from coordexp.records import ImageRecord

if TYPE_CHECKING:
    from coordexp.inference.session import InferenceSession

ImageLike = str | Path | Image.Image | np.ndarray
"""A file, a PIL image, or an array (height, width, 3) or (height, width) of uint8, in RGB order."""


class Detector:
    """A checkpoint, loaded once, that answers for any number of images.

    Images are shown at the resolution that the model was trained at, where its training data says so; answers are in
    the pixels of the images as they were given. Prompt, number type and limits are those of the checkpoint's own run.
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
            backend: what generates: transformers ("hf") or vLLM in this process ("vllm").
            device: "cpu" stays off the GPU; None takes one where there is one.
            batch_size: images answered at once.
            max_new_tokens, prompt, dtype: None takes the run's own.
            classes: the only names that answers may hold; none: whatever the model writes.
            scores: False saves the forward pass that scores an answer.

        Raises:
            CheckpointError, VocabError: no such checkpoint, or one without coordinate tokens.
            MissingDependency: vLLM is not installed.
        """
        from coordexp.inference.session import open_session
        from coordexp.rollouts import check_backend

        asking = Asking(backend, batch_size, max_new_tokens, prompt, dtype, device == "cpu", seed)
        config = asking_config(model, asking)
        rollout = resolved_rollout(config)
        check_backend(rollout, bool(classes))
        self._seed = seed
        self._scores = scores
        self._batch_size = batch_size
        self._open = ExitStack()
        self._session: InferenceSession = self._open.enter_context(
            open_session(config, rollout, Path(model), check_classes(classes))
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
        """Give the engine and its memory back."""
        self._open.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                given[name] = pixels = as_rgb(image, name)
                path = Path(folder) / f"{number}.png"
                pixels.save(path, compress_level=1)
                records.append(ImageRecord(name, path, *pixels.size, ()))
            return self._answer(records, given)

    def _answer(self, records: Sequence[ImageRecord], given: Mapping[str, Image.Image]) -> list[Detections]:
        from coordexp.data.dataset import Sample
        from coordexp.evaluation.predict import predict
        from coordexp.rollouts import DatasetSeeds

        session = self._session
        size = session.backend.batch_size(self._batch_size)
        detections: list[Detections] = []
        for start in range(0, len(records), size):
            batch = [Sample(record, session.encoder.encode(record)) for record in records[start : start + size]]
            seeds, scorer = DatasetSeeds(self._seed, start), session.scorer if self._scores else None
            for item in predict(batch, session.backend, session.loaded.vocab, seeds, scorer):
                answer = make_answer(item.record, item.rollout, item.parsed, item.scores, annotated=False)
                detections.append(as_detections(answer, given.get(answer.sample_id)))
        return detections


def as_rgb(image: Image.Image | np.ndarray, name: str) -> Image.Image:
    """An upright RGB image. Raises DataError for arrays of another shape or number type."""
    if isinstance(image, Image.Image):
        return (ImageOps.exif_transpose(image) or image).convert("RGB")
    shape = image.shape
    if image.dtype != np.uint8 or not (image.ndim == 2 or (image.ndim == 3 and shape[2] in (3, 4))):
        raise DataError(
            f"{name}: an array of shape {shape} and type {image.dtype}; expected uint8 of (height, width, 3), RGB"
        )
    return Image.fromarray(image).convert("RGB")
