"""``from coordexp import Detector``: a checkpoint that answers for images, in the pixels of the images it was given."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn, TypedDict, Unpack, overload

import numpy as np
from PIL import Image

from coordexp.checkpoints.fetch import model_folder
from coordexp.data.class_list import choose_list
from coordexp.data.dataset import Sample
from coordexp.data.image_sources import as_path, find_images, is_pattern
from coordexp.data.images import array_problem, open_rgb, rgb_of, shape_problem
from coordexp.data.tiles import CutTiles, Tiling, tile_records, whole_of
from coordexp.engine.trainer.backends import check_backend
from coordexp.errors import ConfigError, DataError, DetectorClosed, whole_number
from coordexp.evaluation.answers import ImageAnswer, answer_samples, samples_of_batch
from coordexp.evaluation.confidence import at_least
from coordexp.evaluation.join_tiles import merge_tiles
from coordexp.evaluation.several_answers import merge_all
from coordexp.inference.detections import Detections, as_detections, without_answer
from coordexp.inference.session import (
    BATCH_SIZE,
    SEED,
    Backend,
    InferenceSession,
    check_device,
    checked_class_names,
    inference_config,
    open_session,
    size_note,
    with_several_answers,
)
from coordexp.records import ImageRecord
from coordexp.rollouts import DatasetSeeds

ImageLike = str | Path | Image.Image | np.ndarray | bytes
"""A file, a PIL image, an array (height, width, 3 or 4) or (height, width) of uint8 in RGB or RGBA, or an image file's
bytes. All are shown to the model in the same way (:mod:`coordexp.data.images`)."""


class _Options(TypedDict, total=False):
    # The keywords of Detector.predict.
    classes: Sequence[str] | None
    prompt: str | None
    min_confidence: float | None
    tiles: int | tuple[int, int] | None
    overlap: float | None


class Detector:
    """A checkpoint, loaded once, that answers for any number of images: ``detector(images)``.

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
        answers: int = 1,
        temperature: float | None = None,
    ) -> None:
        """
        Args:
            model: a checkpoint's folder, a run's output_dir (adapters too), or a model of the hub (``OWNER/NAME``,
                ``OWNER/NAME@REVISION``), which is fetched.
            backend: transformers ("hf") or vLLM in this process ("vllm").
            device: "cpu", "cuda" or "cuda:1"; None uses a GPU if there is one.
            batch_size: images answered at once.
            max_new_tokens: longest answer; it, ``prompt`` and ``dtype`` are the run's own if None.
            classes: the only names that answers may contain; empty for any.
            scores: False skips the forward pass that scores an answer.
            seed: of sampled answers.
            answers: per image, merged into one; the first is greedy, the others are sampled. Objects have ``answers``,
                the number of answers that contain them, which their confidence includes.
            temperature: of sampled answers; None is 0.7.

        Raises:
            ConfigError: a device that this machine lacks, or another impossible option.
            CheckpointError, VocabError: no such checkpoint, or one without coordinate tokens.
            MissingDependency: vLLM is not installed.
        """
        device = None if device is None else str(device)
        answers, batch_size = whole_number("answers", answers), whole_number("batch_size", batch_size)
        longest = None if max_new_tokens is None else whole_number("max_new_tokens", max_new_tokens)
        if temperature is not None and not (isinstance(temperature, Real) and 0 < temperature < float("inf")):
            raise ConfigError(f"temperature: {temperature} makes no sampled answers; give a number above 0, or None")
        if temperature is not None and answers == 1:
            raise ConfigError(f"temperature: {temperature:g}, but a single answer is greedy; give answers= too")
        seed = whole_number("seed", seed)
        model = model_folder(model)
        config = inference_config(
            model, backend=backend, batch_size=batch_size, max_new_tokens=longest, prompt=prompt, dtype=dtype,
            use_cpu=device == "cpu", seed=seed, temperature=temperature,
        )  # fmt: skip
        config = with_several_answers(config, answers)
        check_device(device, backend)
        check_backend(config.rollout_matching, bool(classes))
        class_names = checked_class_names(classes, model)
        self._model = model
        self._seed = seed
        self._answers = answers
        self._scores = scores
        self._class_names = class_names
        self._open = ExitStack()
        from coordexp.modeling.load import no_progress_bars  # torch and transformers take seconds to import

        with no_progress_bars():
            self._session: InferenceSession | None = self._open.enter_context(
                open_session(config, model, class_names, device)
            )
        self.classes = tuple(choose_list(checkpoint=self._session.classes, class_names=class_names))
        """The names whose positions are class ids: those of the checkpoint's training data, or else allowed ones."""

    @overload
    def predict(self, images: Image.Image | np.ndarray | bytes, **options: Unpack[_Options]) -> Detections: ...
    @overload  # a file, or a folder or pattern
    def predict(self, images: str | Path, **options: Unpack[_Options]) -> Any: ...
    @overload
    def predict(self, images: Sequence[ImageLike], **options: Unpack[_Options]) -> list[Detections]: ...

    def predict(
        self,
        images: Any,
        *,
        classes: Sequence[str] | None = None,
        prompt: str | None = None,
        min_confidence: float | None = None,
        tiles: int | tuple[int, int] | None = None,
        overlap: float | None = None,
    ) -> Detections | list[Detections]:
        """Find objects in one image, or in each of several.

        Args:
            images: a file, a PIL image, an array or bytes give one :class:`Detections`; a folder, a pattern
                (``"*.jpg"``), a JSONL or a sequence gives a list, in order.
            classes: the only names that these answers may contain; empty for any, None for the detector's own.
            prompt: instead of the detector's own.
            min_confidence: leave out objects with a lower one.
            tiles: answer tiles of this side, or (width, height), in pixels, and merge their answers: for small objects
                in large photographs.
            overlap: share of its side that a tile has at least from its neighbour, 0 to 0.9; None: 0.2.

        Raises:
            DataError: a single image that cannot be read; or something that is not an image, before any is answered. An
                unreadable image of several does not raise: its result has ``error``.
            ConfigError: ``classes`` with vLLM, or ``min_confidence`` without scores.
            DetectorClosed: after :meth:`close`. RolloutError: as the backend's.
        """
        if self._session is None:
            raise DetectorClosed("the detector is closed; make a new one")
        if min_confidence is not None and not (isinstance(min_confidence, Real) and 0 <= min_confidence <= 1):
            raise ConfigError(f"min_confidence: {min_confidence!r}; give a number from 0 to 1")
        if prompt is not None and not isinstance(prompt, str):
            raise ConfigError(f"prompt: {prompt!r}; give text")
        if min_confidence is not None and not self._scores and self._answers == 1:
            raise ConfigError("min_confidence: this detector was made with scores=False; leave one of them out")
        session, tiling = self._session, Tiling.asked(tiles, overlap)
        if prompt is not None:
            session = replace(session, encoder=replace(session.encoder, prompt=prompt))
        class_names = () if classes is None else checked_class_names(classes, self._model)
        if classes is not None:
            session = replace(session, backend=session.limited_to(class_names))
        names = tuple(choose_list(checkpoint=self.classes, class_names=class_names))
        single = not isinstance(images, str | Path) and is_image(images)
        with tempfile.TemporaryDirectory(prefix="coordexp-") as folder:
            if isinstance(images, str | Path):
                path = as_path(images)
                single = path.is_file() and path.suffix.lower() != ".jsonl"
                listed = find_images([path], skip_broken=not single)
                of_name = {record.sample_id: record for record in listed.records} | dict(listed.skipped)
                given, found = {}, {name: of_name[name] for name in listed.names}
            else:
                given, found = collect([images] if single else images, Path(folder), raises=single)
            answers = self._answer(session, found, tiling, Path(folder), raises=single)
        results = []
        for name, answer in answers.items():
            if isinstance(answer, str):
                source = name if isinstance(images, str | Path) else name.partition(": ")[2] or name
                results.append(without_answer(source, answer, names))
                continue
            if min_confidence is not None:
                ((answer,), _) = at_least([answer], min_confidence)
            results.append(as_detections(answer, given.get(name), names))
        if errors := [answer for answer in answers.values() if isinstance(answer, str)]:
            warnings.warn(
                f"{len(errors)} of {len(results)} images could not be read, their results have .error; the first: "
                f"{errors[0]}",
                stacklevel=2,
            )
        return results[0] if single else results

    __call__ = predict

    def close(self) -> None:
        """Give back the model's memory. The detector cannot be used afterwards."""
        self._session = None
        self._open.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Detector holds a loaded model, so no process can have a copy; make one there")

    def _answer(
        self,
        session: InferenceSession,
        found: Mapping[str, ImageRecord | str],
        tiling: Tiling | None,
        folder: Path,
        *,
        raises: bool,
    ) -> dict[str, ImageAnswer | str]:
        """The answer to each image, or why it cannot be read."""
        todo = [one for one in found.values() if isinstance(one, ImageRecord)]
        size = samples_of_batch(session.backend, self._answers)
        asked = todo if tiling is None else tile_records(todo, tiling)
        note = size_note(asked, session.preparation)
        if note is not None:
            warnings.warn(note, stacklevel=3)
        scorer = session.scorer if self._scores else None
        answers: dict[str, ImageAnswer] = {}  # of what is asked: images or tiles
        errors = {name: one for name, one in found.items() if isinstance(one, str)}
        shown = asked if tiling is None else CutTiles(asked, folder, size)
        for start in range(0, len(asked), size):
            batch = []
            for at in range(start, min(start + size, len(asked))):
                try:
                    record = shown[at]
                    batch.append(Sample(record, session.encoder.encode(record)))
                except DataError as error:
                    if raises:
                        raise
                    errors[whole_of(asked[at])] = str(error)
            seeds = DatasetSeeds(self._seed, start)
            if batch:
                answered = answer_samples(batch, session.backend, session.vocab, seeds, scorer, None, self._answers)
                answers |= {answer.sample_id: answer for answer in merge_all(answered, self._answers)}
        if tiling is not None:
            for record in todo:
                if record.sample_id not in errors:
                    tiles = [answers[tile.sample_id] for tile in tile_records([record], tiling)]
                    answers[record.sample_id] = merge_tiles(record, tiling, tiles)
        return {name: errors[name] if name in errors else answers[name] for name in found}


def is_image(given: object) -> bool:
    """Whether ``given`` is one image, not several: text is a path, which may name several."""
    return isinstance(given, Image.Image | np.ndarray | bytes)


def collect(images: Any, folder: Path, *, raises: bool) -> tuple[dict[str, Image.Image], dict[str, ImageRecord | str]]:
    """The images that are not files, and of each image its record, or why it cannot be read; by a name with the
    image's number. Every backend reads files, even one in another process, so images in memory are written to
    ``folder``, as PNG, which keeps every pixel. ``raises``: at the first unreadable image."""
    # The lines of an open file, and the numbers of a bytearray, are not images.
    no_list = isinstance(images, Mapping | bytearray | memoryview) or hasattr(images, "read")
    if no_list or not isinstance(images, Iterable):
        raise wrong_type("images", images)
    listed: list[Any] = list(images)
    for number, image in enumerate(listed):  # mistakes of the caller, before anything is read
        if isinstance(image, str | Path):
            path = as_path(image)
            if path.is_dir() or path.suffix.lower() == ".jsonl" or is_pattern(path):
                raise DataError(f"image {number}: {image} may name several images; give it alone, not in a list")
        elif not is_image(image):
            raise wrong_type(f"image {number}", image)
        elif isinstance(image, np.ndarray) and (problem := array_problem(image)) is not None:
            raise DataError(f"image {number}: {problem}")
    given: dict[str, Image.Image] = {}
    found: dict[str, ImageRecord | str] = {}
    for number, image in enumerate(listed):
        name = f"{number}: {image}" if isinstance(image, str | Path) else f"image {number}"
        try:
            if isinstance(image, str | Path):
                (record,) = find_images([Path(image)]).records
                found[name] = replace(record, sample_id=name)
                continue
            pixels = open_rgb(Path(name), data=image) if isinstance(image, bytes) else rgb_of(image, name)
            if (problem := shape_problem(*pixels.size)) is not None:
                raise DataError(f"{name}: {problem}")
        except DataError as error:
            if raises:
                raise
            found[name] = str(error)
            continue
        given[name] = pixels
        path = folder / f"{number}.png"
        pixels.save(path, compress_level=1)
        found[name] = ImageRecord(name, path, *pixels.size, ())
    return given, found


def wrong_type(name: str, given: object) -> DataError:
    expected = "a file, a PIL image, an array of uint8 (height, width, 3), an image file's bytes, or a list of those"
    return DataError(f"{name}: {type(given).__name__}; expected {expected}")
